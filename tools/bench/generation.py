"""Generation speed of a decoder: on one device, on several, and `transformers` on one, in interleaved rounds.

Weights are random. Decode rates exclude the first token, which the prefill produces.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from coordinator.models.checkpoint.families import FAMILIES
from coordinator.plan.transformer.make import plan_transformer
from coordinator.plan.transformer.request import GenerationRequest, PlanRequest, on_subset, price
from hearth.errors import BadSetting
from hearth.plan.model_spec import WeightFormat
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile
from hearth.plan.transformer import Strategy
from tools.bench.drive import EngineRunners, ReferenceRunner, StoredModel
from tools.bench.plans import describe
from tools.bench.profiles import Profiles
from tools.bench.stats import paired_ratio, rotated
from tools.testbed import Testbed

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
    """One strategy at one link rate. `prefill` and `decode` are medians over rounds, in tokens per second."""

    model_config = ConfigDict(frozen=True)

    scenario: str
    mbit: float
    strategy: str
    weights: str
    devices: str
    prompt_tokens: int
    new_tokens: int
    prefill: float
    decode: float
    decode_min: float
    decode_max: float
    prefill_over_reference: float
    decode_over_reference: float
    decode_low: float  # 95 % confidence interval of the ratio
    decode_high: float
    decode_predicted: float | None = None
    exchange_seconds: float | None = None  # of partial sums of one row, between two devices
    ping_seconds: float | None = None  # one way, a raw message of the same size over the same kind of socket
    swap_seconds: float | None = None  # one such message in each direction at once


@dataclass
class _Measured:
    """Measurements of one strategy, by round."""

    run: Callable[[], dict[str, Any]]
    plan: TransformerPlan | None = None
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


def save_random_decoder(directory: Path, config: Mapping[str, Any]) -> Path:
    """Save a decoder with this config and random weights. Raises BadSetting if Hearth does not support it."""
    kind = str(config.get("model_type", "missing"))
    if kind not in FAMILIES or not FAMILIES[kind].facts.get("causal"):
        raise BadSetting(setting="--config", reason=f"the model_type {kind} is not a decoder that Hearth supports")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    values = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype", "dtype")}
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values))
    except (ValueError, TypeError) as error:
        raise BadSetting(setting="--config", reason=str(error)) from None
    model.float().save_pretrained(directory)
    return directory


class GenerationBench:
    """Runs on a started testbed."""

    def __init__(
        self, testbed: Testbed, model: StoredModel, weights: WeightFormat, report: Callable[[str], None]
    ) -> None:
        model.spec = model.spec.model_copy(update={"weights": weights})
        self._testbed, self._model, self._report = testbed, model, report
        self._names = [device.name for device in testbed.scenario.devices]
        self._engine: EngineRunners = EngineRunners(testbed, self._names)
        self._reference = ReferenceRunner(testbed, self._names[0])
        self._profiles = Profiles(testbed.scenario, testbed, self._engine, report)

    def __enter__(self) -> GenerationBench:
        self._report(f"loading {REFERENCE}")
        self._reference.load(self._model, _REFERENCE_TYPE)
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.__exit__(None, None, None)
        self._reference.__exit__(None, None, None)

    def measure(self, mbit: float, prompt_tokens: int, new_tokens: int, rounds: int) -> list[GenerationRow]:
        """Measure all variants at one link rate. Raises BadSetting if the model's context is too short."""
        if prompt_tokens + new_tokens > self._model.spec.max_positions:
            raise BadSetting(setting="--prompt", reason=f"the model takes {self._model.spec.max_positions} tokens")
        self._testbed.set_mbit(mbit)
        cluster = self._profiles.current(self._model, self._names, prompt_tokens, mbit)
        prompt = [3 + (7919 * i) % (self._model.spec.vocab_size - 3) for i in range(prompt_tokens)]
        found = {REFERENCE: _Measured(lambda: self._reference.generate(prompt, new_tokens))}
        for variant in VARIANTS:
            found[variant] = self._loaded(variant, cluster, mbit, prompt, new_tokens)
        for index in range(-1, rounds):
            self._report(f"{mbit:.0f} Mbit/s: round {index + 1} of {rounds}")
            for name in rotated(list(found), max(index, 0)):
                answer = found[name].run()
                if index >= 0:
                    found[name].prefill.append(answer["prefill"])
                    found[name].decode.append(answer["decode"])
        spec = self._model.spec
        exchange = self._engine.exchange_seconds("hmp", _EXCHANGES)
        of_that_size = (self._names[0], self._names[1], 4 * spec.hidden_size, _EXCHANGES)
        ping, swap = self._engine.ping_seconds(*of_that_size), self._engine.swap_seconds(*of_that_size)
        rows = [
            self._row(name, each, found[REFERENCE], mbit, prompt_tokens, new_tokens) for name, each in found.items()
        ]
        for variant in VARIANTS:
            self._engine.unload(variant)
        return [
            row.model_copy(update={"exchange_seconds": exchange, "ping_seconds": ping, "swap_seconds": swap})
            if row.strategy == "hmp"
            else row
            for row in rows
        ]

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
            plan = price(ranks, plan.body.model_copy(update={"micro_batches": 2}), plan.planner)
        self._engine.load(variant, plan, self._model, plan.num_ranks > 1, mbit * 1e6 / 8)
        return _Measured(lambda: self._engine.generate(variant, prompt, new_tokens), plan)

    def _row(
        self, name: str, each: _Measured, reference: _Measured, mbit: float, prompt_tokens: int, new_tokens: int
    ) -> GenerationRow:
        ratio = paired_ratio(reference.decode, each.decode)
        token_seconds = each.plan.predicted.decode_seconds if each.plan is not None else 0.0
        return GenerationRow(
            scenario=self._testbed.scenario.name,
            mbit=mbit,
            strategy=name,
            weights=_REFERENCE_TYPE if each.plan is None else self._model.spec.weights,
            devices=self._names[0] if each.plan is None else describe(each.plan),
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            prefill=prompt_tokens / statistics.median(each.prefill),
            decode=(new_tokens - 1) / statistics.median(each.decode),
            decode_min=(new_tokens - 1) / max(each.decode),
            decode_max=(new_tokens - 1) / min(each.decode),
            prefill_over_reference=paired_ratio(reference.prefill, each.prefill).median,
            decode_over_reference=ratio.median,
            decode_low=ratio.low,
            decode_high=ratio.high,
            decode_predicted=1 / token_seconds if token_seconds else None,
        )


def markdown(rows: Sequence[GenerationRow]) -> str:
    """One Markdown table per link rate."""
    lines: list[str] = []
    for mbit in dict.fromkeys(row.mbit for row in rows):
        group = [row for row in rows if row.mbit == mbit]
        lines += [
            f"**{group[0].scenario}, {mbit:.0f} Mbit/s, {group[0].prompt_tokens} + {group[0].new_tokens} tokens**", "",
            "| strategy | weights | ran | prefill tok/s | decode tok/s | min..max | predicted | over transformers |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]  # fmt: skip
        for row in group:
            predicted = f"{row.decode_predicted:.1f}" if row.decode_predicted else "-"
            lines.append(
                f"| {row.strategy} | {row.weights} | {row.devices} | {row.prefill:.0f} | {row.decode:.1f} | "
                f"{row.decode_min:.1f}..{row.decode_max:.1f} | {predicted} | {row.decode_over_reference:.2f} "
                f"[{row.decode_low:.2f}, {row.decode_high:.2f}] |"
            )
        for row in group:
            if row.exchange_seconds and row.ping_seconds and row.swap_seconds:
                exchange, ping, swap = (1e3 * s for s in (row.exchange_seconds, row.ping_seconds, row.swap_seconds))
                lines += [
                    "",
                    f"One exchange of partial sums takes {exchange:.2f} ms. A raw ping of that size takes {2 * ping:.2f} ms "
                    f"there and back ({exchange / ping / 2:.2f} x), {ping:.2f} ms one way ({exchange / ping:.2f} x); a raw "
                    f"message each way at once {swap:.2f} ms ({exchange / swap:.2f} x).",
                ]
        lines.append("")
    return "\n".join(lines)
