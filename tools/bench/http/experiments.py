"""Experiments with the HTTP gateway: `http-overhead`, `http-turns` and `flood`.

`http-overhead`: what the gateway adds to the first token, and the processor time that a token takes in it. The model is tiny,
so that the home's own time is short. The same app asks over HTTP and with the client library, in turn.

`http-turns`: the first token of a voice assistant's requests, which begin alike, with the prefix cache and without. The
requests are those of Home Assistant for a house with 61 lights (`turn.json`, recorded by
tests/clients/home_assistant/recording.py): a command, the same with the call of a tool and its result, and the first one of a
new conversation. Each round asks as a new app, whose prefix cache is empty, and asks the second request as another new app. The
weights are random, and answers are cut after some tokens.

`flood`: what one hostile app takes from one that behaves.

The good app asks without pause, one chat with the client library and one over HTTP at a time, and opens a new HTTP connection
twice a second. Times with and without the hostile app take turns. Both have an app's key of their own; in `idle HTTP
connections` the hostile one needs none.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from tools.bench.experiment import Context, Experiment, one_of
from tools.bench.http.home import TINY, chat_directory, http_home
from tools.bench.http.hostile import ATTACKS, ONE_AFTER_THE_OTHER
from tools.bench.load import load_between, snapshot
from tools.bench.processes import ClientProcess
from tools.bench.results import COUNT, PERCENT, RATIO, Finding, Record, Summary, at_least, at_most, summarise
from tools.bench.shapes import LLAMA, SMALL_LLAMA
from tools.bench.stats import percentile

_CHAT = [{"role": "user", "content": "Is the light on?"}]
_WARM_UP = 20  # pairs that do not count
_MOST_DELAY_SECONDS, _LEAST_PAIRS = 0.005, 200  # target: median delay, over at least so many pairs
_MOST_TOKEN_SECONDS = 0.0005  # target: processor time of the gateway for a token
_LONG_SECONDS = 600.0  # timeout of what the clients are told to do
_MILLISECONDS = "{:.2f} ms".format


class OverheadRow(Record):
    """One home. `http` and `direct`: seconds to the first text, in pairs. `tokens`, `gateway_seconds`: by round."""

    http: tuple[float, ...]
    direct: tuple[float, ...]
    num_streams: int
    tokens: tuple[int, ...]  # of all streams
    gateway_seconds: tuple[float, ...]  # processor time of the gateway
    out_of_order: int  # streams whose text is not that of the library
    disturbed: str = ""  # why times cannot be trusted

    @property
    def delays(self) -> list[float]:
        return [one - other for one, other in zip(self.http, self.direct, strict=True)]

    @property
    def token_seconds(self) -> list[float]:
        return [seconds / tokens for seconds, tokens in zip(self.gateway_seconds, self.tokens, strict=True)]


class HttpOverhead(Experiment[OverheadRow]):
    """One stream in pairs, then many streams at once."""

    pairs: int = Field(300, ge=1)
    streams: int = Field(32, ge=1)
    new_tokens: int = Field(100, ge=2)  # of each stream
    rounds: int = Field(5, ge=1)  # of all streams

    def measure(self, context: Context) -> Iterator[OverheadRow]:
        context.report("making the model")
        model = chat_directory(TINY, context.folder / "tiny")
        options = ("--context", "256", "--sequences", str(self.streams))
        with http_home(context, model, 1, *options) as home:
            token = home.new_app("bench")
            began = snapshot()
            context.report(f"{self.pairs} pairs")
            body = {"model": "tiny", "messages": _CHAT, "max_tokens": 4, "temperature": 0}
            found = home.clients.call(
                "first_tokens", _LONG_SECONDS, token=token, body=body, pairs=_WARM_UP + self.pairs
            )
            bodies = [self._body(seed) for seed in range(self.streams)]
            references = home.clients.call("references", _LONG_SECONDS, token=token, bodies=bodies)["texts"]
            out_of_order, tokens, gateway_seconds = 0, [], []
            for number in range(self.rounds):
                context.report(f"{self.streams} streams, round {number + 1} of {self.rounds}")
                used = home.gateway_seconds()
                answers = home.clients.call("streams", _LONG_SECONDS, token=token, bodies=bodies)
                gateway_seconds.append(home.gateway_seconds() - used)
                tokens.append(answers["tokens"])
                out_of_order += sum(one != other for one, other in zip(answers["texts"], references, strict=True))
            yield OverheadRow(
                http=tuple(found["http"][_WARM_UP:]), direct=tuple(found["direct"][_WARM_UP:]),
                num_streams=self.streams, tokens=tuple(tokens),
                gateway_seconds=tuple(gateway_seconds), out_of_order=out_of_order,
                disturbed=load_between([(began, snapshot())]).distrust,
            )  # fmt: skip

    def _body(self, seed: int) -> dict[str, Any]:
        """A chat that is sampled with a seed of its own, so that each stream has its own text."""
        settings = {"max_tokens": self.new_tokens, "temperature": 1.0, "seed": seed}
        return {"model": "tiny", "messages": _CHAT, **settings}

    def summary(self, rows: Sequence[OverheadRow]) -> Summary:
        return summarise("The HTTP gateway's overhead", [finding for row in rows for finding in _of_overhead(row)])


def _of_overhead(row: OverheadRow) -> Iterator[Finding]:
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
    yield at_most("streams out of order", row.out_of_order, 0, COUNT)
    if row.disturbed:
        yield Finding(figure="disturbed", measured=row.disturbed)


RECORDED = Path(__file__).with_name("turn.json")
_COMMAND, _RESULT, _NEXT = range(3)  # of the recorded requests
_MODEL = "model"
_MOST_SHARE, _LEAST_GAIN = 0.08, 8.0  # targets: new tokens in the prompt; first token without the cache over with it
_NEW_TOKENS = 4  # of an answer
_DEVICES = 3


class TurnRow(Record):
    """One round. Seconds until the first token; tokens of prompts, and of these, the ones that were computed."""

    result_seconds: float  # of the second request
    result_cold_seconds: float  # as another app: all is computed
    prompt_tokens: tuple[int, int, int]
    new_tokens: tuple[int, int, int]
    disturbed: str = ""  # why times cannot be trusted


class HttpTurns(Experiment[TurnRow]):
    """A Llama of 330 million random weights, over the HTTP gateway."""

    rounds: int = Field(3, ge=1)

    def measure(self, context: Context) -> Iterator[TurnRow]:
        asked = {"model": _MODEL, "max_tokens": _NEW_TOKENS}
        bodies = [{**recorded, **asked} for recorded in json.loads(RECORDED.read_text())]
        context.report("making the model")
        model = chat_directory(LLAMA, context.folder / _MODEL)
        with http_home(context, model, _DEVICES, "--context", "4096", "--weights", "int8") as home:

            def ask(token: str, body: Mapping[str, Any]) -> tuple[float, int, int]:
                found = home.clients.call("ask", _LONG_SECONDS, token=token, body=body)
                usage = found["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                return found["first_seconds"], usage["prompt_tokens"], usage["prompt_tokens"] - cached

            for number in range(self.rounds):
                context.report(f"round {number + 1} of {self.rounds}")
                one, other = home.new_app(f"one{number}"), home.new_app(f"other{number}")
                began = snapshot()
                seconds, prompt, new = zip(*(ask(one, body) for body in bodies), strict=True)
                cold, _, _ = ask(other, bodies[_RESULT])
                yield TurnRow(
                    result_seconds=seconds[_RESULT], result_cold_seconds=cold, prompt_tokens=prompt, new_tokens=new,
                    disturbed=load_between([(began, snapshot())]).distrust,
                )  # fmt: skip

    def summary(self, rows: Sequence[TurnRow]) -> Summary:
        return summarise("A turn of Home Assistant with 61 lights", list(_of_turns(rows)) if rows else [])


def _of_turns(rows: Sequence[TurnRow]) -> Iterator[Finding]:
    first = rows[0]
    for name, number in (("command", _COMMAND), ("result of the call", _RESULT), ("new conversation", _NEXT)):
        most = max(row.new_tokens[number] for row in rows)
        yield Finding(figure=f"new tokens, {name}", measured=f"{most} (of {first.prompt_tokens[number]})")
    share = max(row.new_tokens[_RESULT] / row.prompt_tokens[_RESULT] for row in rows)
    yield at_most("new tokens of the second request, share of its prompt", share, _MOST_SHARE, PERCENT)
    gains = [row.result_cold_seconds / row.result_seconds for row in rows]
    yield at_least(
        "first token of the second request: without the cache over with it", statistics.median(gains), _LEAST_GAIN, RATIO,
        f"median of {len(gains)}: {min(gains):.1f} to {max(gains):.1f}",
    )  # fmt: skip
    for row in rows:
        if row.disturbed:
            yield Finding(figure="disturbed", measured=row.disturbed)


# ---- hostile apps -----------------------------------------------------------------------------------------------------

_HOSTILE_APPS = 20  # where there are many
_TOKENS = 16  # of an answer to the good app
_LEAST_SHARE = 0.8  # target: of the answers and tokens that the good app gets alone
_MOST_SECONDS = 0.3  # target: of a new connection, until the first answer
_MOST_BYTES = 128 << 20  # target: of the gateway's process
_SECONDS = "{:.2f} s".format


class Good(Record):
    """What the good app got in one time."""

    seconds: float
    answers: int
    tokens: int
    failed: tuple[str, ...] = ()
    connect_seconds: float  # until the first answer to a new HTTP connection; the longest


class FloodRow(Record):
    """One attack. Rates of the good app, alone and beside it, in turn."""

    attack: str
    alone: tuple[Good, ...]
    beside: tuple[Good, ...]
    done: int  # by the hostile app
    errors: dict[str, int]  # that it got
    gateway_bytes: int  # largest resident memory of the gateway's process so far
    disturbed: str = ""  # why times cannot be trusted

    def share(self, what: str) -> float:
        """The good app's rate beside the attack over that alone."""
        beside, alone = (
            sum(getattr(good, what) for good in goods) / sum(good.seconds for good in goods)
            for goods in (self.beside, self.alone)
        )
        return float(beside / alone)


class Flood(Experiment[FloodRow]):
    """Each attack in turn on one home."""

    attacks: tuple[Annotated[str, one_of(ATTACKS)], ...] = tuple(
        name for name in ATTACKS if name != ONE_AFTER_THE_OTHER
    )
    rounds: int = Field(3, ge=1)
    seconds: float = Field(10.0, gt=0)  # of each time
    tasks: int = Field(70, ge=1)  # of the hostile app, at once
    tls: bool = False
    connections: int = Field(2000, ge=1)  # that it holds

    def measure(self, context: Context) -> Iterator[FloodRow]:
        yield from context.known
        context.report("making the model")
        model = chat_directory(SMALL_LLAMA, context.folder / "model")
        options = ("--context", "512", "--sequences", "4", *(["--http-tls"] if self.tls else []))
        with http_home(context, model, 2, *options) as home, ClientProcess(home.testbed, "http.hostile") as hostile:
            if self.tls:
                home.clients.call("trust", authority=home.authority())
            good, *bad = [home.new_app(name) for name in ("good", *(f"bad{number}" for number in range(_HOSTILE_APPS)))]
            home.clients.call("keep_asking", token=good, seconds=1.0, max_tokens=_TOKENS)  # warms up

            def ask() -> Good:
                answer = home.clients.call("keep_asking", token=good, seconds=self.seconds, max_tokens=_TOKENS)
                return Good.model_validate(answer)

            for attack in self.attacks[len(context.known) :]:
                began, alone, beside, done, errors = snapshot(), list[Good](), list[Good](), 0, Counter[str]()
                for number in range(self.rounds):
                    context.report(f"{attack}: round {number + 1} of {self.rounds}")
                    alone.append(ask())
                    count = {"idle HTTP connections": self.connections, ONE_AFTER_THE_OTHER: 1}.get(attack, self.tasks)
                    tokens = bad if attack == ONE_AFTER_THE_OTHER else bad[:1]
                    hostile.call("begin", attack=attack, tokens=tokens, count=count)
                    beside.append(ask())
                    ended = hostile.call("end")
                    done += ended["done"]
                    errors.update(ended["errors"])
                yield FloodRow(
                    attack=attack, alone=tuple(alone), beside=tuple(beside), done=done, errors=dict(errors),
                    gateway_bytes=home.gateway_peak_bytes(), disturbed=load_between([(began, snapshot())]).distrust,
                )  # fmt: skip

    def summary(self, rows: Sequence[FloodRow]) -> Summary:
        return summarise("One hostile app", [finding for row in rows for finding in _of_flood(row)])


def _of_flood(row: FloodRow) -> Iterator[Finding]:
    detail = f"it did it {row.done} times, and had {sum(row.errors.values())} errors"
    yield at_least(f"{row.attack}: answers that are left", row.share("answers"), _LEAST_SHARE, PERCENT, detail)
    yield at_least(f"{row.attack}: tokens that are left", row.share("tokens"), _LEAST_SHARE, PERCENT)
    failed = [what for good in row.beside for what in good.failed]
    yield at_most(f"{row.attack}: failed calls", len(failed), 0, COUNT, "; ".join(failed[:3]))
    slowest = max(good.connect_seconds for good in row.beside)
    yield at_most(f"{row.attack}: first answer to a new connection, longest", slowest, _MOST_SECONDS, _SECONDS)
    megabytes = row.gateway_bytes / (1 << 20)
    yield at_most(f"{row.attack}: memory of the gateway", megabytes, _MOST_BYTES >> 20, "{:.0f} MiB".format)
    if row.disturbed:
        yield Finding(figure=f"{row.attack}: disturbed", measured=row.disturbed)
