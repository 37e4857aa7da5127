"""Experiments `generation`: a decoder of random weights on one device, on several, and by `transformers` on one, interleaved.

`Decoding` has the settings and the home that all experiments with a decoder in the worker's engine share.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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
from tools.bench.drive import EngineRunners, StoredModel, made_up_prompt
from tools.bench.experiment import Context, Experiment, R
from tools.bench.homes import Model, decoder_directory
from tools.bench.load import interleaved
from tools.bench.measure import MIN_ROUNDS, emulated
from tools.bench.plans import describe
from tools.bench.processes import DeviceProcess
from tools.bench.profiles import Profiles
from tools.bench.results import Record, Summary, Table
from tools.bench.shapes import LLAMA
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
        self.engine.load(strategy, plan, self.model, plan.num_ranks > 1, rate, profile=cluster, draft=draft)
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
    """What the rows of one setting show of several devices."""
    alone = next((row for row in group if row.strategy == "local"), None)
    for row in group:
        if alone is not None and row is not alone and row.predicted_prompt_seconds:
            gain = paired_ratio(alone.prefill, row.prefill)
            yield (
                f"{row.setting}: the prompt takes {row.strategy} {statistics.median(row.prefill):.2f} s (predicted "
                f"{row.predicted_prompt_seconds:.2f} s), {gain} times as fast as one device"
            )
        if alone is not None and row.kernel_seconds and row.ping_seconds:
            yield _bound(alone, row)


def _bound(alone: GenerationRow, row: GenerationRow) -> str:
    """How much faster several devices decode than one, next to what kernels, fixed time and raw messages would allow."""
    assert row.kernel_seconds
    assert row.alone_kernel_seconds
    assert row.ping_seconds
    fixed = max(alone.token_seconds - row.alone_kernel_seconds, 0.0)
    bound = alone.token_seconds / (row.kernel_seconds + fixed + row.num_exchanges * row.ping_seconds)
    gain = paired_ratio(alone.decode, row.decode)
    return (
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
