"""Experiments with a decoder of random weights: generation, and its shortcuts.

`generation`: one device, several, and `transformers` on one, interleaved.

`speculation`: tokens per second by the share of guesses that are right. The answers are known from a run without guesses; an
oracle in rank 0's process guesses their tokens, each right with the same probability. The number of guesses adapts, as in
service. With a draft model, the oracle's tokens take the place of those that the model has computed: its time counts, and its
weights do not matter. The bound of a row is the speed-up of the best fixed number of guesses by the run's own median times of
steps and of the draft model, if the share of right guesses were known from the start. Guessing takes no other time in it.

`prefix-cache`: rank 0's time from the request to the first token. Each round has a new end of the prompt; the same prompt is
computed with the prefix cache and without.

`Decoding` has the settings and the home that all experiments with a decoder in the worker's engine share.
"""

from __future__ import annotations

import statistics
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal

from pydantic import Field

from coordinator.plan.transformer.choose import plan_transformer
from coordinator.plan.transformer.cost.decode import attention_bytes, head_bytes, mlp_bytes
from coordinator.plan.transformer.request import GenerationRequest, PlanRequest
from hearth.errors import BadSetting
from hearth.plan.common import VALUE_FORMATS, ValueFormatName, WireFormat
from hearth.plan.model_spec import WeightFormat
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import BlockProfile, ClusterProfile
from hearth.plan.transformer import KV_BLOCK_TOKENS
from tools.bench.drive import EngineRunners, Profiles, StoredModel, made_up_prompt
from tools.bench.experiment import Context, Experiment, R
from tools.bench.homes import Model, decoder_directory
from tools.bench.load import interleaved
from tools.bench.measure import MIN_ROUNDS, emulated
from tools.bench.plans import describe
from tools.bench.processes import DeviceProcess
from tools.bench.results import Record, Summary, Table
from tools.bench.shapes import LLAMA, llama
from tools.bench.stats import Ratio, paired_ratio
from tools.testbed import Scenario, Testbed, load_scenario
from tools.testbed.cluster import check_possible

STRATEGIES = ("local", "hmp", "auto")
REFERENCE = "transformers"
_PINGS = 200  # of which the median counts


class Decoding(Experiment[R], Generic[R]):
    """Settings of experiments with a decoder, and its home."""

    SEQUENCES: ClassVar[int] = 1  # of which the KV cache has room

    scenario: str = "whole-cores"
    model: Model = LLAMA
    weights: WeightFormat = "int8"
    wire: ValueFormatName = "exact"
    prompt_tokens: int = Field(256, ge=1)
    step_rows: int | None = Field(None, ge=1)  # of a prefill step; None: the prompt in one step
    new_tokens: int = Field(64, ge=2)
    rounds: int = Field(MIN_ROUNDS, ge=1)
    repeat_disturbed: bool = True  # profile again what other programs disturbed

    @contextmanager
    def home(self, context: Context) -> Iterator[Decoder]:
        """The model, and the worker's engine on all devices of the scenario. Raises BadSetting."""
        scenario = load_scenario(self.scenario)
        check_possible(scenario)
        context.report("making the model")
        model = self.stored(self.model, context.folder)
        with (
            emulated(scenario, context.folder / "testbed", real_mbit=True) as testbed,
            EngineRunners(testbed, [device.name for device in scenario.devices]) as engine,
        ):
            profiles = Profiles(scenario, testbed, engine, context.report, self.repeat_disturbed)
            yield Decoder(self, scenario, testbed, engine, profiles, model, context.report)

    def stored(self, model: Model, folder: Path) -> StoredModel:
        """A model of this shape with random weights."""
        return StoredModel(decoder_directory(model, folder, "float32"), folder / "store", self.weights)

    def plan(
        self, strategy: str, model: StoredModel, cluster: ClusterProfile, draft: StoredModel | None = None
    ) -> TransformerPlan:
        """The coordinator's plan; of `local`, on the first device. `draft`: the draft model."""
        if strategy == "local":
            cluster = cluster.subset((cluster.devices[0].device_id,))
        expected = GenerationRequest(
            self.prompt_tokens + self.new_tokens, self.SEQUENCES, self.prompt_tokens, self.new_tokens,
            draft=draft.spec if draft is not None else None,
        )  # fmt: skip
        wire = WireFormat(values=self.wire)
        return plan_transformer(PlanRequest(model.spec, cluster, self.rows, wire, strategy, generation=expected)).plan

    @property
    def rows(self) -> int:
        """Rows of a prefill step."""
        return self.step_rows or self.prompt_tokens


@dataclass(frozen=True)
class Decoder:
    """A decoder's home: plans are loaded side by side."""

    settings: Decoding[Any]
    scenario: Scenario
    testbed: Testbed
    engine: EngineRunners
    profiles: Profiles
    model: StoredModel
    report: Callable[[str], None]

    @property
    def names(self) -> list[str]:
        return [device.name for device in self.scenario.devices]

    @property
    def prompt(self) -> list[int]:
        return made_up_prompt(self.model.spec.vocab_size, self.settings.prompt_tokens)

    def profile(self, mbit: float) -> ClusterProfile:
        """Set the real rate of all links, and profile."""
        self.testbed.set_mbit(mbit)
        return self.profiles.current(self.model, self.names, self.settings.rows, mbit)

    def load(
        self, strategy: str, cluster: ClusterProfile, mbit: float, draft: StoredModel | None = None
    ) -> TransformerPlan:
        """Plan and load; the strategy is the id of the plan in the engine."""
        self.report(f"loading {strategy}")
        plan, rate = self.settings.plan(strategy, self.model, cluster, draft), mbit * 1e6 / 8
        self.engine.load(strategy, plan, self.model, rate, profile=cluster, draft=draft)
        return plan


class GenerationRow(Record):
    """One strategy at one link rate. `prefill` and `decode`: seconds by round; decoding excludes the first token."""

    scenario: str
    mbit: float
    strategy: str
    weights: str
    devices: str
    prompt_tokens: int
    new_tokens: int
    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    prefill_ratio: Ratio  # tokens per second over those of transformers, in the same rounds
    decode_ratio: Ratio
    wire: ValueFormatName = "exact"
    predicted_token_seconds: float | None = None
    predicted_prompt_seconds: float | None = None
    ping_seconds: float | None = None  # one way, a raw message of the size of partial sums of one row
    # Of a token, by the profile: the matrix products on one device, those on the slowest of all, and exchanges between them.
    alone_kernel_seconds: float | None = None
    kernel_seconds: float | None = None
    num_exchanges: int = 0

    @property
    def token_seconds(self) -> float:
        return statistics.median(self.decode) / (self.new_tokens - 1)

    @property
    def setting(self) -> str:
        wire = "" if self.wire == "exact" else f", {self.wire} on the wire"
        return f"{self.scenario}, {self.mbit:.0f} Mbit/s{wire}, {self.prompt_tokens} + {self.new_tokens} tokens"


class Generation(Decoding[GenerationRow]):
    """Generation on one device, on several, and with transformers on one."""

    mbit: tuple[float, ...] = Field((125.0, 500.0, 940.0), min_length=1)  # real rates
    rounds: int = Field(MIN_ROUNDS, ge=MIN_ROUNDS)
    # Format of transformers' weights; without instructions for bfloat16 it takes minutes for a long prompt in that format.
    reference: Literal["bfloat16", "float32"] = "bfloat16"

    def measure(self, context: Context) -> Iterator[GenerationRow]:
        if len(load_scenario(self.scenario).devices) < 2:
            raise BadSetting(setting="scenario", reason=f"{self.scenario} has one device; two are compared")
        with (
            self.home(context) as home,
            DeviceProcess(home.testbed, "baselines", home.names[0], REFERENCE) as reference,
        ):
            context.report(f"loading {REFERENCE}")
            reference.call("load", model_dir=str(home.model.directory), dtype=self.reference)
            for mbit in self.mbit:
                cluster = home.profile(mbit)
                plans = {strategy: home.load(strategy, cluster, mbit) for strategy in STRATEGIES}
                runs = {name: partial(self._generate, home, reference, name) for name in (REFERENCE, *STRATEGIES)}
                found, _ = interleaved(runs, self.rounds, context.report)
                num_bytes = VALUE_FORMATS[self.wire].num_bytes(home.model.spec.hidden_size, 1)
                ping_seconds = home.engine.ping_seconds(home.names[0], home.names[1], num_bytes, _PINGS)
                for strategy in STRATEGIES:
                    home.engine.unload(strategy)
                setting = {"scenario": home.scenario.name, "mbit": mbit, "wire": self.wire}
                yield self._row(REFERENCE, found, **setting, weights=self.reference, devices=home.names[0])
                for strategy, plan in plans.items():
                    shared = {"ping_seconds": ping_seconds, **self._kernels(plan, cluster)} if strategy == "hmp" else {}
                    yield self._row(
                        strategy, found, **setting, **shared, weights=self.weights, devices=describe(plan),
                        predicted_token_seconds=plan.predicted.decode_seconds or None,
                        predicted_prompt_seconds=plan.predicted.prompt_seconds,
                    )  # fmt: skip

    def _generate(self, home: Decoder, reference: DeviceProcess, name: str) -> dict[str, Any]:
        if name == REFERENCE:
            return reference.call("generate", prompt=home.prompt, num_tokens=self.new_tokens, dtype=self.reference)
        return home.engine.generate(name, home.prompt, self.new_tokens)

    def _kernels(self, plan: TransformerPlan, cluster: ClusterProfile) -> dict[str, float]:
        """The matrix products of a token by the profile, and the number of exchanges that it waits for."""
        spec, body, blocks = plan.model, plan.body, {each.device_id: each.blocks for each in cluster.devices}
        tokens = self.prompt_tokens + self.new_tokens / 2

        def seconds(blocks: BlockProfile, heads: int, columns: int, vocabulary: int) -> float:
            layer = attention_bytes(spec, heads, tokens, blocks) + mlp_bytes(spec, columns)
            return blocks.decode_seconds_per_byte * (spec.num_layers * layer + head_bytes(spec, vocabulary))

        shares = zip(plan.devices, body.heads, body.columns, body.vocabulary, strict=True)
        return {
            "alone_kernel_seconds": seconds(cluster.devices[0].blocks, spec.num_heads, spec.ffn_size, spec.vocab_size),
            "kernel_seconds": max(seconds(blocks[device.device_id], *share) for device, *share in shares),
            # Two a layer; the order of the step, and the candidates for its token.
            "num_exchanges": 2 * spec.num_layers + 2,
        }

    def _row(self, name: str, found: Mapping[str, Sequence[Mapping[str, Any]]], **more: Any) -> GenerationRow:
        def seconds(part: str, strategy: str = name) -> tuple[float, ...]:
            return tuple(answer[part] for answer in found[strategy])

        return GenerationRow(
            strategy=name, prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens,
            prefill=seconds("prefill"), prefill_ratio=paired_ratio(seconds("prefill", REFERENCE), seconds("prefill")),
            decode=seconds("decode"), decode_ratio=paired_ratio(seconds("decode", REFERENCE), seconds("decode")), **more,
        )  # fmt: skip

    def summary(self, rows: Sequence[GenerationRow]) -> Summary:
        by_setting = {row.setting: [each for each in rows if each.setting == row.setting] for row in rows}
        said = [line for group in by_setting.values() for line in _conclusions(group)]
        tables = [Table.of_columns(setting, _COLUMNS, group) for setting, group in by_setting.items()]
        return Summary(conclusions=tuple(said), tables=tuple(tables))


def _conclusions(group: Sequence[GenerationRow]) -> Iterator[str]:
    """How much faster several devices are than one; of decoding, next to what kernels, fixed time and messages would allow."""
    alone = next((row for row in group if row.strategy == "local"), None)
    if alone is None:
        return
    for row in group:
        if row is not alone and row.predicted_prompt_seconds:
            gain = paired_ratio(alone.prefill, row.prefill)
            yield (
                f"{row.setting}: the prompt takes {row.strategy} {statistics.median(row.prefill):.2f} s (predicted "
                f"{row.predicted_prompt_seconds:.2f} s), {gain} times as fast as one device"
            )
        if row.kernel_seconds and row.alone_kernel_seconds and row.ping_seconds:
            fixed = max(alone.token_seconds - row.alone_kernel_seconds, 0.0)
            bound = alone.token_seconds / (row.kernel_seconds + fixed + row.num_exchanges * row.ping_seconds)
            gain = paired_ratio(alone.decode, row.decode)
            yield (
                f"{row.setting}: {row.strategy} decodes {gain} times as fast as one device, "
                f"{gain.median / bound:.0%} of the {bound:.2f} times that these allow: kernels "
                f"{1e3 * row.alone_kernel_seconds:.2f} ms on one device and {1e3 * row.kernel_seconds:.2f} ms, "
                f"{1e3 * fixed:.2f} ms for the rest of a token, {row.num_exchanges} raw one-way messages of "
                f"{1e3 * row.ping_seconds:.3f} ms"
            )


_COLUMNS: Mapping[str, Callable[[GenerationRow], object]] = {
    "strategy": lambda row: row.strategy,
    "weights": lambda row: row.weights,
    "ran": lambda row: row.devices,
    "prefill tok/s": lambda row: f"{row.prompt_tokens / statistics.median(row.prefill):.0f}",
    "decode tok/s": lambda row: f"{1 / row.token_seconds:.1f}",
    "min..max": lambda row: (
        f"{(row.new_tokens - 1) / max(row.decode):.1f}..{(row.new_tokens - 1) / min(row.decode):.1f}"
    ),
    "predicted": lambda row: f"{1 / row.predicted_token_seconds:.1f}" if row.predicted_token_seconds else "-",
    "over transformers": lambda row: row.decode_ratio,
}


# ---- shortcuts ---------------------------------------------------------------------------------------------------------

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
        found, load = interleaved(runs, self.rounds, lambda step: home.report(f"{strategy}: {step}"))
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
                draft_seconds=statistics.median(each["draft_seconds"] for each in answers), disturbed=load.distrust,
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
        found, load = interleaved(runs, self.rounds, lambda step: home.report(f"{strategy}: {step}"))
        cached, whole = (
            tuple(each["times"][0] - each["submitted"] for each in answers) for answers in found.values()
        )  # fmt: skip
        pairs = zip(found["cached"], found["whole"], strict=True)
        yield PrefixRow(
            strategy=strategy, devices=describe(plan), weights=self.weights, layers=plan.model.num_layers,
            instruction_set=", ".join(dict.fromkeys(device.instruction_set for device in home.scenario.devices)),
            prefix_tokens=num_prefix, other_tokens=num_other, cached=cached, whole=whole,
            num_cached=tuple(each["cached"] for each in found["cached"]), share=paired_ratio(cached, whole),
            same_tokens=sum(one["tokens"] == other["tokens"] for one, other in pairs), disturbed=load.distrust,
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
        missed = [row for row in rows if set(row.num_cached) != {row.prefix_tokens}]
        return Summary(
            conclusions=tuple(f"{row.strategy}: {row.disturbed}" for row in rows if row.disturbed),
            tables=(Table.of_columns(title, columns, rows),),
            failure="the prefix was not found in the KV cache" if missed else "",
        )
