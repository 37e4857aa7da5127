"""A predicted step has the same computations and transfers as a measured one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models import save_random_model, small_bert
from support.plans import cluster, device_profile, make_plan, with_seq_len

from coordinator.models.checkpoint.families import read_spec
from coordinator.plan.transformer.cost.layout import PlanLayout
from coordinator.plan.transformer.cost.predict import predicted_step_timeline
from hearth.plan.common import WireFormat
from hearth.plan.phases import Phase, TaskKind, Work
from hearth.plan.transformer import SEQUENCE, LayerMode
from hearth.wire.messages import DeviceTrace

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

from support.engines import EngineCluster

ROWS = 48
REPLICATED = LayerMode(qkv="replicated", out="replicated", mlp="replicated")
# The prediction includes attention in the task of its output projection, or of the layer, and a norm in the block after
# it. Tokens are assumed to be spread evenly over the owners of vocabulary rows.
_NOT_COMPARED = {Work.ATTENTION, Work.PRE_NORM_ATTENTION, Work.PRE_NORM_MLP, Work.WIRE, Work.EMBEDDING, Phase.EMBED}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_model(tmp_path_factory.mktemp("bert"), small_bert(num_hidden_layers=4))


def hops(traces: list[DeviceTrace], with_tiles: bool) -> set[tuple[TaskKind, int | None, int | None, int, int | None]]:
    return {
        (event.kind, event.layer, event.tile if with_tiles else None, trace.rank, event.peer)
        for trace in traces
        for event in trace.events
        if event.lane == "send" and event.kind not in _NOT_COMPARED
    }


def bars(traces: list[DeviceTrace]) -> set[tuple[TaskKind, int | None, int | None, int | None, int]]:
    return {
        (event.kind, event.layer, event.tile, event.peer, trace.rank)
        for trace in traces
        for event in trace.events
        if event.lane == "compute" and isinstance(event.kind, Work) and event.kind not in _NOT_COMPARED
    }


@pytest.mark.parametrize(
    ("strategy", "modes"),
    [
        ("hmp", ()),
        ("hmp", (REPLICATED, LayerMode(), LayerMode(qkv="replicated"), LayerMode())),
        ("hmp", (SEQUENCE, LayerMode(out="replicated"), LayerMode(), SEQUENCE)),
        ("sp", ()),
        ("megatron-tp", ()),
        ("pipeline", ()),
    ],
    ids=str,
)
@pytest.mark.parametrize("weights", [(1, 1), (2, 1, 1)], ids=str)
def test_predicted_step_equals_the_parts_of_a_measured_one(
    strategy: str, modes: tuple[LayerMode, ...], weights: tuple[int, ...], bert: Path
) -> None:
    spec = read_spec(bert)
    plan = make_plan(spec, strategy, weights, modes=modes)  # type: ignore[arg-type]
    devices = cluster([device_profile(rank, 1.0, spec, ROWS) for rank in range(len(weights))], 100)
    predicted = list(predicted_step_timeline(PlanLayout(spec, with_seq_len(plan.body, ROWS), devices, WireFormat())))
    with EngineCluster(bert, plan) as engines:
        _, answers = engines.run([[(7919 * i) % 3000 for i in range(ROWS)]], trace=True)
        real = engines.traces(answers)
    found = hops(real, strategy != "pipeline")
    assert found == hops(predicted, strategy != "pipeline")
    assert found
    if strategy != "pipeline":  # pipeline stages are one task each
        assert bars(real) == bars(predicted)
        assert bars(real)
