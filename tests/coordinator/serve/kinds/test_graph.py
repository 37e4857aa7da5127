"""Serving a graph: inputs, chunks of segments, load statistics; then a controller on a fleet in this process."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.controllers import ServedController, serving
from support.fleets import GraphFleet
from support.graphs import save_bfloat16_model, save_two_branch_model, two_branches

from coordinator.cli import load_generator as clients
from coordinator.cli.load_generator import random_inputs
from coordinator.deploy.graph import SegmentChunks
from coordinator.models.graph_file import GraphFile, model_file_kind, parse_dims, read_graph_file
from coordinator.models.onnx.cutting import cut
from coordinator.serve.kinds.graph import arrays_by_name, check_inputs
from coordinator.serve.state import GraphGoal, StateFile
from hearth import errors
from hearth.plan.graph_spec import Tensor
from hearth.plan.plan import Plan
from hearth.wire.framing import pack_array, unpack_array
from hearth.wire.messages import ArrayInfo, Infer, Run

# ---- arrays -----------------------------------------------------------------------------------------------------------

WANTED = (Tensor("image", 24, None, (0,), "float32", (2, 3)), Tensor("mask", 2, None, (0,), "int64", (2,)))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"image": np.zeros((2, 3), np.float32)}, "the input 'mask' is missing"),
        ({"photo": np.zeros(1)}, "no input 'photo'; it takes image, mask"),
        ({"image": np.zeros((2, 3)), "mask": np.zeros(2, np.int64)}, "'image' must be float32, not float64"),
        ({"image": np.zeros((2, 3), np.float32), "mask": np.zeros(2, np.int32)}, "'mask' must be int64, not int32"),
        (
            {"image": np.zeros((3, 2), np.float32), "mask": np.zeros(2, np.int64)},
            r"'image' must have the shape \[2, 3\], not \[3, 2\]",
        ),
    ],
)
def test_invalid_input_is_named(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(errors.BadRequest, match=reason):
        check_inputs(WANTED, given)


def test_arrays_have_two_frames_each_and_unique_names() -> None:
    frames = [frame for value in (1.5, 2.5) for frame in pack_array(np.array([value], np.float32))]
    found = arrays_by_name(("x", "y"), frames)
    assert {name: array.tolist() for name, array in found.items()} == {"x": [1.5], "y": [2.5]}
    with pytest.raises(errors.BadRequest, match="1 inputs came in 4 frames"):
        arrays_by_name(("x",), frames)
    with pytest.raises(errors.BadRequest, match="twice"):
        arrays_by_name(("x", "x"), frames)


def test_random_inputs_have_the_models_types_and_small_integers() -> None:
    infos = [ArrayInfo(name="x", dtype="float16", shape=(2, 3)), ArrayInfo(name="ids", dtype="int64", shape=(9,))]
    found = random_inputs(infos)
    assert (found["x"].dtype, found["x"].shape) == (np.float16, (2, 3))
    assert found["ids"].dtype == np.int64
    assert set(found["ids"].tolist()) <= {0, 1}


def test_load_is_described_by_rate_and_percentiles() -> None:
    load = clients.LoadResult(4, 10.0, tuple(index / 100 for index in range(1, 101)), Counter(QueueFull=2))
    assert load.per_second == 10.0
    assert [load.percentile(percent) for percent in (50, 90, 99, 100)] == [0.5, 0.9, 0.99, 1.0]
    assert (
        load.summary()
        == "4 concurrent requests: 10 per second; p50 500 ms, p90 900 ms, p99 990 ms; 100 answers, 2 QueueFull"
    )
    nothing = clients.LoadResult(1, 2.0, (), {"NotServing": 1})
    assert nothing.percentile(50) is None
    assert nothing.summary() == "1 request at a time: no answer in 2.00 s, 1 NotServing"


# ---- the model's file -------------------------------------------------------------------------------------------------


def test_model_kind_is_detected_from_the_file(tmp_path: Path) -> None:
    for name, content, kind in (
        ("a.json", '{"K": 2, "devices": []}', "instance"), ("b.json", '{"nodes": []}', "graph"), ("c.onnx", "", "onnx"),
    ):  # fmt: skip
        (tmp_path / name).write_text(content)
        assert model_file_kind(tmp_path / name) == kind
    assert model_file_kind(tmp_path) == "transformer"
    with pytest.raises(errors.BadModelFile, match="No such file"):
        model_file_kind(tmp_path / "none.json")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(errors.BadModelFile, match="is not JSON"):
        model_file_kind(tmp_path / "a.json")


def test_dimensions_are_parsed_and_errors_named() -> None:
    assert parse_dims(["batch=1", "x = 20"]) == {"batch": 1, "x": 20}
    for text in ("batch", "batch=0", "=1", "batch=one"):
        with pytest.raises(errors.BadSetting, match="--dim"):
            parse_dims([text])


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> GraphFile:
    return read_graph_file(save_two_branch_model(tmp_path_factory.mktemp("model") / "model.onnx", channels=40), {})


def test_chunks_are_small_content_named_and_independent_of_the_cut(
    graph: GraphFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coordinator.deploy import graph as module

    monkeypatch.setattr(module, "MAX_GRAPH_CHUNK_BYTES", 10_000)
    count = graph.spec.num_operators
    chunks_of = SegmentChunks(graph)
    cuts = [cut(graph.spec, [0] * count), cut(graph.spec, [index % 2 for index in range(count)])]
    weights = []
    for segments in cuts:
        arrays: dict[str, bytes] = {}
        for segment in segments:
            files, chunks = chunks_of.files_and_chunks(segment)
            content = {chunk.hash: bytes(chunk.read()) for chunk in chunks}
            assert all(hashlib.sha256(data).hexdigest() == name for name, data in content.items())
            assert all(chunk.num_bytes == len(content[chunk.hash]) <= 10_000 for chunk in chunks)
            assert set(files.graph) <= content.keys()
            for array in files.initializers:
                arrays[array.name] = b"".join(content[name] for name in array.chunks)
                assert len(arrays[array.name]) == int(np.prod(array.shape)) * np.dtype(array.dtype).itemsize
        weights.append(arrays)
    assert weights[0]  # some are too large for the protobuf
    assert any(len(data) > 10_000 for data in weights[0].values())
    assert weights[0] == weights[1]


# ---- a controller that serves a graph -----------------------------------------------------------------------------------


@asynccontextmanager
async def serving_graph(
    folder: Path, graph: GraphFile, names: str = "abc", plan: Plan | None = None, **wishes: Any
) -> AsyncIterator[ServedController]:
    fields = {"model_file": str(graph.path), "objective": "throughput", "time_limit_seconds": 60.0, **wishes}
    goal, fleet = GraphGoal.model_validate(fields), GraphFleet(names, graph)
    async with serving(fleet, folder / "state", goal, plan, queue_limit=5) as home:
        yield home


def ask(home: ServedController, timeout_seconds: float = 10.0, value: float = 0.0) -> asyncio.Task[Any]:
    payload = pack_array(np.full((1, 3, 16, 16), value, np.float32))
    return asyncio.create_task(home.kind.infer(Infer(names=("image",), timeout_seconds=timeout_seconds), payload))


def num_slots(home: ServedController) -> int:
    """Number of requests that run at once."""
    deployment = home.controller.deployment
    assert deployment is not None
    return home.kind.capacity(deployment)


async def test_full_pipeline_queues_then_rejects_requests(tmp_path: Path, graph: GraphFile) -> None:
    async with serving_graph(tmp_path, graph) as home:
        assert home.plan.num_ranks == 3
        room = num_slots(home)
        assert room == 3 * len(home.plan.body.segments)
        home.fleet.released.clear()
        asked = [ask(home) for _ in range(room + 5)]
        await home.until(lambda: home.fleet.running.total() == 3 * room)
        assert home.controller.requests.admission.num_waiting == 5
        with pytest.raises(errors.QueueFull):
            await ask(home)
        home.fleet.released.set()
        answers = await asyncio.gather(*asked)
        assert all(answer.message.names == ("scores",) for answer in answers)
        assert (home.fleet.most_running, home.controller.requests.num_served) == (room, room + 5)


async def test_device_loss_fails_no_request(tmp_path: Path, graph: GraphFile) -> None:
    async with serving_graph(tmp_path, graph) as home:
        room = num_slots(home)
        home.fleet.released.clear()
        asked = [ask(home) for _ in range(room + 2)]
        await home.until(lambda: home.fleet.running.total() == 3 * room)
        home.kill("b")
        home.fleet.released.set()
        results = await asyncio.gather(*asked)  # of those that ran and of those that were queued
        assert all(unpack_array(each.payload).shape == (1, 40) for each in results)
        assert home.controller.requests.num_failed == 0
        assert home.names() == "ac"
        assert home.plan.epoch == 2


async def test_request_error_keeps_the_plan_and_a_failing_probe_ends_it(tmp_path: Path, graph: GraphFile) -> None:
    async with serving_graph(tmp_path, graph) as home:
        home.fleet.asked.clear()
        home.fleet.failures = [errors.StepFailed(device="segment 1", reason="index out of range")]
        await ask(home)  # runs again after the probe, a request known to work
        assert sum(isinstance(message, Run) for _, message in home.fleet.asked) == 3 * 3
        assert (home.plan.epoch, home.ready) == (1, True)
        home.fleet.reject_ones = True
        with pytest.raises(errors.StepFailed):
            await ask(home, value=1.0)
        assert (home.plan.epoch, home.ready) == (1, True)
        home.fleet.broken = errors.StepFailed(device="rank 1", reason="the tensor had not come")
        asked = ask(home)
        await home.until(lambda: not home.ready)
        home.fleet.broken = None
        await asked
        assert home.plan.epoch > 1


async def test_timed_out_request_keeps_its_slot_until_devices_finish(tmp_path: Path, graph: GraphFile) -> None:
    async with serving_graph(tmp_path, graph) as home:
        home.fleet.released.clear()
        asked = ask(home, timeout_seconds=0.05)
        with pytest.raises(errors.HearthError, match=r"0\.05 s"):
            await asked
        assert home.controller.requests.admission.num_running == 1
        home.fleet.released.set()
        await home.until(lambda: home.controller.requests.admission.num_running == 0)
        with pytest.raises(errors.BadRequest, match="'image' is missing"):
            await home.kind.infer(Infer(names=()), ())


async def test_saved_plan_is_reused_for_the_same_graph_only(tmp_path: Path, graph: GraphFile) -> None:
    async with serving_graph(tmp_path, graph) as home:
        plan = home.plan
    saved = StateFile(tmp_path / "state").current.deployments["default"]
    assert isinstance(saved.goal, GraphGoal)
    assert saved.plan == plan
    async with serving_graph(tmp_path, graph, plan=plan) as home:
        assert home.plan.body.segments == plan.body.segments
        assert home.plan.epoch == 2
        assert not any("planned by" in line for line in home.lines)
    other = plan.model_copy(update={"model": plan.model.model_copy(update={"sha256": "ff" * 32})})
    async with serving_graph(tmp_path, graph, plan=other) as home:
        assert any("planned by" in line for line in home.lines)
    with pytest.raises(errors.BadPlan, match="another graph"):
        async with serving_graph(tmp_path, graph, plan=other, keep_plan=True):
            pass


async def test_graph_with_unsupported_input_type_is_rejected(tmp_path: Path) -> None:
    goal = GraphGoal(model_file=str(save_bfloat16_model(tmp_path / "model.onnx")))

    with pytest.raises(errors.BadModelFile, match="its tensor x is of bfloat16"):
        ServedController(GraphFleet("a", None), tmp_path, goal, None)  # type: ignore[arg-type]


async def test_graph_without_weights_is_rejected(tmp_path: Path) -> None:
    from support.graphs import save_graph

    path = save_graph(tmp_path / "graph.json", two_branches())
    with pytest.raises(errors.BadSetting, match="no weights to run"):
        ServedController(GraphFleet("a", None), tmp_path, GraphGoal(model_file=str(path)), None)  # type: ignore[arg-type]
