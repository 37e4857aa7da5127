"""Kind `kv-loss`: the pause of streams with a long context when an agent is killed, with KV copies and with replay."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from hearth.errors import DeadlineExceeded, InternalError
from hearth.platform.units import format_bytes, format_seconds
from tools.bench.experiment import Context, Experiment
from tools.bench.fault_rows import Happened, worst_pause
from tools.bench.homes import agent_names, decoder_directory, forget_plans, stop_coordinator
from tools.bench.load import load_between, snapshot
from tools.bench.processes import ClientProcess
from tools.bench.results import Summary, Table
from tools.bench.shared_devices import HUB, devices_with_disks, shared_scenario
from tools.bench.watch import agent_of
from tools.testbed import Testbed
from tools.testbed.cluster import check_possible

# A row of its KV cache has 24 KiB, on all devices together. Four prompts of 1000 tokens take seconds to prefill on two cores.
_MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8,
    "num_key_value_heads": 8, "num_hidden_layers": 6, "vocab_size": 4000, "max_position_embeddings": 4096,
}  # fmt: skip
_DISK_BYTES = 512 << 20  # of a device's store: the model, and the 64 MiB that an agent leaves free
_READY_SECONDS = 240.0  # for the coordinator to profile, plan, push and load on a busy machine
_PREPARE_SECONDS = 600.0  # for the reference answers, one after the other
_STREAM_SECONDS = 120.0  # for all streams to get tokens, or to end
_POLL_SECONDS = 0.05  # between two looks at what the clients have got
_MOMENT_SECONDS = (0.0, 1.0)  # range of the time from the last stream's `before_tokens` to the loss


class KvLossRow(BaseModel):
    """One loss. The pause is that of the stream that waited longest, less its usual time for a token."""

    model_config = ConfigDict(frozen=True)

    kv_copies: bool
    number: int
    target: str
    pause_seconds: float
    sent_bytes: int  # by all devices before the loss, since the prompts were sent
    num_rows: int  # of KV caches that were computed meanwhile, by all ranks together
    pause_bytes: int  # sent by all devices from the loss to the next token of every stream
    answers: int  # correct ones
    harm: tuple[str, ...] = ()  # failed calls and wrong answers
    disturbed: str = ""  # why times cannot be trusted


class KvLoss(Experiment):
    """`count` losses with copies, and as many without, in turn. Each in a home that serves on all devices."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(KvLossRow)

    count: int = Field(5, ge=1)
    prompt_tokens: int = Field(1000, ge=16, le=3000)
    max_tokens: int = Field(300, ge=50, le=1000)  # of an answer: all of them outlast the pause
    before_tokens: int = Field(60, ge=2)  # of each stream before the loss; meanwhile the copies of the prompts are sent
    streams: int = Field(4, ge=1, le=8)
    devices: int = Field(4, ge=2, le=8)
    mbit: float = Field(1000.0, ge=1)  # real rate of every link
    seed: int = 1

    def measure(self, context: Context) -> Iterator[KvLossRow]:
        yield from context.known
        cores = len(os.sched_getaffinity(0))
        scenario = shared_scenario(self.devices, cores, self.mbit)
        check_possible(scenario)
        model = decoder_directory(_MODEL, context.folder, "float32")
        done = {(row.kv_copies, row.number) for row in context.known}
        with (
            devices_with_disks(scenario, context.folder, cores, _DISK_BYTES) as testbed,
            ClientProcess(testbed, "load_clients") as clients,
        ):
            is_prepared = False
            for number, kv_copies in product(range(self.count), (True, False)):
                if (kv_copies, number) in done:
                    continue
                context.report(f"loss {number + 1} of {self.count}, {'copies' if kv_copies else 'replay'}")
                coordinator = testbed.start_coordinator(str(model), *self._options(kv_copies))
                try:
                    clients.ready_status(_READY_SECONDS)
                    if not is_prepared:
                        self._prepare(clients)
                        is_prepared = True
                    yield self._lose(testbed, clients, number, kv_copies)
                finally:
                    stop_coordinator(coordinator)
                    forget_plans(testbed)

    def _options(self, kv_copies: bool) -> tuple[str, ...]:
        """Options of the coordinator."""
        context_tokens = self.prompt_tokens + self.max_tokens + 16  # the prompts differ by some tokens
        return (
            "--strategy", "hmp", "--name", HUB, "--min-devices", str(self.devices), "--context", str(context_tokens),
            "--sequences", str(self.streams), *(() if kv_copies else ("--no-kv-copies",)),
        )  # fmt: skip

    def _prepare(self, clients: ClientProcess) -> None:
        """Ask for the references."""
        fields = {"max_tokens": self.max_tokens, "prompt_tokens": self.prompt_tokens}
        clients.call("prepare", _PREPARE_SECONDS, load="generate", vocab_size=_MODEL["vocab_size"], **fields)

    def _lose(self, testbed: Testbed, clients: ClientProcess, number: int, kv_copies: bool) -> KvLossRow:
        chance = random.Random(f"{self.seed} {number}")  # the same device and moment with copies and without
        happened: list[Happened] = []

        def wait(what: str, holds: Callable[[], bool]) -> None:
            deadline = time.monotonic() + _STREAM_SECONDS
            while not holds():
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(action=what, seconds=_STREAM_SECONDS)
                time.sleep(_POLL_SECONDS)
                happened.extend((each[0], each[1], each[2], each[3]) for each in clients.call("take")["happened"])

        def tokens(since: float) -> dict[int, int]:
            counts = dict.fromkeys(range(self.streams), 0)
            for seconds, client, kind, _ in happened:
                counts[client] += kind == "token" and seconds > since
            return counts

        names = agent_names(testbed)
        clients.call("take")
        background, began = snapshot(), _sent_bytes(testbed)
        clients.call("begin", num_clients=self.streams, once=True)
        wait("the streams", lambda: min(tokens(0.0).values()) >= self.before_tokens)
        time.sleep(chance.uniform(*_MOMENT_SECONDS))
        target = chance.choice(names)
        if (agent := agent_of(testbed, target)) is None:
            raise InternalError(where="the loss", reason=f"no agent runs on {target}")
        sent, moment = _sent_bytes(testbed), time.monotonic()
        agent.send_signal(signal.SIGKILL)
        # Tokens that were on their way come at once; a stream goes on with the second one after half a second.
        wait("the streams after the loss", lambda: min(tokens(moment + 0.5).values()) >= 1)
        after = _sent_bytes(testbed)
        testbed.start_agent(target)
        wait("the answers", lambda: sum(each[2] != "token" for each in happened) >= self.streams)
        clients.call("end")
        pause, _ = worst_pause([each for each in happened if each[2] == "token"], moment, moment + 0.5, moment + 0.5)
        harm = [f"{kind}: {what}" for _, _, kind, what in happened if kind in ("failed", "wrong")]
        counts = {
            client: sum(each[1] == client and each[2] == "token" and each[0] <= moment for each in happened)
            for client in range(self.streams)
        }
        return KvLossRow(
            kv_copies=kv_copies, number=number, target=target, pause_seconds=pause, sent_bytes=sent - began,
            num_rows=sum(counts.values()) + self.streams * self.prompt_tokens, pause_bytes=after - sent,
            answers=sum(each[2] == "answer" for each in happened), harm=tuple(harm),
            disturbed=load_between([(background, snapshot())]).distrust,
        )  # fmt: skip

    def summary(self, rows: Sequence[KvLossRow]) -> Summary:
        """A line for losses with copies and one for those without."""
        groups = {
            "copies": [row for row in rows if row.kv_copies],
            "replay": [row for row in rows if not row.kv_copies],
        }
        lines = [_line(name, group) for name, group in groups.items() if group]
        harm = [f"loss {row.number} of {row.target}: {row.harm[0]}" for row in rows if row.harm]
        columns = (
            "after a loss", "losses", "answers", "pause, median", "pause, least", "pause, worst", "bytes a row, median",
            "bytes of the pause, median", "disturbed",
        )  # fmt: skip
        answers = sum(row.answers for row in rows)
        return Summary(
            conclusions=(f"{len(rows)} losses, {answers} correct answers, {len(harm)} losses with a harm", *harm),
            tables=(Table.of("Pause of streams when an agent is killed", columns, lines),),
            failure="a stream failed, or its tokens differed" if harm else "",
        )  # fmt: skip


def _line(name: str, rows: Sequence[KvLossRow]) -> tuple[str, ...]:
    pauses = [row.pause_seconds for row in rows]
    return (
        name, str(len(rows)), str(sum(row.answers for row in rows)), format_seconds(statistics.median(pauses)),
        format_seconds(min(pauses)), format_seconds(max(pauses)),
        format_bytes(statistics.median(row.sent_bytes / row.num_rows for row in rows)),
        format_bytes(statistics.median(row.pause_bytes for row in rows)), str(sum(bool(row.disturbed) for row in rows)),
    )  # fmt: skip


def _sent_bytes(testbed: Testbed) -> int:
    return sum(map(testbed.network.sent_bytes, agent_names(testbed)))
