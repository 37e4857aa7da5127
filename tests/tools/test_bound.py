"""The bound of a traced step, for steps that run in memory: a renamed computation or phase fails here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import pytest
from support.models import save_random_model, small_bert
from support.plans import make_plan

from coordinator.models.checkpoint.families import read_spec
from hearth.plan.phases import Phase, TaskKind, Work
from hearth.plan.transformer import LayerMode
from hearth.wire.messages import TraceEvent
from tools.bench.bound import bound_seconds

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from support.engines import EngineCluster

Traces = list[tuple[TraceEvent, ...]]
Kinds = frozenset[TaskKind]

ROWS = 48
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
def traced(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Traces]:
    model_dir = save_random_model(tmp_path_factory.mktemp("bert"), small_bert())

    def run(name: str) -> Traces:
        strategy, modes = PLANS[name]
        plan = make_plan(read_spec(model_dir), strategy, (1, 1), modes=modes)  # type: ignore[arg-type]
        with EngineCluster(model_dir, plan) as cluster:
            _, answers = cluster.run([[(7919 * i) % 3000 for i in range(ROWS)]], trace=True)
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
            assert bound_seconds([whole], rates) == pytest.approx(max(longest)), (kinds, layer)
            total += max(longest)
    assert bound_seconds([traces], rates) == pytest.approx(total)


def test_least_time_of_several_steps_counts(traced: Callable[[str], Traces]) -> None:
    calm = traced("hmp")
    disturbed = [
        tuple(event.model_copy(update={"end_seconds": event.end_seconds + 0.5}) for event in events) for events in calm
    ]
    rates = [1e9, 1e9]
    bound = bound_seconds([calm], rates)
    assert bound_seconds([disturbed, calm], rates) == bound_seconds([calm, disturbed], rates) == bound
    assert bound_seconds([disturbed], rates) > bound + 0.5
