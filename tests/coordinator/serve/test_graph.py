"""Serving a graph, its parts one by one: places in the pipeline, inputs, pieces of segments, load; then a whole server."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.devices import ready_device
from support.graphs import save_two_branch_model, two_branches
from support.waiting import until

from coordinator.cli import load as clients
from coordinator.cli.load import random_inputs
from coordinator.deploy.graph_chunks import Pieces
from coordinator.devices.registry import Device
from coordinator.models.graph_file import Graph, kind_of, open_graph, parse_dims
from coordinator.models.onnx.cutting import cut
from coordinator.plan.graph.auto import plan_graph
from coordinator.plan.graph.request import GraphRequest, Planned
from coordinator.serve import graph as serving
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.graph import GraphServer, Window, arrays_of, check_inputs
from coordinator.serve.state import GraphGoal, StateFile
from hearth.errors import (
    BadModelFile,
    BadPlan,
    BadRequest,
    BadSetting,
    DeviceLost,
    HearthError,
    NotServing,
    QueueFull,
    StepFailed,
)
from hearth.plan.graph_spec import Tensor
from hearth.plan.plan import GraphPlan
from hearth.plan.profile import WireCost
from hearth.wire.framing import pack_array, unpack_array
from hearth.wire.messages import (
    Abort,
    ArrayInfo,
    ChunksFetched,
    ChunksMissing,
    ConnectPeers,
    Done,
    FetchChunks,
    FindMissing,
    GraphProfile,
    Infer,
    Kernel,
    LinkMeasured,
    Load,
    MeasureLink,
    Message,
    OpenLinkProbe,
    Profile,
    Profiled,
    PutChunk,
    Run,
    RunDone,
    Unload,
    WireStats,
    WorkerBound,
)
from hearth.wire.rpc import Reply

# ---- places in the pipeline -------------------------------------------------------------------------------------------


async def _enter(window: Window, order: list[int], number: int) -> None:
    await window.enter()
    order.append(number)


def test_who_came_first_gets_the_next_place_and_who_finds_too_many_waiting_is_refused() -> None:
    async def main() -> None:
        window, order = Window(most_waiting=3), []
        window.resize(2)
        tasks = [asyncio.create_task(_enter(window, order, number)) for number in range(5)]
        await asyncio.sleep(0)
        assert (order, window.num_waiting, window.running) == ([0, 1], 3, 2)
        with pytest.raises(QueueFull) as full:
            await window.enter()
        assert full.value.limit == 3
        window.leave()
        await asyncio.sleep(0.001)
        assert order == [0, 1, 2]
        tasks[3].cancel()
        await asyncio.sleep(0.001)
        window.resize(3)
        await asyncio.sleep(0.001)
        assert (order, window.num_waiting, window.running) == ([0, 1, 2, 4], 0, 3)
        for _ in range(3):
            window.leave()
        assert window.running == 0

    asyncio.run(main())


def test_a_place_that_comes_in_the_moment_of_giving_up_is_handed_on() -> None:
    async def main() -> None:
        window, order = Window(most_waiting=3), []
        window.resize(1)
        await window.enter()
        first, second = (asyncio.create_task(_enter(window, order, number)) for number in (1, 2))
        await asyncio.sleep(0)
        window.leave()  # the first one's turn, which it has not yet seen
        first.cancel()
        await asyncio.wait({first, second}, timeout=1)
        assert (order, window.running) == ([2], 1)

    asyncio.run(main())


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
def test_an_input_that_does_not_fit_is_named(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        check_inputs(WANTED, given)


def test_arrays_come_in_two_frames_each_and_by_one_name() -> None:
    frames = [frame for value in (1.5, 2.5) for frame in pack_array(np.array([value], np.float32))]
    found = arrays_of(("x", "y"), frames)
    assert {name: array.tolist() for name, array in found.items()} == {"x": [1.5], "y": [2.5]}
    with pytest.raises(BadRequest, match="1 inputs came in 4 frames"):
        arrays_of(("x",), frames)
    with pytest.raises(BadRequest, match="twice"):
        arrays_of(("x", "x"), frames)


def test_random_inputs_have_the_models_types_and_are_indices_nearly_everywhere() -> None:
    infos = [ArrayInfo(name="x", dtype="float16", shape=(2, 3)), ArrayInfo(name="ids", dtype="int64", shape=(9,))]
    found = random_inputs(infos)
    assert (found["x"].dtype, found["x"].shape) == (np.float16, (2, 3))
    assert found["ids"].dtype == np.int64
    assert set(found["ids"].tolist()) <= {0, 1}


def test_load_is_told_by_rate_and_percentiles() -> None:
    load = clients.Load(4, 10.0, tuple(index / 100 for index in range(1, 101)), Counter(QueueFull=2))
    assert load.per_second == 10.0
    assert [load.percentile(percent) for percent in (50, 90, 99, 100)] == [0.5, 0.9, 0.99, 1.0]
    assert (
        load.describe()
        == "4 requests at once: 10 a second; p50 500 ms, p90 900 ms, p99 990 ms; 100 answers, 2 QueueFull"
    )
    nothing = clients.Load(1, 2.0, (), {"NotServing": 1})
    assert nothing.percentile(50) is None
    assert nothing.describe() == "1 request at a time: no answer in 2.00 s, 1 NotServing"


# ---- the model's file -------------------------------------------------------------------------------------------------


def test_what_a_model_is_shows_in_its_file(tmp_path: Path) -> None:
    for name, content, kind in (
        ("a.json", '{"K": 2, "devices": []}', "instance"), ("b.json", '{"nodes": []}', "graph"), ("c.onnx", "", "onnx"),
    ):  # fmt: skip
        (tmp_path / name).write_text(content)
        assert kind_of(tmp_path / name) == kind
    assert kind_of(tmp_path) == "transformer"
    with pytest.raises(BadModelFile, match="No such file"):
        kind_of(tmp_path / "none.json")
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(BadModelFile, match="no JSON"):
        kind_of(tmp_path / "a.json")


def test_dimensions_are_read_and_named_where_they_are_none() -> None:
    assert parse_dims(["batch=1", "x = 20"]) == {"batch": 1, "x": 20}
    for text in ("batch", "batch=0", "=1", "batch=one"):
        with pytest.raises(BadSetting, match="--dim"):
            parse_dims([text])


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    return open_graph(save_two_branch_model(tmp_path_factory.mktemp("model") / "model.onnx", channels=40), {})


def test_pieces_are_small_named_by_content_and_the_same_for_every_cut(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    from coordinator.deploy import graph_chunks as module

    monkeypatch.setattr(module, "CHUNK_BYTES", 10_000)
    count = graph.spec.num_operators
    pieces = Pieces(graph)
    cuts = [cut(graph.spec, [0] * count), cut(graph.spec, [index % 2 for index in range(count)])]
    weights = []
    for segments in cuts:
        arrays: dict[str, bytes] = {}
        for segment in segments:
            made = pieces.of(segment)
            content = {piece.hash: bytes(piece.read()) for piece in made.pieces}
            assert all(hashlib.sha256(data).hexdigest() == name for name, data in content.items())
            assert all(piece.num_bytes == len(content[piece.hash]) <= 10_000 for piece in made.pieces)
            assert set(made.files.graph) <= content.keys()
            for array in made.files.initializers:
                arrays[array.name] = b"".join(content[name] for name in array.chunks)
                assert len(arrays[array.name]) == int(np.prod(array.shape)) * np.dtype(array.dtype).itemsize
        weights.append(arrays)
    assert weights[0]  # some are too large to stay in the protobuf
    assert any(len(data) > 10_000 for data in weights[0].values())
    assert weights[0] == weights[1]


# ---- a whole server, on agents that are none --------------------------------------------------------------------------


class FakeFleet:
    """Agents a, b, ... that profile, load and run in no time; what they compute is up to `release`.

    The rest of a deployment is real: plans, pieces, messages, frames.
    """

    def __init__(self, names: str, graph: Graph) -> None:
        self.holder = "test"
        self.last_epoch = 0
        self.devices = {name: ready_device(name) for name in names}
        self.graph = graph
        self.stored: dict[str, set[str]] = {name: set() for name in names}
        self.loaded: dict[str, Load] = {}
        self.running: Counter[str] = Counter()
        self.most = 0  # requests at once on one device
        self.released = asyncio.Event()
        self.released.set()
        self.failure: HearthError | None = None  # of the next request
        self.sent = 0

    def usable(self) -> list[Device]:
        return [device for device in self.devices.values() if device.health == "alive"]

    async def settle(self, *_: float) -> list[Device]:
        return self.usable()

    async def refresh_telemetry(self) -> None: ...

    def punish(self, device_id: str) -> None: ...

    @asynccontextmanager
    async def bulk(self, device_id: str) -> AsyncIterator[Any]:
        fleet = self

        class Connection:
            async def call(self, message: Message, payload: Sequence[Any] = (), *, timeout_seconds: float) -> Reply:
                return await fleet.call(device_id, message, payload, timeout_seconds)

        yield Connection()

    async def ask(self, device_id: str, message: Message, expected: type[Any], timeout_seconds: float = 10.0) -> Any:
        reply = (await self.call(device_id, message, (), timeout_seconds)).message
        assert isinstance(reply, expected)
        return reply

    async def call(
        self, device_id: str, message: Message, payload: Sequence[Any] = (), timeout_seconds: float = 10.0
    ) -> Reply:
        if isinstance(message, Profile):
            return Reply(Profiled(result=self._profile()))
        if isinstance(message, OpenLinkProbe | ConnectPeers | Unload | Abort):
            return Reply(Done())
        if isinstance(message, MeasureLink):
            return Reply(LinkMeasured(bytes_per_second=1e9, round_trip_seconds=1e-6, num_bytes=1, stable=True))
        if isinstance(message, FindMissing):
            return Reply(ChunksMissing(hashes=tuple(h for h in message.hashes if h not in self.stored[device_id])))
        if isinstance(message, FetchChunks):
            self.stored[device_id] |= set(message.hashes)
            return Reply(ChunksFetched(missing=()))
        if isinstance(message, PutChunk):
            assert hashlib.sha256(payload[0]).hexdigest() == message.hash
            self.stored[device_id].add(message.hash)
            self.sent += len(payload[0])
            return Reply(Done())
        if isinstance(message, Load):
            assert set(message.parts.hashes) <= self.stored[device_id]
            self.loaded[device_id] = message
            return Reply(WorkerBound(port=1, public_key="0" * 40, num_bytes_loaded=0))
        assert isinstance(message, Run)
        return await self._run(device_id, message, payload)

    def _profile(self) -> GraphProfile:
        kernels = tuple(
            Kernel(name=operator.name, kind=operator.kind, provider="cpu", seconds=0.01, operators=(operator.name,))
            for operator in self.graph.spec.operators
        )
        return GraphProfile(
            kernels=kernels, run_seconds=0.01 * len(kernels), provider="cpu", process_bytes=1 << 20, load_bytes=1 << 20,
            peak_bytes=3 << 20, run_bytes=1 << 20, wire=WireCost(),
        )  # fmt: skip

    async def _run(self, device_id: str, message: Run, payload: Sequence[Any]) -> Reply:
        load = self.loaded[device_id]
        self.running[device_id] += 1
        self.most = max(self.most, self.running[device_id])
        try:
            if self.failure is not None and self.released.is_set():
                failure, self.failure = self.failure, None
                raise failure
            await self.released.wait()
        finally:
            self.running[device_id] -= 1
        given = [unpack_array(pair) for pair in zip(payload[::2], payload[1::2], strict=True)]
        assert len(given) == len(message.names)
        made = [name for segment in load.plan.body.segments_of(load.rank) for name in segment.outputs]
        names = tuple(name for name in load.plan.model.outputs if name in made)
        done = RunDone(
            names=names, began_seconds=0.0, ended_seconds=0.1, compute_seconds=(0.1,), wire=WireStats(), dropped_messages=0
        )  # fmt: skip
        return Reply(done, [frame for _ in names for frame in pack_array(np.ones((1, 40), np.float32))])


class House:
    def __init__(self, server: GraphServer, fleet: FakeFleet, lines: list[str]) -> None:
        self.server = server
        self.fleet = fleet
        self.lines = lines

    async def until(self, what: Any) -> None:
        try:
            await until("what was waited for", what)
        except AssertionError as error:
            raise AssertionError(self.lines) from error

    def ask(self, timeout_seconds: float = 10.0) -> asyncio.Task[Any]:
        payload = pack_array(np.zeros((1, 3, 16, 16), np.float32))
        return asyncio.create_task(self.server.infer(Infer(names=("image",), timeout_seconds=timeout_seconds), payload))

    @property
    def plan(self) -> GraphPlan:
        assert self.server.plan is not None
        return self.server.plan


@asynccontextmanager
async def house(
    folder: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch, names: str = "abc", plan: GraphPlan | None = None,
    **wishes: Any,
) -> AsyncIterator[House]:  # fmt: skip
    async def here(request: GraphRequest) -> Planned:  # the planner's process is tested with the plans
        return plan_graph(request, time.monotonic)

    monkeypatch.setattr(serving, "solve", here)
    fleet, lines = FakeFleet(names, graph), []
    settings = CoordinatorSettings(state_dir=folder / "state", settle_seconds=0, queue_limit=5)
    server = GraphServer(settings, fleet, lines.append)  # type: ignore[arg-type]
    goal = {"kind": "graph", "model_file": str(graph.path), "objective": "throughput", "time_limit_seconds": 1.0}
    server.start(GraphGoal.model_validate({**goal, **wishes}), plan)
    running = asyncio.create_task(server.run())
    found = House(server, fleet, lines)
    try:
        await found.until(lambda: server.ready)
        yield found
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await server.close()


def test_the_pipeline_is_filled_and_no_more_and_what_comes_beyond_is_refused(
    tmp_path: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with house(tmp_path, graph, monkeypatch) as home:
            assert home.plan.num_ranks == 3
            assert home.server._deployment is not None
            places = home.server._deployment.max_in_flight
            assert places == 3 * len(home.plan.body.segments)
            home.fleet.released.clear()
            asked = [home.ask() for _ in range(places + 5)]
            await home.until(lambda: home.fleet.running.total() == 3 * places)
            assert home.server.queued == 5
            with pytest.raises(QueueFull):
                await home.ask()
            home.fleet.released.set()
            answers = await asyncio.gather(*asked)
            assert all(list(answer.outputs) == ["scores"] for answer in answers)
            assert (home.fleet.most, home.server.served) == (places, places + 5)

    asyncio.run(main())


def test_a_device_that_is_lost_fails_what_is_in_flight_and_the_rest_is_served_by_the_others(
    tmp_path: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with house(tmp_path, graph, monkeypatch) as home:
            places = 3 * len(home.plan.body.segments)
            home.fleet.released.clear()
            asked = [home.ask() for _ in range(places + 2)]
            await home.until(lambda: home.fleet.running.total() == 3 * places)
            home.fleet.devices["b"] = replace(home.fleet.devices["b"], health="dead", reason="gone")
            home.server.device_changed(home.fleet.devices["b"])
            home.fleet.released.set()
            results = await asyncio.gather(*asked, return_exceptions=True)
            assert [type(each) for each in results[:places]] == [DeviceLost] * places
            assert all(each.outputs["scores"].shape == (1, 40) for each in results[places:])  # they had only waited
            assert {device.name for device in home.plan.devices} == {"a", "c"}
            assert home.plan.epoch == 2

    asyncio.run(main())


def test_values_that_no_segment_can_compute_do_not_end_the_plan_and_a_plan_that_computes_nothing_does(
    tmp_path: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with house(tmp_path, graph, monkeypatch) as home:
            home.fleet.failure = StepFailed(device="segment 1", reason="index out of range")
            with pytest.raises(StepFailed):
                await home.ask()
            await home.until(lambda: home.server._probe is not None and home.server._probe.done())
            assert home.plan.epoch == 1
            assert home.server.ready

            async def broken(device_id: str, message: Run, payload: Sequence[Any]) -> Reply:
                raise StepFailed(device="rank 1", reason="the tensor had not come")

            monkeypatch.setattr(home.fleet, "_run", broken)
            with pytest.raises(StepFailed):
                await home.ask()
            await home.until(lambda: not home.server.ready)
            monkeypatch.undo()

    asyncio.run(main())


def test_a_client_that_gives_up_frees_its_place_only_when_the_devices_are_done(
    tmp_path: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with house(tmp_path, graph, monkeypatch) as home:
            home.fleet.released.clear()
            asked = home.ask(timeout_seconds=0.05)
            with pytest.raises(HearthError, match=r"0\.05 s"):
                await asked
            assert home.server._window.running == 1
            home.fleet.released.set()
            await home.until(lambda: home.server._window.running == 0)
            with pytest.raises(BadRequest, match="'image' is missing"):
                await home.server.infer(Infer(names=()), ())

    asyncio.run(main())


def test_a_plan_is_taken_up_again_if_it_is_for_this_graph(
    tmp_path: Path, graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with house(tmp_path, graph, monkeypatch) as home:
            plan = home.plan
        saved = StateFile(tmp_path / "state").load().deployments["default"]
        assert isinstance(saved.goal, GraphGoal)
        assert saved.plan == plan
        async with house(tmp_path, graph, monkeypatch, plan=plan) as home:
            assert home.plan.body.segments == plan.body.segments
            assert home.plan.epoch == 2
            assert not any("planned by" in line for line in home.lines)
        other = plan.model_copy(update={"model": plan.model.model_copy(update={"sha256": "ff" * 32})})
        async with house(tmp_path, graph, monkeypatch, plan=other) as home:
            assert any("planned by" in line for line in home.lines)
        with pytest.raises(BadPlan, match="another graph"):
            async with house(tmp_path, graph, monkeypatch, plan=other, keep_plan=True):
                pass

    asyncio.run(main())


def test_a_graph_without_weights_or_with_nobody_to_serve_it_is_told(tmp_path: Path) -> None:
    from support.graphs import save_graph

    async def main() -> None:
        settings = CoordinatorSettings(state_dir=tmp_path / "state")
        server = GraphServer(settings, FakeFleet("a", None), lambda line: None)  # type: ignore[arg-type]
        path = save_graph(tmp_path / "graph.json", two_branches())
        with pytest.raises(BadSetting, match="no weights to run"):
            server.start(GraphGoal(kind="graph", model_file=str(path)))
        with pytest.raises(NotServing):
            server.info()

    asyncio.run(main())
