"""Segments in onnxruntime on several ranks in one process: outputs equal one session, and failures are reported."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from onnx import TensorProto, numpy_helper
from support.graph_engines import (
    TOKEN,
    Array,
    GraphCluster,
    make_model,
    plan_of,
    put_into,
    random_array,
    random_cut,
    random_model,
    reference,
    segment_files,
)
from support.graph_plans import make_graph_plan
from support.onnx_models import graph, integers, node, value, weight
from support.waiting import wait_for

from agent.daemon.store import ShardStore
from agent.worker.graph.engine import MAX_TRACE_EVENTS
from agent.worker.graph.sessions import ArrayType, RunControl, SegmentSession, load_segment
from agent.worker.tracing import Recorder, TransferEvent
from hearth.errors import (
    BadPlan,
    BadRequest,
    ChunkCorrupt,
    ChunkMissing,
    FrameTooLarge,
    HearthError,
    QueueFull,
    StepFailed,
)
from hearth.plan.common import WireFormat
from hearth.plan.phases import Phase, Work
from hearth.transport.base import Received
from hearth.wire.codec import Codec
from hearth.wire.framing import TileKey, encode_tile
from hearth.wire.messages import ArrayChunks, Failed, RunDone, SegmentFiles, WireStats, decode, encode

SHAPE = [3, 24]  # of `random_array`


def feeds_of(seed: int) -> dict[str, Array]:
    return {"x": random_array(seed), "z": random_array(seed + 1000)}


# ---- equal to one session -----------------------------------------------------------------------------------------------


@given(
    st.integers(0, 2**32), st.integers(6, 24), st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.booleans()
)  # fmt: skip
def test_random_cuts_equal_one_session(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    operators: int,
    segments: int,
    ranks: int,
    requests: int,
    repeats: bool,
) -> None:
    """`repeats`: tensors arrive twice, as after a connection broke."""
    rng = random.Random(seed)
    model = random_model(rng, operators)
    plan = random_cut(model, rng, max(segments, ranks), ranks)
    feeds = [feeds_of(index) for index in range(requests)]
    with GraphCluster(plan, model, tmp_path_factory.mktemp("stores")) as cluster:
        cluster.hub.repeats = repeats
        for step, fed in enumerate(feeds):  # all requests are in flight at once
            cluster.start(step, fed)
        for step, fed in enumerate(feeds):
            outputs, expected = cluster.outputs(step), reference(model, fed)
            assert outputs.keys() == expected.keys()
            for name, array in expected.items():
                assert (outputs[name].dtype, outputs[name].shape) == (array.dtype, array.shape)
                np.testing.assert_allclose(outputs[name], array, rtol=1e-4, atol=1e-4)


def test_lossy_wire_format_changes_floats_only(tmp_path: Path) -> None:
    """Rank 0 computes floats and integers from one input; rank 1 combines them."""
    nodes = [
        node("Relu", "x", "f"), node("Cast", "x", "i", to=TensorProto.INT64), node("Identity", "f", "y"),
        node("Identity", "i", "j"),
    ]  # fmt: skip
    outputs_of_both = graph(nodes, [value("x", SHAPE)], [value("y", SHAPE), value("j", SHAPE, TensorProto.INT64)])
    outputs_of_both.value_info.extend([value("f", SHAPE), value("i", SHAPE, TensorProto.INT64)])
    model = make_model(outputs_of_both)
    plan = plan_of(model, [(0, [0, 1]), (1, [2, 3])], WireFormat(values="bf16", lz4="off"))
    x = 1e6 * random_array(0)
    with GraphCluster(plan, model, tmp_path) as cluster:
        cluster.start(1, {"x": x})
        outputs = cluster.outputs(1)
        assert np.array_equal(outputs["j"], x.astype(np.int64))
        assert not np.array_equal(outputs["y"], np.maximum(x, 0))
        np.testing.assert_allclose(outputs["y"], np.maximum(x, 0), rtol=1 / 128)
        done, _ = cluster.answer(1, 0)
        assert isinstance(done, RunDone)
        assert done.wire.sent_bytes == done.wire.raw_bytes - x.nbytes // 2


def test_arrays_of_zero_and_six_dimensions_are_transferred(tmp_path: Path) -> None:
    """Window attention splits images into six axes; a loss or a count is a scalar."""
    shape = [1, 2, 3, 2, 2, 3]
    nodes = [
        node("Reshape", "x shape", "windows"), node("ReduceSum", "x", "sum", keepdims=0), node("Add", "windows sum", "y"),
    ]  # fmt: skip
    windows = graph(nodes, [value("x", SHAPE)], [value("y", shape)], [integers("shape", *shape)])
    windows.value_info.extend([value("windows", shape), value("sum", [])])
    model, x = make_model(windows), random_array(0)
    with GraphCluster(plan_of(model, [(0, [0, 1]), (1, [2])]), model, tmp_path) as cluster:
        cluster.start(1, {"x": x})
        np.testing.assert_allclose(cluster.outputs(1)["y"], x.reshape(shape) + x.sum(), rtol=1e-5)


# ---- several requests in flight -------------------------------------------------------------------------------------------


class Stage:
    """A stand-in for a session: adds one. It records its inputs, and waits for its gate if it has one."""

    def __init__(self, name: str = "x") -> None:
        self.inputs = {name: ArrayType("float32", (None,))}
        self.fed: list[Array] = []
        self.gate: threading.Event | None = None

    def run(self, feeds: Mapping[str, Array], control: RunControl) -> list[Array]:
        (array,) = feeds.values()
        self.fed.append(array)
        if self.gate is not None:
            assert self.gate.wait(30)
        return [array + 1]


CHAIN = make_graph_plan([(0, ("x",), ("a",)), (1, ("a",), ("b",)), (2, ("b",), ("y",))], ("x",), ("y",))


def test_requests_are_pipelined() -> None:
    """While the last stage computes the first request, the others compute the following ones."""
    stages = [Stage(), Stage("a"), Stage("b")]
    stages[2].gate = threading.Event()
    with GraphCluster(CHAIN, sessions=[[stage] for stage in stages]) as cluster:
        for step in range(4):
            cluster.start(step, {"x": np.full(4, step, np.float32)})
        wait_for("the stages before it", lambda: len(stages[1].fed) == 4)
        wait_for("the last stage", lambda: bool(stages[2].fed))
        assert len(stages[0].fed) == 4
        assert len(stages[2].fed) == 1
        stages[2].gate.set()
        for step in range(4):
            assert np.array_equal(cluster.outputs(step)["y"], np.full(4, step + 3, np.float32))


def test_request_waiting_for_a_peer_does_not_block_the_next(tmp_path: Path) -> None:
    """Rank 1 of a diamond: its second segment waits for rank 0, so it runs the first segment of the next request."""
    plan = make_graph_plan(
        [(0, ("x",), ("a",)), (1, ("x",), ("b",)), (1, ("a", "b"), ("y",))], ("x",), ("y",)
    )  # fmt: skip
    slow, quick = Stage(), Stage()
    slow.gate = threading.Event()

    class Join(Stage):
        def run(self, feeds: Mapping[str, Array], control: RunControl) -> list[Array]:
            return [feeds["a"] + feeds["b"]]

    with GraphCluster(plan, sessions=[[slow], [quick, Join()]]) as cluster:
        for step in range(3):
            cluster.start(step, {"x": np.full(2, step, np.float32)})
        wait_for("the next requests", lambda: len(quick.fed) == 3)
        assert [array[0] for array in quick.fed] == [0, 1, 2]
        slow.gate.set()
        for step in range(3):
            assert cluster.outputs(step)["y"][0] == 2 * (step + 1)


def test_request_above_the_limit_is_rejected() -> None:
    stage = Stage()
    stage.gate = threading.Event()
    plan = make_graph_plan([(0, ("x",), ("y",))], ("x",), ("y",))
    with GraphCluster(plan, sessions=[[stage]], max_in_flight=2) as cluster:
        feeds = {"x": np.zeros(1, np.float32)}
        cluster.start(1, feeds)
        cluster.start(2, feeds)
        with pytest.raises(QueueFull):
            cluster.start(3, feeds)
        stage.gate.set()
        cluster.outputs(1)
        cluster.outputs(2)
        cluster.start(3, feeds)
        cluster.outputs(3)


def test_early_tensors_are_held_up_to_a_limit() -> None:
    with GraphCluster(CHAIN, sessions=[[Stage()], [Stage("a")], [Stage("b")]], max_in_flight=2) as cluster:
        first, second, third = cluster.engines
        for step in range(2):
            cluster.start(step, {"x": np.zeros(1, np.float32)}, ranks=[0])
        for step in range(2):
            assert isinstance(cluster.answer(step, 0)[0], RunDone)
        cluster.start(2, {"x": np.zeros(1, np.float32)}, ranks=[0])
        cluster.answer(2, 0)
        wait_for("the tensor above the limit", lambda: second.dropped)
        assert (first.dropped, second.dropped, third.dropped) == (0, 1, 0)
        for step in range(2):
            cluster.start(step, {}, ranks=[1, 2])
            assert cluster.outputs(step)["y"][0] == 3


def test_exact_tensors_reach_the_session_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [[Stage()], [Stage("a")], [Stage("b")]]
    received: list[memoryview] = []
    cluster = GraphCluster(CHAIN, sessions=stages)
    transport = cluster.hub.transport(1)
    receive = transport.receive

    def recording_receive(timeout_seconds: float) -> Received | None:
        found = receive(timeout_seconds)
        received.extend(found.frames if found is not None else ())
        return found

    monkeypatch.setattr(transport, "receive", recording_receive)
    with cluster:
        cluster.start(1, {"x": np.zeros(50_000, np.float32)})
        cluster.outputs(1)
    (array,) = stages[1][0].fed
    assert not array.flags.writeable
    assert any(np.shares_memory(array, np.frombuffer(frame, np.uint8)) for frame in received)


# ---- failures ---------------------------------------------------------------------------------------------------------------


def failure(cluster: GraphCluster, step: int, rank: int) -> HearthError:
    failed, _ = cluster.answer(step, rank)
    assert isinstance(failed, Failed)
    return failed.error()


def test_missing_tensor_error_names_tensor_and_sender() -> None:
    with GraphCluster(CHAIN, sessions=[[Stage()], [Stage("a")], [Stage("b")]]) as cluster:
        cluster.hub.cut(0, 1)
        cluster.start(1, {"x": np.zeros(1, np.float32)}, timeout=0.5)
        assert isinstance(cluster.answer(1, 0)[0], RunDone)
        for rank, expected in (
            (1, "tensor a had not arrived from rank 0"),
            (2, "tensor b had not arrived from rank 1"),
        ):
            error = failure(cluster, 1, rank)
            assert isinstance(error, StepFailed)
            assert expected in error.reason


def test_timeout_while_computing_is_reported() -> None:
    stage = Stage()
    stage.gate = threading.Event()
    plan = make_graph_plan([(0, ("x",), ("y",))], ("x",), ("y",))
    with GraphCluster(plan, sessions=[[stage]]) as cluster:
        cluster.start(1, {"x": np.zeros(1, np.float32)}, timeout=0.3)
        with pytest.raises(StepFailed, match="had not all finished"):
            cluster.outputs(1)
        stage.gate.set()  # releases the segment; its result is dropped
        cluster.start(2, {"x": np.zeros(1, np.float32)})
        assert cluster.outputs(2)["y"][0] == 1


def test_abort_ends_one_request_or_all() -> None:
    stages = [Stage(), Stage("a"), Stage("b")]
    stages[1].gate = threading.Event()
    with GraphCluster(CHAIN, sessions=[[stage] for stage in stages]) as cluster:
        for step in range(4):
            cluster.start(step, {"x": np.zeros(1, np.float32)})
        for engine in cluster.engines:
            engine.abort(0, "the client is gone")
        for rank in (1, 2):
            assert "the client is gone" in str(failure(cluster, 0, rank))
        stages[1].gate.set()
        assert cluster.outputs(1)["y"][0] == 3
        stages[1].gate.clear()
        cluster.start(9, {"x": np.zeros(1, np.float32)})
        cluster.engines[1].abort(None, "rank 2 is gone")
        assert "rank 2 is gone" in str(failure(cluster, 9, 1))
        stages[1].gate.set()
        cluster.start(10, {"x": np.zeros(1, np.float32)})
        assert cluster.outputs(10)["y"][0] == 3


def test_abort_interrupts_a_running_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small products: onnxruntime checks between operators whether it should stop."""
    size, depth = 512, 120
    nodes = [node("MatMul", f"t{i} w", f"t{i + 1}") for i in range(depth)]
    identity, shape = np.eye(size, dtype=np.float32), [size, size]
    weights = [numpy_helper.from_array(identity, "w")]
    model = make_model(graph(nodes, [value("t0", shape)], [value(f"t{depth}", shape)], weights))
    plan = plan_of(model, [(0, range(depth))])
    feeds = {"t0": identity}
    begun, ends, run = threading.Event(), list[str](), SegmentSession.run

    def recording_run(session: SegmentSession, arrays: Mapping[str, Array], control: RunControl) -> list[Array]:
        begun.set()
        try:
            found = run(session, arrays, control)
        except Exception:
            ends.append("stopped")
            raise
        ends.append("whole")
        return found

    monkeypatch.setattr(SegmentSession, "run", recording_run)
    with GraphCluster(plan, model, tmp_path) as cluster:
        cluster.start(1, feeds)
        cluster.outputs(1)
        begun.clear()
        cluster.start(2, feeds)
        assert begun.wait(30)
        cluster.engines[0].abort(2, "enough")
        with pytest.raises(StepFailed, match="enough"):
            cluster.outputs(2)
        cluster.engines[0].close()
        cluster.threads[0].join(60)
    assert ends == ["whole", "stopped"]


def test_inputs_are_checked_by_name_type_and_shape(tmp_path: Path) -> None:
    model = random_model(random.Random(1), 6)
    with GraphCluster(random_cut(model, random.Random(1), 1, 1), model, tmp_path) as cluster:
        good = feeds_of(0)
        for wrong, why in (
            ({"x": good["x"]}, "the input z is missing"),
            (
                good | {"x": good["x"].astype(np.int64)},
                r"the input x is int64 \[3, 24\], the model takes float32 \[3, 24\]",
            ),
            (good | {"z": good["z"][:2]}, r"the input z is float32 \[2, 24\], the model takes float32 \[3, 24\]"),
            (good | {"z": good["z"].reshape(-1)}, r"the input z is float32 \[72\]"),
        ):
            with pytest.raises(BadRequest, match=why):
                cluster.start(1, wrong)
        cluster.start(1, good)
        cluster.outputs(1)


def test_unexpected_tiles_are_dropped_and_counted() -> None:
    with GraphCluster(CHAIN, sessions=[[Stage()], [Stage("a")], [Stage("b")]]) as cluster:
        sender, codec = cluster.hub.transport(0), Codec(WireFormat(lz4="off"), 1e9, time.perf_counter)
        key = TileKey(1, 1, 0, Phase.TENSOR, 0, 0)  # tensor a, from rank 0: the only valid one
        array = np.zeros(3, np.float32)
        wrong = [
            key._replace(epoch=2), key._replace(layer=1), key._replace(layer=9), key._replace(source=2),
            key._replace(phase=Phase.GATHER_MLP),
        ]  # fmt: skip
        for each in wrong:
            sender.send(1, encode_tile(TOKEN, each, array, codec))
        sender.send(1, encode_tile(bytes(16), key, array, codec))
        sender.send(1, [b"nonsense"])
        cluster.start(1, {"x": np.zeros(3, np.float32)})
        assert cluster.outputs(1)["y"][0] == 3
        done, _ = cluster.answer(1, 1)
        assert isinstance(done, RunDone)
        assert done.dropped_messages == len(wrong) + 2


def test_frame_too_large_ends_only_its_request() -> None:
    class Large(Stage):
        def run(self, feeds: Mapping[str, Array], control: RunControl) -> list[Array]:
            return [np.broadcast_to(feeds["x"][:1], (int(feeds["x"][0]),))]

    with GraphCluster(CHAIN, sessions=[[Large()], [Stage("a")], [Stage("b")]]) as cluster:
        cluster.start(1, {"x": np.full(1, 1 << 25, np.float32)}, timeout=1.0)
        with pytest.raises(FrameTooLarge):
            cluster.outputs(1)
        cluster.start(2, {"x": np.full(1, 8, np.float32)})
        assert cluster.outputs(2)["y"].shape == (8,)


def test_onnxruntime_error_is_reported_and_ends_only_its_request(tmp_path: Path) -> None:
    """An index out of range, which is detected only at run time."""
    table = [numpy_helper.from_array(random_array(0, (3, 4)), "table")]
    lookup = [node("Gather", "table x", "y")]
    model = make_model(graph(lookup, [value("x", [2], TensorProto.INT64)], [value("y", [2, 4])], table))
    with GraphCluster(plan_of(model, [(0, [0])]), model, tmp_path) as cluster:
        cluster.start(1, {"x": np.array([1, 7])})
        with pytest.raises(StepFailed, match=r"segment 0.*out of"):
            cluster.outputs(1)
        cluster.start(2, {"x": np.array([1, 2])})
        assert np.array_equal(cluster.outputs(2)["y"], random_array(0, (3, 4))[1:])


def test_trace_has_segments_and_both_ends_of_transfers() -> None:
    with GraphCluster(CHAIN, sessions=[[Stage()], [Stage("a")], [Stage("b")]]) as cluster:
        asked = time.monotonic()
        cluster.start(1, {"x": np.zeros(1, np.float32)}, trace=True)
        answered = time.monotonic()
        events = {}
        for rank in range(3):
            done, _ = cluster.answer(1, rank)
            assert isinstance(done, RunDone)
            assert len(done.compute_seconds) == 1
            assert done.compute_seconds[0] > 0
            # From the arrival of the request on: a worker's clock is set by both ends of the call (`hearth.trace`).
            assert asked <= done.began_seconds < answered
            assert done.ended_seconds > max(event.end_seconds for event in done.trace) - 1e-9
            events[rank] = {(event.lane, event.kind, event.layer, event.tensor, event.peer) for event in done.trace}
    assert events == {
        0: {("compute", Work.SEGMENT, 0, "", None), ("send", Phase.TENSOR, 0, "a", 1)},
        1: {
            ("receive", Phase.TENSOR, 0, "a", 0),
            ("compute", Work.SEGMENT, 1, "", None),
            ("send", Phase.TENSOR, 1, "b", 2),
        },
        2: {("receive", Phase.TENSOR, 1, "b", 1), ("compute", Work.SEGMENT, 2, "", None)},
    }


def test_longest_trace_fits_in_a_message() -> None:
    recorder = Recorder(enabled=True)
    recorder.transfer(
        TransferEvent("receive", TileKey(1, 1, 65535, Phase.TENSOR, 0, 9), 65535, (1 << 63) - 1, 1e6), "n" * 1024
    )
    done = RunDone(
        names=("y",), began_seconds=0.0, ended_seconds=1.0, compute_seconds=(1.0,), wire=WireStats(), dropped_messages=0,
        trace=recorder.events() * MAX_TRACE_EVENTS,
    )  # fmt: skip
    assert decode(encode(done)) == done


# ---- loading ----------------------------------------------------------------------------------------------------------------


def load(files: SegmentFiles, store: ShardStore, inputs: tuple[str, ...] = ("x", "z")) -> Any:
    (scratch := store.path / "scratch").mkdir(exist_ok=True)
    return load_segment(files, "segment 0", inputs, ("y",), scratch, 1, "cpu")


@pytest.fixture
def files(tmp_path: Path) -> tuple[SegmentFiles, ShardStore]:
    nodes = [node("MatMul", "x w", "t"), node("Add", "t z", "y")]
    weights = [weight("w", 24, 24), weight("unused", 60, 60)]
    model = make_model(graph(nodes, [value("x", SHAPE), value("z", SHAPE)], [value("y", SHAPE)], weights))
    store = ShardStore(tmp_path, 1 << 30, "device")
    return segment_files(model, plan_of(model, [(0, [0, 1])]), 0, put_into(store))[0], store


def everything_in(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_weights_are_mapped_and_temporary_files_removed(tmp_path: Path) -> None:
    matrix = random_array(5, (24, 600))  # 57600 bytes: 15 chunks
    weights = [numpy_helper.from_array(matrix, "w")]
    model = make_model(graph([node("MatMul", "x w", "y")], [value("x", SHAPE)], [value("y", [3, 600])], weights))
    store = ShardStore(tmp_path, 1 << 30, "device")
    (made,) = segment_files(model, plan_of(model, [(0, [0])]), 0, put_into(store))
    assert len(made.initializers[0].chunks) == 15
    before = everything_in(tmp_path)
    session, num_bytes = load(made, store, ("x",))
    assert everything_in(tmp_path) == {
        *before,
        "scratch.part",
    }  # the segment's own file is written again by the next one
    assert matrix.nbytes < num_bytes < matrix.nbytes + 1000
    np.testing.assert_allclose(session.run({"x": random_array(0)})[0], random_array(0) @ matrix, rtol=1e-4, atol=1e-4)


def test_missing_or_wrong_sized_chunks_are_named(files: tuple[SegmentFiles, ShardStore]) -> None:
    made, store = files
    whole = made.initializers[0]
    absent = made.model_copy(update={"initializers": (whole.model_copy(update={"chunks": ("0" * 64,)}),)})
    with pytest.raises(ChunkMissing, match="000000000000"):
        load(absent, store)
    short = made.model_copy(update={"initializers": (whole.model_copy(update={"chunks": made.graph}),)})
    with pytest.raises(ChunkCorrupt, match="w"):
        load(short, store)


def test_segment_that_onnxruntime_rejects_is_a_bad_plan(files: tuple[SegmentFiles, ShardStore]) -> None:
    made, store = files
    put = put_into(store)
    broken = made.model_copy(update={"graph": (put(b"\x07\x07\x07"),)})
    with pytest.raises(BadPlan, match="not an ONNX model"):
        load(broken, store)
    with pytest.raises(BadPlan, match="without its weight w"):
        load(made.model_copy(update={"initializers": ()}), store)
    extra = ArrayChunks(name="v", dtype="float32", shape=(1,), chunks=(put(bytes(4)),))
    with pytest.raises(BadPlan, match="does not use the weight v"):
        load(made.model_copy(update={"initializers": (*made.initializers, extra)}), store)
    with pytest.raises(BadPlan, match="do not agree on the input z"):
        load(made, store, ("x",))
    unknown = make_model(graph([node("Nonesuch", "x", "y")], [value("x", [3])], [value("y", [3])]))
    with pytest.raises(BadPlan, match=r"onnxruntime .* does not accept segment 0: .*Nonesuch"):
        load(SegmentFiles(graph=(put(unknown.SerializeToString()),)), store, ("x",))
    x, y = (value(name, [3], TensorProto.STRING) for name in "xy")
    texts = make_model(graph([node("Identity", "x", "y")], [x], [y]))
    with pytest.raises(BadPlan, match=r"x, a tensor\(string\) .* cannot be sent"):
        load(SegmentFiles(graph=(put(texts.SerializeToString()),)), store, ("x",))
