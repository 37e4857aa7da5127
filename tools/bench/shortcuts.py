"""Shortcuts of generation: experiments `speculation`, with guessed tokens, and `prefix-cache`, with prompts that begin alike.

`speculation`: tokens per second by the share of guesses that are right. The answers are known from a run without guesses; an
oracle in rank 0's process guesses their tokens, each right with the same probability. The number of guesses adapts, as in
service. With a draft model, the oracle's tokens take the place of those that the model has computed: its time counts, and its
weights do not matter. The bound of a row is the speed-up of the best fixed number of guesses by the run's own median times of
steps and of the draft model, if the share of right guesses were known from the start. Guessing takes no other time in it.

`prefix-cache`: rank 0's time from the request to the first token. Each round has a new end of the prompt; the same prompt is
computed with the prefix cache and without.
"""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, count
from typing import Any, ClassVar, Generic

from pydantic import Field

from hearth.plan.model_spec import WeightFormat
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import KV_BLOCK_TOKENS
from tools.bench.drive import made_up_prompt
from tools.bench.experiment import Context, R
from tools.bench.generation import Decoder, Decoding
from tools.bench.homes import Model
from tools.bench.load import interleaved
from tools.bench.plans import describe
from tools.bench.results import Record, Summary, Table
from tools.bench.shapes import llama
from tools.bench.stats import Ratio, paired_ratio

Answers = Sequence[dict[str, Any]]
# A Llama of 90 million weights.
_MODEL = llama(hidden=1024, ffn=2816, heads=16, kv_heads=4, layers=6, vocabulary=16000, positions=2048)
_MBIT = 500.0  # real rate of the links
_NO_GUESSES = -1.0
_SCOPES = {"cached": "bench", "whole": ""}  # of requests with the prefix cache and without


class _Shortcut(Decoding[R], Generic[R]):
    """A decoder on one device and on two."""

    draft: Model | None = None  # None: guesses take no time, as those that are looked up

    def measure(self, context: Context) -> Iterator[R]:
        with self.home(context) as home:
            draft = self.stored(self.draft, context.folder / "draft") if self.draft is not None else None
            cluster = home.profile(_MBIT)
            for strategy in ("local", "hmp"):
                plan = home.load(strategy, cluster, _MBIT, draft)
                yield from self._rows(home, plan)
                home.engine.unload(strategy)

    @abstractmethod
    def _rows(self, home: Decoder, plan: TransformerPlan) -> Iterator[R]:
        """Measure a plan that is loaded."""


class SpeculationRow(Record):
    """One plan and oracle. `seconds`: of the second half of the answer, when the number of guesses has adapted, by round."""

    strategy: str
    devices: str
    weights: str
    right: float  # probability; -1: without guesses
    num_tokens: int  # of the second half
    seconds: tuple[float, ...]
    speed_up: Ratio  # over the same rounds without guesses
    num_drafted: int  # in all rounds, both halves
    num_accepted: int
    same_tokens: bool  # as without guesses
    bound: float  # of the speed-up
    draft_seconds: float = 0.0  # for one guess
    disturbed: str = ""  # why times cannot be trusted


class Speculation(_Shortcut[SpeculationRow]):
    """Oracles of several qualities, and no guesses."""

    SEQUENCES: ClassVar[int] = 4

    model: Model = _MODEL
    weights: WeightFormat = "float32"
    right: tuple[float, ...] = (0.0, 0.3, 0.6, 0.9)
    prompt_tokens: int = Field(32, ge=1)
    new_tokens: int = Field(160, ge=16)
    repeat_disturbed: bool = False

    def _rows(self, home: Decoder, plan: TransformerPlan) -> Iterator[SpeculationRow]:
        strategy, prompt = plan.body.strategy, home.prompt
        text = [*prompt, *home.engine.generate(strategy, prompt, self.new_tokens)["tokens"]]

        def generate(right: float) -> dict[str, Any]:
            guesses = {} if right == _NO_GUESSES else {"text": text, "right": right}
            return home.engine.generate(strategy, prompt, self.new_tokens, **guesses)

        # The best oracle is first: its warm-up measures steps of many rows.
        qualities = sorted((_NO_GUESSES, *self.right), reverse=True)
        runs = {right: partial(generate, right) for right in qualities}
        found, disturbed = interleaved(runs, self.rounds, lambda step: home.report(f"{strategy}: {step}"))
        for right in reversed(qualities):
            answers = found[right]
            yield SpeculationRow(
                strategy=strategy, devices=describe(plan), weights=self.weights, right=right,
                num_tokens=self.new_tokens - self.new_tokens // 2, seconds=_seconds(answers),
                speed_up=paired_ratio(_seconds(found[_NO_GUESSES]), _seconds(answers)),
                num_drafted=sum(each["drafted"] for each in answers),
                num_accepted=sum(each["accepted"] for each in answers),
                same_tokens=all(each["tokens"] == text[self.prompt_tokens :] for each in answers),
                bound=statistics.median(
                    speed_up_bound(right, each["step_seconds"], each["draft_seconds"]) for each in answers
                ),
                draft_seconds=statistics.median(each["draft_seconds"] for each in answers), disturbed=disturbed,
            )  # fmt: skip

    def summary(self, rows: Sequence[SpeculationRow]) -> Summary:
        columns: Mapping[str, Callable[[SpeculationRow], object]] = {
            "devices": lambda row: row.strategy,
            "ran": lambda row: f"{row.devices}, {row.weights}",
            "guesses right": lambda row: "none" if row.right == _NO_GUESSES else f"{row.right:.0%}",
            "tokens/s": lambda row: f"{row.num_tokens / statistics.median(row.seconds):.1f}",
            "speed-up": lambda row: row.speed_up,
            "bound": lambda row: f"{row.bound:.2f}",
            "guessed": lambda row: row.num_drafted,
            "accepted": lambda row: row.num_accepted,
        }
        said = [f"{row.strategy}: {row.disturbed}" for row in rows if row.disturbed and row.right == _NO_GUESSES]
        drafts = [
            f"{row.strategy}: {row.draft_seconds * 1e3:.2f} ms" for row in rows if row.draft_seconds and row.right == 0
        ]
        said += [f"A guess of the draft model takes {', '.join(drafts)}."] if drafts else []
        return Summary(
            conclusions=tuple(said),
            tables=(Table.of_columns("Decoding of the second half of an answer", columns, rows),),
            failure="" if all(row.same_tokens for row in rows) else "answers differ with guesses and without",
        )


def speed_up_bound(right: float, step_seconds: Sequence[float], draft_seconds: float) -> float:
    """The largest expected speed-up by guesses that are right with a probability. `step_seconds`: of 1, 2, ... rows."""
    if right == _NO_GUESSES or not step_seconds:
        return 1.0
    expected = accumulate(right**number for number in range(len(step_seconds)))
    return max(
        tokens * step_seconds[0] / (seconds + number * draft_seconds)
        for number, (tokens, seconds) in enumerate(zip(expected, step_seconds, strict=True))
    )


def _seconds(answers: Answers) -> tuple[float, ...]:
    """Seconds of the second half of each answer."""
    return tuple(each["times"][-1] - each["times"][len(each["times"]) // 2 - 1] for each in answers)


# ---- the prefix cache -------------------------------------------------------------------------------------------------


class PrefixRow(Record):
    """One plan. `cached` and `whole`: seconds to the first token by round, with the prefix cache and without."""

    strategy: str
    devices: str
    instruction_set: str  # of the emulated devices
    weights: str
    layers: int
    prefix_tokens: int
    other_tokens: int
    num_cached: tuple[int, ...]  # tokens found in the KV cache, by round
    cached: tuple[float, ...]
    whole: tuple[float, ...]
    share: Ratio  # of `cached` in `whole`, within rounds
    same_tokens: int  # rounds in which both answers were equal
    disturbed: str = ""  # why times cannot be trusted

    @property
    def all_found(self) -> bool:
        return set(self.num_cached) == {self.prefix_tokens}


class PrefixCache(_Shortcut[PrefixRow]):
    """Prompts that share a prefix."""

    SEQUENCES: ClassVar[int] = 3  # the cached prefix stays while others are computed

    weights: WeightFormat = "int4"
    prompt_tokens: int = Field(2068, ge=KV_BLOCK_TOKENS)
    # Of each prompt, after the prefix, which is rounded down to blocks of the cache:
    other_tokens: int = Field(20, ge=1)
    step_rows: int | None = Field(512, ge=1)
    new_tokens: int = Field(4, ge=2)  # of an answer, which are compared

    def _rows(self, home: Decoder, plan: TransformerPlan) -> Iterator[PrefixRow]:
        strategy, vocab_size = plan.body.strategy, plan.model.vocab_size
        num_prefix = (self.prompt_tokens - self.other_tokens) // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
        num_other, prefix = self.prompt_tokens - num_prefix, made_up_prompt(vocab_size, num_prefix)

        def answer(kind: str, indices: Iterator[int]) -> dict[str, Any]:
            # The first token differs in every round, so that no block after the prefix is found.
            index = next(indices)
            ends = [3 + (104729 * index + 31 * i) % (vocab_size - 3) for i in range(num_other)]
            return home.engine.generate(strategy, [*prefix, *ends], self.new_tokens, prefix_scope=_SCOPES[kind])

        home.report(f"{strategy}: computing the prefix")
        answer("cached", iter([-2]))
        runs = {kind: partial(answer, kind, count(-1)) for kind in _SCOPES}
        found, disturbed = interleaved(runs, self.rounds, lambda step: home.report(f"{strategy}: {step}"))
        cached, whole = (
            tuple(each["times"][0] - each["submitted"] for each in answers) for answers in found.values()
        )  # fmt: skip
        pairs = zip(found["cached"], found["whole"], strict=True)
        yield PrefixRow(
            strategy=strategy, devices=describe(plan), weights=self.weights, layers=plan.model.num_layers,
            instruction_set=", ".join(dict.fromkeys(device.instruction_set for device in home.scenario.devices)),
            prefix_tokens=num_prefix, other_tokens=num_other, cached=cached, whole=whole,
            num_cached=tuple(each["cached"] for each in found["cached"]), share=paired_ratio(cached, whole),
            same_tokens=sum(one["tokens"] == other["tokens"] for one, other in pairs), disturbed=disturbed,
        )  # fmt: skip

    def summary(self, rows: Sequence[PrefixRow]) -> Summary:
        columns: Mapping[str, Callable[[PrefixRow], object]] = {
            "strategy": lambda row: row.strategy,
            "ran": lambda row: f"{row.devices}, {row.instruction_set}, {row.weights}, {row.layers} layers",
            "tokens": lambda row: f"{row.prefix_tokens} + {row.other_tokens}",
            "all computed": lambda row: f"{statistics.median(row.whole):.3f} s",
            "prefix cached": lambda row: f"{statistics.median(row.cached):.3f} s",
            "share": lambda row: f"{row.share.median:.1%} [{row.share.low:.1%}, {row.share.high:.1%}]",
            "same answers": lambda row: f"{row.same_tokens} of {len(row.cached)}",
        }
        title = f"Time to the first token, {_MBIT:.0f} Mbit/s"
        return Summary(
            conclusions=tuple(f"{row.strategy}: {row.disturbed}" for row in rows if row.disturbed),
            tables=(Table.of_columns(title, columns, rows),),
            failure="" if all(row.all_found for row in rows) else "the prefix was not found in the KV cache",
        )
