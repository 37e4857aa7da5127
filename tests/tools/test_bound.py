"""The bound of a step, for steps that run in memory: a renamed computation or phase fails here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.models import save_random_model, small_bert
from support.plans import make_plan

from coordinator.models.checkpoint.families import read_spec
from hearth.plan.phases import Phase, TaskKind, Work
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import LayerMode
from hearth.wire.messages import Run, TraceEvent
from tools.bench.bound import bound_seconds

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from support.engines import TOKEN, EngineCluster

from tools.bench.runner import isolated_engine

Traces = list[tuple[TraceEvent, ...]]
Kinds = frozenset[TaskKind]

ROWS = 48
TOKEN_IDS = [(7919 * i) % 3000 for i in range(ROWS)]
REPLICATED = LayerMode(qkv="replicated", out="replicated", mlp="replicated")
PLANS = {
    "hmp": ("hmp", ()),
    "hmp, replicated": ("hmp", (REPLICATED, REPLICATED)),
    "sp": ("sp", ()),
    "megatron-tp": ("megatron-tp", ()),
    "pipeline": ("pipeline", ()),
}


def group(*kinds: TaskKind) -> Kinds:
    return frozenset(kinds)


AROUND = [
    group(kind) for kind in (Work.PRE_NORM_ATTENTION, Work.PRE_NORM_MLP, Work.CONNECTIVE_ATTENTION, Work.CONNECTIVE_MLP)
]
EMBEDDING = [group(Work.EMBEDDING), group(Phase.EMBED)]
# For each plan, the groups of kinds that can run concurrently; groups run one after another.
GROUPS: dict[str, list[Kinds]] = {
    "hmp": [
        *EMBEDDING, *AROUND,
        group(Work.QKV, Phase.GATHER_ATTENTION),
        group(Work.ATTENTION, Work.OUT, Phase.REDUCE_ATTENTION),
        group(Work.UP, Work.DOWN, Phase.GATHER_MLP, Phase.REDUCE_MLP),
    ],
    "hmp, replicated": [
        *EMBEDDING, *AROUND,
        group(Work.QKV, Phase.EXCHANGE_QKV),
        group(Work.ATTENTION, Work.OUT, Phase.EXCHANGE_HEADS),
        group(Work.MLP_BLOCK),
    ],
    "sp": [
        *EMBEDDING, *AROUND,
        group(Work.QKV),
        group(Phase.GATHER_KEYS, Phase.GATHER_VALUES),
        group(Work.ATTENTION, Work.OUT),
        group(Work.MLP_BLOCK),
    ],
    "megatron-tp": [
        *EMBEDDING, *AROUND,
        group(Work.QKV),
        group(Work.ATTENTION, Work.OUT, Phase.REDUCE_ATTENTION),
        group(Phase.REDUCE_GATHER_ATTENTION),
        group(Work.UP, Work.DOWN, Phase.REDUCE_MLP),
        group(Phase.REDUCE_GATHER_MLP),
    ],
    "pipeline": [
        group(Work.EMBEDDING), *AROUND, group(Work.ATTENTION_BLOCK), group(Work.MLP_BLOCK), group(Phase.STAGE_ROWS),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("bert"), small_bert())


def plan_of(name: str, model_dir: Path) -> TransformerPlan:
    strategy, modes = PLANS[name]
    return make_plan(read_spec(model_dir), strategy, (1, 1), modes=modes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def traced(model_dir: Path) -> Callable[[str], Traces]:
    def run(name: str) -> Traces:
        with EngineCluster(model_dir, plan_of(name, model_dir)) as cluster:
            _, answers = cluster.run([TOKEN_IDS], trace=True)
        return [answer.trace for answer in answers]

    return run


def only(traces: Traces, kinds: Collection[TaskKind], layer: int | None, lanes: Sequence[str]) -> Traces:
    return [tuple(e for e in events if e.kind in kinds and e.layer == layer and e.lane in lanes) for events in traces]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("rate", [1e5, 1e8, 1e12])
def test_concurrent_kinds_count_once_and_groups_add_up(name: str, rate: float, traced: Callable[[str], Traces]) -> None:
    traces, groups, rates = traced(name), GROUPS[name], [rate, rate / 3]
    seen = {event.kind for events in traces for event in events}
    assert seen == frozenset[TaskKind]().union(*groups)
    total = 0.0
    for kinds in groups:
        layers = {event.layer for events in traces for event in events if event.kind in kinds}
        assert layers
        for layer in layers:
            longest = []
            for lane in ("compute", "send", "receive"):
                for events, each in zip(only(traces, kinds, layer, [lane]), rates, strict=True):
                    longest.append(
                        sum(event.end_seconds - event.start_seconds for event in events)
                        if lane == "compute"
                        else sum(event.num_bytes for event in events) / each
                    )
            whole = only(traces, kinds, layer, ["compute", "send", "receive"])
            assert bound_seconds(whole, whole, rates) == pytest.approx(max(longest)), (kinds, layer)
            total += max(longest)
    assert bound_seconds(traces, traces, rates) == pytest.approx(total)


def test_computations_come_from_the_one_trace_and_transfers_from_the_other(traced: Callable[[str], Traces]) -> None:
    calm, rates = traced("hmp"), [1e9, 1e9]
    slow = [
        tuple(event.model_copy(update={"end_seconds": event.end_seconds + 0.5}) for event in events) for events in calm
    ]
    large = [
        tuple(event.model_copy(update={"num_bytes": event.num_bytes + 1_000_000_000}) for event in events)
        for events in calm
    ]
    bound = bound_seconds(calm, calm, rates)
    assert bound_seconds(calm, slow, rates) == bound_seconds(large, calm, rates) == bound
    assert bound_seconds(slow, calm, rates) > bound + 0.5
    assert bound_seconds(calm, large, rates) > bound + 0.5


@pytest.mark.parametrize("name", PLANS)
def test_isolated_step_computes_what_the_rank_computes_in_a_whole_step(
    name: str, model_dir: Path, traced: Callable[[str], Traces]
) -> None:
    plan = plan_of(name, model_dir)
    ids, lengths = np.array(TOKEN_IDS, np.int32), np.array([0, ROWS], np.int32)
    with EngineCluster(model_dir, plan) as cluster:
        for rank, whole in enumerate(traced(name)):
            # It has a transport, over which nothing comes: a step that waited for its peer would fail.
            alone = isolated_engine(plan, rank, cluster.shards[rank], cluster.hub.transport(rank), plan.epoch, TOKEN)
            done, output = alone.run(Run(holder="t", epoch=plan.epoch, step=1, output="mean", timeout_seconds=0.1,
                                         trace=True), ids, lengths)  # fmt: skip
            assert {event.lane for event in done.trace} == {"compute"}
            assert computations(done.trace) == computations(whole)
            assert np.isfinite(output).all()


def computations(events: Sequence[TraceEvent]) -> Counter[tuple[object, ...]]:
    """What was computed, in any order."""
    return Counter((event.kind, event.layer, event.tile, event.peer) for event in events if event.lane == "compute")
