"""Kind `generation`: generation speed of a decoder on one device, on several, and of `transformers` on one, interleaved."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from coordinator.plan.transformer.make import plan_transformer
from coordinator.plan.transformer.request import GenerationRequest, PlanRequest, build_plan, on_subset
from hearth.errors import BadSetting
from hearth.plan.model_spec import WeightFormat
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile
from hearth.plan.transformer import Strategy
from tools.bench.drive import EngineRunners, StoredModel
from tools.bench.experiment import Context, Experiment
from tools.bench.homes import Model, decoder_directory
from tools.bench.measure import MIN_ROUNDS, emulated
from tools.bench.plans import describe
from tools.bench.processes import DeviceProcess
from tools.bench.profiles import Profiles
from tools.bench.results import Summary, Table
from tools.bench.stats import Ratio, paired_ratio, rotated
from tools.testbed import Testbed, load_scenario
from tools.testbed.cluster import check_possible

Variant = Literal["local", "hmp", "hmp, 2 micro-batches", "auto"]
VARIANTS: tuple[Variant, ...] = ("local", "hmp", "hmp, 2 micro-batches", "auto")
REFERENCE = "transformers"
_REFERENCE_TYPE = "bfloat16"
_EXCHANGES = 200  # timed exchanges of partial sums, pings and swaps
# A Llama of 330 million weights.
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32,
    "num_key_value_heads": 4, "num_hidden_layers": 6, "vocab_size": 32000, "max_position_embeddings": 2048,
    "eos_token_id": None,
}  # fmt: skip


class GenerationRow(BaseModel):
    """One strategy at one link rate. `prefill` and `decode`: seconds by round; decoding excludes the first token."""

    model_config = ConfigDict(frozen=True)

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
    predicted_token_seconds: float | None = None
    exchange_seconds: float | None = None  # of partial sums of one row, between two devices
    ping_seconds: float | None = None  # one way, a raw message of the same size over the same kind of socket
    swap_seconds: float | None = None  # one such message in each direction at once

    @property
    def setting(self) -> str:
        return f"{self.scenario}, {self.mbit:.0f} Mbit/s, {self.prompt_tokens} + {self.new_tokens} tokens"


class Generation(Experiment):
    """Generation by a decoder of random weights: on one device, on two, and with transformers (bfloat16) on one."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(GenerationRow)

    scenario: str = "whole-cores"
    model: Model = LLAMA
    weights: WeightFormat = "int8"
    mbit: tuple[float, ...] = Field((125.0, 500.0, 940.0), min_length=1)  # real rates
    prompt_tokens: int = Field(256, ge=1)
    new_tokens: int = Field(64, ge=2)
    rounds: int = Field(MIN_ROUNDS, ge=MIN_ROUNDS)

    def measure(self, context: Context) -> Iterator[GenerationRow]:
        scenario = load_scenario(self.scenario)
        if len(scenario.devices) < 2:
            raise BadSetting(setting="scenario", reason=f"{scenario.name} has one device; two are compared")
        check_possible(scenario)
        context.report("making the model")
        model = StoredModel(decoder_directory(self.model, context.folder, "float32"), context.folder / "store")
        model.spec = model.spec.model_copy(update={"weights": self.weights})
        if self.prompt_tokens + self.new_tokens > model.spec.max_positions:
            raise BadSetting(setting="prompt_tokens", reason=f"the model takes {model.spec.max_positions} tokens")
        with (
            emulated(scenario, context.folder / "testbed", real_mbit=True) as testbed,
            _Home(testbed, model, context.report) as home,
        ):
            for rate in self.mbit:
                yield from home.measure(rate, self.prompt_tokens, self.new_tokens, self.rounds)

    def summary(self, rows: Sequence[GenerationRow]) -> Summary:
        said, tables = [], []
        for setting in dict.fromkeys(row.setting for row in rows):
            group = [row for row in rows if row.setting == setting]
            tables.append(Table.of(setting, _COLUMNS, map(_cells, group)))
            for row in group:
                if row.exchange_seconds and row.ping_seconds and row.swap_seconds:
                    exchange, ping, swap = (1e3 * s for s in (row.exchange_seconds, row.ping_seconds, row.swap_seconds))
                    said.append(
                        f"{row.mbit:.0f} Mbit/s: one exchange of partial sums takes {exchange:.2f} ms. A raw ping of that "
                        f"size takes {2 * ping:.2f} ms there and back ({exchange / ping / 2:.2f} x), {ping:.2f} ms one way "
                        f"({exchange / ping:.2f} x); a raw message each way at once {swap:.2f} ms ({exchange / swap:.2f} x)"
                    )
        return Summary(conclusions=tuple(said), tables=tuple(tables))


_COLUMNS = ("strategy", "weights", "ran", "prefill tok/s", "decode tok/s", "min..max", "predicted", "over transformers")


def _cells(row: GenerationRow) -> tuple[str, ...]:
    num = row.new_tokens - 1
    ratio, predicted = row.decode_ratio, row.predicted_token_seconds
    return (
        row.strategy, row.weights, row.devices, f"{row.prompt_tokens / statistics.median(row.prefill):.0f}",
        f"{num / statistics.median(row.decode):.1f}", f"{num / max(row.decode):.1f}..{num / min(row.decode):.1f}",
        f"{1 / predicted:.1f}" if predicted else "-", f"{ratio.median:.2f} {ratio.interval}",
    )  # fmt: skip


@dataclass
class _Measured:
    """Measurements of one strategy, by round."""

    run: Callable[[], dict[str, Any]]
    plan: TransformerPlan | None = None
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


class _Home:
    """The engines on all devices of a testbed, and `transformers` on the first. A context manager."""

    def __init__(self, testbed: Testbed, model: StoredModel, report: Callable[[str], None]) -> None:
        self._testbed, self._model, self._report = testbed, model, report
        self._names = [device.name for device in testbed.scenario.devices]
        self._engine: EngineRunners = EngineRunners(testbed, self._names)
        self._reference = DeviceProcess(testbed, "reference", self._names[0])
        self._profiles = Profiles(testbed.scenario, testbed, self._engine, report)

    def __enter__(self) -> _Home:
        self._report(f"loading {REFERENCE}")
        self._reference.call("load", model_dir=str(self._model.directory), dtype=_REFERENCE_TYPE)
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.__exit__()
        self._reference.__exit__()

    def measure(self, mbit: float, prompt_tokens: int, new_tokens: int, rounds: int) -> Iterator[GenerationRow]:
        """Measure all variants at one link rate."""
        self._testbed.set_mbit(mbit)
        cluster = self._profiles.current(self._model, self._names, prompt_tokens, mbit)
        prompt = [3 + (7919 * i) % (self._model.spec.vocab_size - 3) for i in range(prompt_tokens)]
        found = {REFERENCE: _Measured(lambda: self._reference.call("generate", prompt=prompt, num_tokens=new_tokens))}
        for variant in VARIANTS:
            found[variant] = self._loaded(variant, cluster, mbit, prompt, new_tokens)
        for index in range(-1, rounds):
            self._report(f"{mbit:.0f} Mbit/s: round {index + 1} of {rounds}")
            for name in rotated(list(found), max(index, 0)):
                answer = found[name].run()
                if index >= 0:
                    found[name].prefill.append(answer["prefill"])
                    found[name].decode.append(answer["decode"])
        message = (self._names[0], self._names[1], 4 * self._model.spec.hidden_size, _EXCHANGES)
        links = {
            "exchange_seconds": self._engine.exchange_seconds("hmp", _EXCHANGES),
            "ping_seconds": self._engine.ping_seconds(*message),
            "swap_seconds": self._engine.swap_seconds(*message),
        }
        reference = found[REFERENCE]
        for name, each in found.items():
            weights, devices, predicted = _REFERENCE_TYPE, self._names[0], None
            if each.plan is not None:
                weights, devices = self._model.spec.weights, describe(each.plan)
                predicted = each.plan.predicted.decode_seconds or None
                self._engine.unload(name)
            yield GenerationRow(
                scenario=self._testbed.scenario.name,
                mbit=mbit,
                strategy=name,
                weights=weights,
                devices=devices,
                prompt_tokens=prompt_tokens,
                new_tokens=new_tokens,
                prefill=tuple(each.prefill),
                decode=tuple(each.decode),
                prefill_ratio=paired_ratio(reference.prefill, each.prefill),
                decode_ratio=paired_ratio(reference.decode, each.decode),
                predicted_token_seconds=predicted,
                **(links if name == "hmp" else {}),
            )

    def _loaded(
        self, variant: Variant, cluster: ClusterProfile, mbit: float, prompt: Sequence[int], new_tokens: int
    ) -> _Measured:
        self._report(f"loading {variant}")
        strategy: Strategy | Literal["auto"] = "hmp" if variant == "hmp, 2 micro-batches" else variant
        if strategy == "local":
            cluster = cluster.subset((self._names[0],))
        context = len(prompt) + new_tokens
        request = PlanRequest(
            self._model.spec, cluster, len(prompt), strategy=strategy,
            generation=GenerationRequest(context, 1, len(prompt), new_tokens),
        )  # fmt: skip
        plan = plan_transformer(request).plan
        if strategy != variant:
            ranks = on_subset(request, tuple(device.device_id for device in plan.devices))
            plan = build_plan(ranks, plan.body.model_copy(update={"micro_batches": 2}), plan.planner)
        self._engine.load(variant, plan, self._model, plan.num_ranks > 1, mbit * 1e6 / 8)
        return _Measured(lambda: self._engine.generate(variant, prompt, new_tokens), plan)
