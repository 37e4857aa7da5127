"""Kind `http-overhead`: what the HTTP gateway adds to the first token, and the processor time that a token takes in it.

The model is tiny, so that the home's own time is short. The same app asks over HTTP and with the client library, in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from pydantic import Field, TypeAdapter

from tools.bench.experiment import Context, Experiment, Named
from tools.bench.http.home import TINY, HttpHome, chat_directory, http_home
from tools.bench.load import load_between, snapshot
from tools.bench.results import COUNT, Finding, Record, Summary, at_least, at_most, equal, summarise, without_target
from tools.bench.stats import percentile

_CHAT = [{"role": "user", "content": "Is the light on?"}]
_WARM_UP = 20  # pairs that do not count
_MOST_DELAY_SECONDS, _LEAST_PAIRS = 0.005, 200  # target: median delay, over at least so many pairs
_MOST_TOKEN_SECONDS = 0.0005  # target: processor time of the gateway for a token
_BATCH = 50  # pairs of one call, whose answer has a timeout
_MILLISECONDS = "{:.2f} ms".format


class OverheadRow(Record):
    """One home. `http` and `direct`: seconds to the first text, in pairs. `streams`: one entry per round."""

    http: tuple[float, ...]
    direct: tuple[float, ...]
    num_streams: int
    tokens: tuple[int, ...]  # of all streams, by round
    gateway_seconds: tuple[float, ...]  # processor time of the gateway, by round
    wall_seconds: tuple[float, ...]
    out_of_order: int  # streams whose text is not that of the library
    disturbed: str = ""  # why times cannot be trusted

    @property
    def delays(self) -> list[float]:
        return [one - other for one, other in zip(self.http, self.direct, strict=True)]

    @property
    def token_seconds(self) -> list[float]:
        return [seconds / tokens for seconds, tokens in zip(self.gateway_seconds, self.tokens, strict=True)]


class HttpOverhead(Experiment):
    """One stream in pairs, then many streams at once."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(OverheadRow)
    PAGE = "http"
    NAMED: ClassVar[Named] = {"http-overhead": {"title": "What the HTTP gateway adds"}}

    pairs: int = Field(300, ge=1)
    streams: int = Field(32, ge=1)
    new_tokens: int = Field(100, ge=2)  # of each stream
    rounds: int = Field(5, ge=1)  # of all streams
    devices: int = Field(1, ge=1, le=8)
    mbit: float = Field(1000.0, ge=1)  # real rate of every link

    def measure(self, context: Context) -> Iterator[OverheadRow]:
        context.report("making the model")
        model = chat_directory(TINY, context.folder / "tiny")
        options = ("--context", "256", "--sequences", str(self.streams))
        with http_home(context, model, self.devices, self.mbit, *options) as home:
            token = home.new_app("bench")
            began = snapshot()
            http, direct = self._pairs(home, token, context)
            bodies = [self._body(number) for number in range(self.streams)]
            references = home.clients.call("references", 600.0, token=token, bodies=bodies)["texts"]
            out_of_order, tokens, gateway_seconds, wall_seconds = 0, [], [], []
            for number in range(self.rounds):
                context.report(f"{self.streams} streams, round {number + 1} of {self.rounds}")
                used, since = _cpu_seconds(home), time.monotonic()
                answers = home.clients.call("streams", 600.0, token=token, bodies=bodies)
                wall_seconds.append(time.monotonic() - since)
                gateway_seconds.append(_cpu_seconds(home) - used)
                tokens.append(answers["tokens"])
                out_of_order += sum(one != other for one, other in zip(answers["texts"], references, strict=True))
            yield OverheadRow(
                http=tuple(http), direct=tuple(direct), num_streams=self.streams, tokens=tuple(tokens),
                gateway_seconds=tuple(gateway_seconds), wall_seconds=tuple(wall_seconds), out_of_order=out_of_order,
                disturbed=load_between([(began, snapshot())]).distrust,
            )  # fmt: skip

    def _pairs(self, home: HttpHome, token: str, context: Context) -> tuple[list[float], list[float]]:
        body = {"model": "tiny", "messages": _CHAT, "max_tokens": 4, "temperature": 0}
        home.clients.call("first_tokens", token=token, body=body, pairs=_WARM_UP)
        http: list[float] = []
        direct: list[float] = []
        while len(http) < self.pairs:
            context.report(f"{len(http)} of {self.pairs} pairs")
            found = home.clients.call("first_tokens", token=token, body=body, pairs=min(_BATCH, self.pairs - len(http)))
            http += found["http"]
            direct += found["direct"]
        return http, direct

    def _body(self, number: int) -> dict[str, Any]:
        """A chat that is sampled with a seed of its own, so that each stream has its own text."""
        settings = {"max_tokens": self.new_tokens, "temperature": 1.0, "seed": number}
        return {"model": "tiny", "messages": _CHAT, **settings}

    def summary(self, rows: Sequence[OverheadRow]) -> Summary:
        return summarise("The HTTP gateway's overhead", [finding for row in rows for finding in _findings(row)])


def _cpu_seconds(home: HttpHome) -> float:
    times = home.gateway().cpu_times()
    return float(times.user + times.system)


def _findings(row: OverheadRow) -> Iterator[Finding]:
    delays, direct = row.delays, statistics.median(row.direct)
    low, high = (1e3 * percentile(delays, fraction) for fraction in (0.05, 0.95))
    yield at_least("pairs", len(delays), _LEAST_PAIRS, COUNT)
    yield at_most(
        "added delay of the first token, median", 1e3 * statistics.median(delays), 1e3 * _MOST_DELAY_SECONDS, _MILLISECONDS,
        f"90 % of the pairs: {low:.2f} to {high:.2f} ms; the library alone {1e3 * direct:.2f} ms",
    )  # fmt: skip
    each = ", ".join(f"{1e3 * seconds:.3f}" for seconds in row.token_seconds)
    yield at_most(
        f"processor time of the gateway for a token, {row.num_streams} streams, median",
        1e3 * statistics.median(row.token_seconds), 1e3 * _MOST_TOKEN_SECONDS, "{:.3f} ms".format, f"rounds: {each} ms",
    )  # fmt: skip
    yield equal("streams out of order", row.out_of_order, 0, COUNT)
    yield without_target("tokens a second, all streams", sum(row.tokens) / sum(row.wall_seconds), COUNT)
    if row.disturbed:
        yield Finding(figure="disturbed", measured=row.disturbed)
