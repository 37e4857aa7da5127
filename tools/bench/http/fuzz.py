"""Kind `http-fuzz`: generated requests for the HTTP gateway, beside idle connections, slow readers and a client that behaves.

The client chats alone first, then beside the idle connections and the slow readers, then beside the attack, too.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from tools.bench.experiment import Context, Experiment
from tools.bench.findings import COUNT, Finding, at_least, at_most, equal, summarise, without_target
from tools.bench.http.home import HttpHome, http_home
from tools.bench.http.models import TINY, chat_directory
from tools.bench.http.requests import unknown_token
from tools.bench.processes import HubProcess
from tools.bench.results import Summary, Table
from tools.bench.watch import peak_bytes

Beside = Literal["nothing", "idle", "attack"]
_MODEL = "tiny"
_BATCH = 5000  # requests of a row
_BATCH_SECONDS = 900.0
_NUM_STRANGERS = 20  # well-formed tokens that the home does not know
_CHAT = {"model": _MODEL, "messages": [{"role": "user", "content": "Is the light on?"}], "max_tokens": 8}
_MEGABYTE = 1e6
_MOST_IDLE_BYTES, _MOST_PEAK_BYTES = 80 * _MEGABYTE, 120 * _MEGABYTE  # targets, resident
_MOST_GROWTH_BYTES = 1 * _MEGABYTE  # target over the last half, between the medians of its two halves
_MEGABYTES = "{:.1f} MB".format
_MILLISECONDS = "{:.1f} ms".format


class HttpFuzzRow(BaseModel):
    """Some seconds of the client that behaves, beside what `beside` names; of an attack, a batch of its requests."""

    model_config = ConfigDict(frozen=True)

    beside: Beside
    chats: tuple[float, ...]  # seconds that each took
    failed: tuple[str, ...] = ()
    resident_bytes: int  # of the gateway, afterwards
    peak_bytes: int  # of the gateway since its start
    descriptors: int  # of the gateway
    kinds: dict[str, int] = {}  # requests of the attack
    statuses: dict[str, int] = {}  # of the first answers; some broken requests have none
    faults: tuple[str, ...] = ()  # some of them
    num_faults: int = 0
    tracebacks: int = 0  # in the log of the gateway and the coordinator, since the start

    @property
    def num_requests(self) -> int:
        return sum(self.kinds.values())


class HttpFuzz(Experiment):
    """Batches of generated requests, until `requests` have been sent, with `--resume` over several runs."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(HttpFuzzRow)

    requests: int = Field(100_000, ge=1)
    connections: int = Field(24, ge=1)  # of the attack, at once
    idle: int = Field(200, ge=0)  # connections that say nothing
    slow: int = Field(2, ge=0)  # clients that hardly read
    quiet_seconds: float = Field(5.0, gt=0)  # of the chats beside no attack
    seed: int = 1

    def measure(self, context: Context) -> Iterator[HttpFuzzRow]:
        yield from context.known
        sent = sum(row.num_requests for row in context.known)
        context.report("making the model")
        model = chat_directory(TINY, context.folder / _MODEL)
        with (
            http_home(context, model, 1, 1000.0, "--context", "192", "--sequences", "16") as home,
            HubProcess(home.testbed, "http.fuzzer") as fuzzer,
        ):
            token, own = home.new_app("fuzzer"), home.new_app("good")
            yield self._row(home, "nothing", self._chats(home, own))
            fuzzer.call("hold", token=token, model=_MODEL, idle=self.idle, slow=self.slow)
            yield self._row(home, "idle", self._chats(home, own))
            chance = random.Random(f"{self.seed} {sent}")
            strangers = [unknown_token() for _ in range(_NUM_STRANGERS)]
            while sent < self.requests:
                context.report(f"{sent} of {self.requests} requests")
                fuzzer.begin(
                    "attack", model=_MODEL, token=token, strangers=strangers, seed=chance.randrange(1 << 30),
                    count=min(_BATCH, self.requests - sent), connections=self.connections,
                )  # fmt: skip
                chats = self._chats(home, own)
                found = fuzzer.answer(_BATCH_SECONDS)
                row = self._row(home, "attack", chats, **found)
                sent += row.num_requests
                yield row

    def _chats(self, home: HttpHome, token: str) -> dict[str, Any]:
        seconds = self.quiet_seconds
        return home.clients.call("steady", seconds + 300.0, token=token, body=_CHAT, seconds=seconds)

    def _row(self, home: HttpHome, beside: Beside, chats: dict[str, Any], **found: Any) -> HttpFuzzRow:
        gateway = home.gateway()
        return HttpFuzzRow(
            beside=beside, chats=tuple(chats["seconds"]), failed=tuple(chats["failed"]),
            resident_bytes=gateway.memory_info().rss, peak_bytes=peak_bytes(gateway.pid),
            descriptors=gateway.num_fds(), tracebacks=home.log().count("Traceback"), **found,
        )  # fmt: skip

    def summary(self, rows: Sequence[HttpFuzzRow]) -> Summary:
        attacks = [row for row in rows if row.beside == "attack"]
        findings = [
            at_least("requests", sum(row.num_requests for row in attacks), 100_000, COUNT),
            equal("answers with status 500", sum(row.statuses.get("500", 0) for row in attacks), 0, COUNT),
            equal(
                "wrong answers: a server error, without a token, none, or another status than that of a valid request",
                sum(row.num_faults for row in attacks), 0, COUNT,
            ),
            equal("tracebacks in the log", max((row.tracebacks for row in rows), default=0), 0, COUNT),
            equal("failed chats of the client that behaves", sum(len(row.failed) for row in rows), 0, COUNT),
            *_memory(rows, attacks),
            *_chat_seconds(rows),
        ]  # fmt: skip
        kinds, statuses = _total(row.kinds for row in attacks), _total(row.statuses for row in attacks)
        tables = (
            Table.of("Requests", ("kind", "number"), ((kind, str(num)) for kind, num in sorted(kinds.items()))),
            Table.of(
                "First answers", ("status", "number"), ((status, str(num)) for status, num in sorted(statuses.items()))
            ),
        )
        summary = summarise("Generated HTTP requests", findings, *tables)
        faults = [fault for row in attacks for fault in row.faults]
        return summary.model_copy(update={"conclusions": (*summary.conclusions, *faults[:10])})


def _memory(rows: Sequence[HttpFuzzRow], attacks: Sequence[HttpFuzzRow]) -> Iterator[Finding]:
    idle = [row.resident_bytes for row in rows if row.beside == "nothing"]
    if idle:
        yield at_most("resident, idle", max(idle) / _MEGABYTE, _MOST_IDLE_BYTES / _MEGABYTE, _MEGABYTES)
    peak = max((row.peak_bytes for row in rows), default=0)
    yield at_most("resident, peak", peak / _MEGABYTE, _MOST_PEAK_BYTES / _MEGABYTE, _MEGABYTES)
    half = [row.resident_bytes for row in attacks[len(attacks) // 2 :]]
    if len(half) > 1:
        middle = len(half) // 2
        growth = statistics.median(half[middle:]) - statistics.median(half[:middle])
        detail = f"{half[0] / _MEGABYTE:.1f} MB to {half[-1] / _MEGABYTE:.1f} MB"
        limit = _MOST_GROWTH_BYTES / _MEGABYTE
        yield at_most("growth over the last half", growth / _MEGABYTE, limit, _MEGABYTES, detail)


def _chat_seconds(rows: Sequence[HttpFuzzRow]) -> Iterator[Finding]:
    for beside in ("nothing", "idle", "attack"):
        took = [1e3 * seconds for row in rows if row.beside == beside for seconds in row.chats]
        if took:
            detail = f"{len(took)} chats, longest {max(took):.0f} ms"
            yield without_target(
                f"chat of the client that behaves, beside {beside}", statistics.median(took), _MILLISECONDS, detail
            )


def _total(counts: Any) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return total
