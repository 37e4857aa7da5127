"""Weights that several operators use: a packed copy for each operator, or in place where the plan has no room for copies."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from onnx import ModelProto, TensorProto, helper, numpy_helper
from support.graph_engines import make_model, plan_of, put_into, reference, segment_files
from support.runtimes import RuntimeHome

from agent.daemon.store import ShardStore
from hearth.plan.graph import weights_stay_in_place
from hearth.plan.plan import GraphPlan
from hearth.wire.framing import pack_array, unpack_array
from hearth.wire.messages import Run, RunDone, SegmentParts

SIZE, NUM_PRODUCTS = 1024, 12
WEIGHT_BYTES = 4 * SIZE * SIZE


def products() -> ModelProto:
    """x @ w, @ w, ..., with one weight of 4 MB."""
    rng = np.random.default_rng(0)
    names = ["x", *(f"t{index}" for index in range(NUM_PRODUCTS))]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, SIZE]) for name in names]
    nodes = [helper.make_node("MatMul", [a, "w"], [b]) for a, b in zip(names[:-1], names[1:], strict=True)]
    weight = numpy_helper.from_array(rng.standard_normal((SIZE, SIZE), dtype=np.float32) / SIZE**0.5, "w")
    return make_model(helper.make_graph(nodes, "products", values[:1], values[-1:], [weight], value_info=values[1:-1]))


def planned(model: ModelProto, weight_bytes: int, epoch: int) -> GraphPlan:
    """Each product in a segment of its own, on one device that has this many bytes for weights."""
    plan = plan_of(model, [(0, [index]) for index in range(NUM_PRODUCTS)]).with_epoch(epoch)
    memory = plan.devices[0].memory.model_copy(update={"weights": weight_bytes})
    return plan.model_copy(update={"devices": (plan.devices[0].model_copy(update={"memory": memory}),)})


def proportional_bytes() -> int:
    """Memory of this process; pages that are mapped several times count once."""
    rows = Path(f"/proc/{os.getpid()}/smaps_rollup").read_text().splitlines()
    return int(next(row for row in rows if row.startswith("Pss:")).split()[1]) << 10


def test_segments_hold_a_shared_weight_once_if_the_plan_has_no_room_for_copies(tmp_path: Path) -> None:
    model, store = products(), ShardStore(tmp_path / "store", 1 << 30, "device")
    x = np.random.default_rng(1).standard_normal((1, SIZE), dtype=np.float32)
    expected = reference(model, {"x": x})[f"t{NUM_PRODUCTS - 1}"]
    held = []
    with closing(RuntimeHome(store.path)) as home:
        # Sessions of one plan are not used for another one that has less or more memory for weights.
        for epoch, weight_bytes in enumerate((WEIGHT_BYTES, NUM_PRODUCTS * WEIGHT_BYTES, WEIGHT_BYTES), start=1):
            plan = planned(model, weight_bytes, epoch)
            files = segment_files(model, plan, 0, put_into(store))
            home.deploy(plan, ["device"], [SegmentParts(files=files)])
            request = Run(holder="test", epoch=epoch, step=1, timeout_seconds=30.0, names=("x",))
            ((answer, frames),) = home.ask([(request, [bytes(each) for each in pack_array(x)])])
            assert isinstance(answer, RunDone)
            np.testing.assert_allclose(unpack_array(frames), expected, rtol=1e-4, atol=1e-5)
            held.append(proportional_bytes())
    in_place, copied, in_place_again = held
    assert copied - in_place > NUM_PRODUCTS / 2 * WEIGHT_BYTES, held
    assert copied - in_place_again > NUM_PRODUCTS / 2 * WEIGHT_BYTES, held


@pytest.mark.parametrize(("planned_bytes", "expected"), [(0, False), (1, True), (94, True), (95, False), (200, False)])
def test_weights_are_copied_where_the_plan_has_room(planned_bytes: int, expected: bool) -> None:
    assert weights_stay_in_place(planned_bytes, 100) == expected
