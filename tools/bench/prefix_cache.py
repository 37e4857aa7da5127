"""Kind `prefix-cache`: time to the first token of prompts whose first part is in the KV cache, and of the same prompts without.

The time is that of rank 0, from the request to the first token. Each round has a new end of the prompt; the same prompt is
computed with the prefix cache and without.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from coordinator.plan.transformer.choose import plan_transformer
from coordinator.plan.transformer.request import GenerationRequest, PlanRequest
from hearth.plan.common import ValueFormatName, WireFormat
from hearth.plan.model_spec import WeightFormat
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile
from hearth.plan.transformer import KV_BLOCK_TOKENS
from tools.bench.drive import EngineRunners, StoredModel, made_up_prompt
from tools.bench.experiment import Context, Experiment, Named
from tools.bench.generation import LLAMA
from tools.bench.homes import decoder_directory
from tools.bench.load import load_between, snapshot
from tools.bench.measure import MIN_ROUNDS, emulated
from tools.bench.plans import describe
from tools.bench.profiles import Profiles
from tools.bench.results import Summary, Table
from tools.bench.stats import Ratio, paired_ratio, rotated
from tools.testbed import load_scenario
from tools.testbed.cluster import check_possible

_NEW_TOKENS = 4  # of an answer, which are compared
_SEQUENCES = 3  # of which the KV cache has room: the cached prefix stays while others are computed
_SCOPES = {"cached": "bench", "whole": ""}  # of requests with the prefix cache and without


class PrefixRow(BaseModel):
    """One plan. `cached` and `whole`: seconds to the first token by round, with the prefix cache and without."""

    model_config = ConfigDict(frozen=True)

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


class PrefixCache(Experiment):
    """A decoder of random weights on one device and on two, with prompts that share a prefix."""

    ROW: ClassVar[TypeAdapter[Any]] = TypeAdapter(PrefixRow)
    PAGE = "generation"
    NAMED: ClassVar[Named] = {
        "prefix-cache": {"title": "Time to the first token of prompts whose first part is in the KV cache"}
    }

    scenario: str = "whole-cores"
    model: dict[str, Any] = LLAMA
    layers: int = Field(6, ge=1)
    weights: WeightFormat = "int4"
    wire: ValueFormatName = "exact"
    mbit: float = Field(500.0, ge=1)  # real rate
    strategies: tuple[Literal["local", "hmp"], ...] = ("local", "hmp")
    prefix_blocks: int = Field(2048 // KV_BLOCK_TOKENS, ge=1)  # blocks of the KV cache: 2048 tokens
    other_tokens: int = Field(20, ge=1)  # of each prompt, after the prefix
    step_rows: int = Field(512, ge=1)  # of a prefill step
    rounds: int = Field(MIN_ROUNDS, ge=1)

    @property
    def _prefix_tokens(self) -> int:
        return self.prefix_blocks * KV_BLOCK_TOKENS

    def measure(self, context: Context) -> Iterator[PrefixRow]:
        scenario = load_scenario(self.scenario)
        check_possible(scenario)
        context.report("making the model")
        config = {**self.model, "num_hidden_layers": self.layers}
        model = StoredModel(
            decoder_directory(config, context.folder, "float32"), context.folder / "store", self.weights
        )
        names = [device.name for device in scenario.devices]
        sets = ", ".join(dict.fromkeys(device.instruction_set for device in scenario.devices))
        with (
            emulated(scenario, context.folder / "testbed", real_mbit=True) as testbed,
            EngineRunners(testbed, names) as engine,
        ):
            testbed.set_mbit(self.mbit)
            cluster = Profiles(scenario, testbed, engine, context.report).current(
                model, names, self.step_rows, self.mbit
            )
            for strategy in self.strategies:
                plan = self._plan(strategy, model, cluster)
                context.report(f"loading {strategy}")
                engine.load(strategy, plan, model, plan.num_ranks > 1, self.mbit * 1e6 / 8, profile=cluster)
                yield self._row(strategy, plan, engine, sets, context)
                engine.unload(strategy)

    def _plan(self, strategy: str, model: StoredModel, cluster: ClusterProfile) -> TransformerPlan:
        if strategy == "local":
            cluster = cluster.subset((cluster.devices[0].device_id,))
        prompt_tokens = self._prefix_tokens + self.other_tokens
        expected = GenerationRequest(prompt_tokens + _NEW_TOKENS, _SEQUENCES, prompt_tokens, _NEW_TOKENS)
        wire = WireFormat(values=self.wire)
        return plan_transformer(
            PlanRequest(model.spec, cluster, self.step_rows, wire, strategy, generation=expected)
        ).plan

    def _row(
        self, strategy: str, plan: TransformerPlan, engine: EngineRunners, sets: str, context: Context
    ) -> PrefixRow:
        vocab_size = plan.model.vocab_size
        prefix = made_up_prompt(vocab_size, self._prefix_tokens)

        def answer(kind: str, index: int) -> dict[str, Any]:
            # The first token differs in every round, so that no block after the prefix is found.
            ends = [3 + (104729 * index + 31 * i) % (vocab_size - 3) for i in range(self.other_tokens)]
            return engine.generate(strategy, [*prefix, *ends], _NEW_TOKENS, prefix_scope=_SCOPES[kind])

        context.report(f"{strategy}: warming up")
        for kind, index in (("whole", -1), ("cached", -1), ("cached", -2)):  # computes the prefix, then finds it
            answer(kind, index)
        found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _SCOPES}
        began = snapshot()
        for index in range(self.rounds):
            context.report(f"{strategy}: round {index + 1} of {self.rounds}")
            for kind in rotated(list(_SCOPES), index):
                found[kind].append(answer(kind, index))
        disturbed = load_between([(began, snapshot())]).distrust
        seconds = {
            kind: tuple(each["times"][0] - each["submitted"] for each in answers) for kind, answers in found.items()
        }
        pairs = zip(found["cached"], found["whole"], strict=True)
        return PrefixRow(
            strategy=strategy, devices=describe(plan), instruction_set=sets, weights=self.weights,
            layers=plan.model.num_layers, prefix_tokens=self._prefix_tokens, other_tokens=self.other_tokens,
            num_cached=tuple(each["cached"] for each in found["cached"]), cached=seconds["cached"], whole=seconds["whole"],
            share=paired_ratio(seconds["cached"], seconds["whole"]),
            same_tokens=sum(one["tokens"] == other["tokens"] for one, other in pairs), disturbed=disturbed,
        )  # fmt: skip

    def summary(self, rows: Sequence[PrefixRow]) -> Summary:
        columns = {
            "strategy": lambda row: row.strategy,
            "ran": lambda row: f"{row.devices}, {row.instruction_set}, {row.weights}, {row.layers} layers",
            "tokens": lambda row: f"{row.prefix_tokens} + {row.other_tokens}",
            "all computed": lambda row: f"{statistics.median(row.whole):.3f} s",
            "prefix cached": lambda row: f"{statistics.median(row.cached):.3f} s",
            "share": lambda row: f"{row.share.median:.1%} [{row.share.low:.1%}, {row.share.high:.1%}]",
            "same answers": lambda row: f"{row.same_tokens} of {len(row.cached)}",
        }
        title = f"Time to the first token, {self.mbit:.0f} Mbit/s"
        return Summary(
            conclusions=tuple(f"{row.strategy}: {row.disturbed}" for row in rows if row.disturbed),
            tables=(Table.of_columns(title, columns, rows),),
            failure="" if all(row.all_found for row in rows) else "the prefix was not found in the KV cache",
        )
