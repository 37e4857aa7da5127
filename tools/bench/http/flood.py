"""Experiment `flood`: what one hostile app takes from one that behaves.

The good app asks without pause, one chat with the client library and one over HTTP at a time, and opens a new HTTP connection
twice a second. Times with and without the hostile app take turns. Both have an app's key of their own; in `idle HTTP
connections` the hostile one needs none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from pydantic import Field, field_validator

from tools.bench.experiment import Context, Experiment, Named, checked_names
from tools.bench.http.home import chat_directory, http_home
from tools.bench.http.hostile import ATTACKS, ONE_AFTER_THE_OTHER
from tools.bench.load import load_between, snapshot
from tools.bench.processes import ClientProcess
from tools.bench.results import COUNT, PERCENT, Finding, Record, Summary, at_least, at_most, equal, summarise

# A small Llama: a step of it takes milliseconds on devices that share two cores.
_MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_hidden_layers": 6, "vocab_size": 4000, "max_position_embeddings": 1024,
}  # fmt: skip
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

    NAMED: ClassVar[Named] = {
        "flood": {"title": "One hostile app beside one that behaves"},
        "flood-tls": {
            "title": "The same with TLS: connections without a handshake", "tls": True, "attacks": ["idle HTTP connections"],
        },
        "flood-bodies": {"title": "A thousand hostile bodies", "attacks": [ONE_AFTER_THE_OTHER], "seconds": 60.0},
    }  # fmt: skip

    attacks: tuple[str, ...] = tuple(name for name in ATTACKS if name != ONE_AFTER_THE_OTHER)
    rounds: int = Field(3, ge=1)
    seconds: float = Field(10.0, gt=0)  # of each time
    tasks: int = Field(70, ge=1)  # of the hostile app, at once
    tls: bool = False
    connections: int = Field(2000, ge=1)  # that it holds

    @field_validator("attacks")
    @classmethod
    def _known(cls, attacks: tuple[str, ...]) -> tuple[str, ...]:
        return checked_names(attacks, ATTACKS)

    def measure(self, context: Context) -> Iterator[FloodRow]:
        yield from context.known
        context.report("making the model")
        model = chat_directory(_MODEL, context.folder / "model")
        options = ("--context", "512", "--sequences", "4", *(["--http-tls"] if self.tls else []))
        with (
            http_home(context, model, 2, *options) as home,
            ClientProcess(home.testbed, "http.hostile") as hostile,
        ):
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
    yield equal(f"{row.attack}: failed calls", len(failed), 0, COUNT, "; ".join(failed[:3]))
    slowest = max(good.connect_seconds for good in row.beside)
    yield at_most(f"{row.attack}: first answer to a new connection, longest", slowest, _MOST_SECONDS, _SECONDS)
    megabytes = row.gateway_bytes / (1 << 20)
    yield at_most(f"{row.attack}: memory of the gateway", megabytes, _MOST_BYTES >> 20, "{:.0f} MiB".format)
    if row.disturbed:
        yield Finding(figure=f"{row.attack}: disturbed", measured=row.disturbed)
