"""Graphs in a home of real processes: on agents without a coordinator, served in segments, and served in tiles."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.clients import Clients
from support.graphs import save_two_branch_model
from support.home import LOOPBACK, TestHome, plan_devices, plan_of
from support.profiles import MeasuredProfiles
from support.waiting import wait_for

pytest.importorskip("onnxruntime", reason="onnxruntime has no wheel for this Python here")
pytest.importorskip("onnx")

import onnxruntime as ort
from support.graph_agents import HOLDER, Agents
from support.graph_engines import random_array, random_cut, random_model, reference
from support.onnx_models import graph, node, saved, value, weight

from agent.worker.graph.schedule import routes_for
from hearth.client.sync import Home, connect
from hearth.errors import BadPlan, BadRequest, HearthError, LeaseLost, QueueFull, StepFailed, WorkerDied
from hearth.plan.plan import GraphPlan, is_graph_plan
from hearth.wire import messages as wire
from hearth.wire.framing import pack_array

pytestmark = pytest.mark.processes

Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def home(profiles: MeasuredProfiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestHome]:
    """The home of all these tests."""
    folder = tmp_path_factory.mktemp("home")
    with TestHome(folder, folder, profiles) as home:
        yield home


def assert_as_onnxruntime(found: Arrays, model: Path, inputs: Arrays) -> None:
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    assert {*found} == {*names}
    for name, expected in zip(names, session.run(names, inputs), strict=True):
        assert np.abs(found[name] - expected).max() < 1e-4


# ---- agents without a coordinator ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(home: TestHome) -> TestHome:
    home.have_agents("ab")
    return home


@pytest.fixture
@asynccontextmanager
async def agents(pair: TestHome) -> AsyncIterator[Agents]:
    """A coordinator of both agents."""
    async with Agents.of(pair, ("a", "b")) as agents:
        yield agents


def worker_of(pair: TestHome, agent: str) -> psutil.Process:
    pid = pair.worker_pid(agent)
    assert pid is not None
    return psutil.Process(pid)


async def test_graph_runs_on_two_devices_and_survives_failures(pair: TestHome, agents: Agents) -> None:
    rng = random.Random(3)
    model = random_model(rng, 20)
    feeds = [{"x": random_array(seed), "z": random_array(seed + 99)} for seed in range(8)]
    plan = random_cut(model, rng, 6, 2)
    await agents.deploy(model, plan)
    for worker in (worker_of(pair, "a"), worker_of(pair, "b")):
        assert not any("torch" in mapped.path for mapped in worker.memory_maps())
    outputs = await asyncio.gather(*(agents.run(plan, step, fed) for step, fed in enumerate(feeds)))
    for fed, found in zip(feeds, outputs, strict=True):
        expected = reference(model, fed)
        assert found.keys() == expected.keys()
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-4)

    # Invalid requests are rejected and leave no state.
    step = wire.Run(holder=HOLDER, epoch=1, step=20, timeout_seconds=30.0)
    with pytest.raises(BadRequest, match=r"the input .* is missing"):
        await agents.ask(next(rank for rank in range(2) if routes_for(plan, rank).graph_inputs), step)
    with pytest.raises(BadRequest, match="does not accept GenerateTokens"):
        await agents.ask(0, wire.GenerateTokens(holder=HOLDER, epoch=1, max_tokens=1))

    # Only rank 1 gets the request: no tensors arrive, and the error names the missing one.
    waiting = next(rank for rank in range(2) if routes_for(plan, rank).sources)
    names = tuple(sorted(routes_for(plan, waiting).graph_inputs))
    payload = [frame for name in names for frame in pack_array(feeds[0][name])]
    late = step.model_copy(update={"step": 21, "names": names, "timeout_seconds": 0.5})
    with pytest.raises(StepFailed, match=f"had not arrived from rank {1 - waiting}"):
        await agents.ask(waiting, late, payload)

    # An abort from outside takes effect immediately.
    asked = await agents.begin(waiting, late.model_copy(update={"step": 22, "timeout_seconds": 60.0}), payload)
    await agents.ask(waiting, wire.Abort(holder=HOLDER, epoch=1, step=22, reason="the client has gone"))
    with pytest.raises(StepFailed, match="the client has gone"):
        await asyncio.wait_for(asked, 45)

    # The death of a worker is reported to all waiting requests; the agent accepts the next plan.
    asked = await agents.begin(waiting, late.model_copy(update={"step": 23, "timeout_seconds": 60.0}), payload)
    worker_of(pair, "ab"[waiting]).send_signal(signal.SIGKILL)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        await asyncio.wait_for(asked, 45)
    again = plan.with_epoch(2)
    await agents.deploy(model, again, max_in_flight=1)
    assert (await agents.run(again, 1, feeds[0])).keys() == reference(model, feeds[0]).keys()
    late = late.model_copy(update={"epoch": 2, "step": 2, "timeout_seconds": 60.0})
    asked = await agents.begin(waiting, late, payload)
    with pytest.raises(QueueFull):
        await agents.ask(waiting, late.model_copy(update={"step": 3}), payload)
    await agents.all(wire.Unload(holder=HOLDER, epoch=2))
    with pytest.raises(WorkerDied, match="stopped"):
        await asyncio.wait_for(asked, 45)
    with pytest.raises(StepFailed, match="not loaded"):
        await agents.run(again, 30, feeds[0])


async def test_agent_profiles_a_graph_and_reports_unsupported_ones(pair: TestHome, agents: Agents) -> None:
    data = random_model(random.Random(5), 12).SerializeToString()
    half = len(data) // 2
    request = wire.Profile(subject=wire.OperatorsOf(), timeout_seconds=60.0)
    profiled = (await agents.ask(0, request, [data[:half], data[half:]])).message
    assert isinstance(profiled, wire.Profiled)
    assert isinstance(profiled.result, wire.GraphProfile)
    assert profiled.result.run_seconds > 0
    assert profiled.result.kernels
    for payload, error in (([], BadRequest), ([b"\x07\x07"], BadPlan)):
        with pytest.raises(HearthError) as told:
            await agents.ask(0, request, payload)
        assert type(told.value) is error
    assert not list((pair.folder / "a" / "store").glob("profile-*"))


async def test_agent_has_a_worker_per_deployment_and_one_lease(pair: TestHome) -> None:
    rng = random.Random(3)
    model = random_model(rng, 20)
    feeds = {"x": random_array(1), "z": random_array(100)}
    plan = random_cut(model, rng, 6, 2)
    expected = reference(model, feeds)
    async with Agents.of(pair, ("a", "b"), "one") as one, Agents.of(pair, ("a", "b"), "two") as two:
        await one.deploy(model, plan)
        await two.deploy(model, plan)  # the same epoch: each deployment counts its own
        for agents, step in ((one, 1), (two, 1), (one, 2)):
            found = await agents.run(plan, step, feeds)
            assert all(np.allclose(found[name], expected[name], rtol=1e-4, atol=1e-4) for name in expected)
        state = (await one.ask(0, wire.Heartbeat(holder=HOLDER))).message
        assert isinstance(state, wire.AgentState)
        assert {"one": "ready", "two": "ready"}.items() <= {w.deployment: w.state for w in state.workers}.items()
        await one.all(wire.Unload(**one.command, epoch=plan.epoch))
        with pytest.raises(StepFailed, match="not loaded"):
            await one.run(plan, 3, feeds)
        assert (await two.run(plan, 2, feeds)).keys() == expected.keys()
        renewal = wire.AcquireLease(holder=HOLDER, holder_name=HOLDER, seconds=60.0, adopt={"two": plan.epoch})
        granted = (await two.ask(0, renewal)).message
        assert isinstance(granted, wire.LeaseGranted)
        assert [(each.deployment, each.rank, each.last_step) for each in granted.workers] == [("two", 0, 2)]
        await two.all(wire.ReleaseLease(holder=HOLDER))
        with pytest.raises(LeaseLost):
            await two.run(plan, 3, feeds)


# ---- served in segments --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def segmented(home: TestHome) -> Path:
    """Some tens of milliseconds per request: worth distributing, and long enough to kill a device meanwhile."""
    return save_two_branch_model(home.folder / "two-branches.onnx", channels=48, size=96, depth=3)


@pytest.fixture(scope="module")
def client(home: TestHome, segmented: Path) -> Iterator[Home]:
    """Of the home with three agents that serve it. The power cut comes last."""
    options = ("--min-devices", "3", "--objective", "throughput", "--strategy", "pipeline-exact")
    with home.serving("abc", *options, model=segmented) as client:
        yield client


def image(seed: int = 0) -> Arrays:
    return {"image": np.random.default_rng(seed).standard_normal((1, 3, 96, 96)).astype(np.float32)}


def test_concurrent_requests_equal_onnxruntime(client: Home, segmented: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        for seed, answer in enumerate([pool.submit(client.infer, image(seed)) for seed in range(12)]):
            assert_as_onnxruntime(answer.result(30), segmented, image(seed))
    plan = plan_of(client)
    assert plan.num_ranks > 1
    assert plan.body.objective == "throughput"


def test_invalid_input_is_named(client: Home) -> None:
    info = client.model_info()
    assert [(each.name, each.dtype, each.shape) for each in info.inputs] == [("image", "float32", (1, 3, 96, 96))]
    right = image()["image"]
    for inputs, reason in (
        ({"picture": right}, "no input 'picture'; it takes image"),
        ({}, "input 'image' is missing"),
        ({"image": right.astype(np.float64)}, "'image' must be float32, not float64"),
        ({"image": right[:, :1]}, r"'image' must have the shape \[1, 3, 96, 96\], not \[1, 1, 96, 96\]"),
        ({"image": right.astype(complex)}, "'image' cannot be sent"),
    ):
        with pytest.raises(BadRequest, match=reason):
            client.infer(inputs)
    with pytest.raises(BadRequest, match="graph of operators"):
        client.embed(["no sentence"])
    assert client.infer(image())["scores"].shape == (1, 48)


def test_killed_worker_is_reported_and_starts_again(home: TestHome, client: Home, segmented: Path) -> None:
    devices = plan_devices(client)
    worker = home.worker_pid(devices[0])
    assert worker is not None
    os.kill(worker, signal.SIGKILL)
    wait_for("the loss to be seen", lambda: "worker" in client.status().last_error)
    assert_as_onnxruntime(client.infer(image(), timeout_seconds=60.0), segmented, image())
    assert plan_devices(client) == devices
    assert home.worker_pid(devices[0]) not in (None, worker)


def test_device_loss_fails_no_request(home: TestHome, client: Home, segmented: Path) -> None:
    """Two devices are left for the test that follows."""
    plan = plan_of(client)
    victim = plan.devices[-1].name
    asks = [lambda each, seed=seed: each.infer(image(seed), timeout_seconds=30.0) for seed in range(8)]
    with Clients(home, asks) as clients:
        clients.wait_for_answers()
        home.kill(victim)
        wait_for("serving to go on", lambda: client.ready() and plan_of(client).epoch > plan.epoch)
        clients.wait_for_answers()
    assert victim not in plan_devices(client)
    assert_as_onnxruntime(client.infer(image(3)), segmented, image(3))


@pytest.mark.thorough
def test_graph_is_served_again_after_a_power_cut(home: TestHome, segmented: Path) -> None:
    names = [name for name in "abc" if home.runs(name)]
    home.stop("coordinator", 60.0)
    options = ("--min-devices", "2", "--objective", "latency", "--strategy", "critical-path")
    home.start_coordinator(*options, model=segmented)
    with home.ready() as client:
        before, plan = client.infer(image())["scores"], plan_of(client)
    for name in (*names, "coordinator"):
        home.kill(name)
    for name in reversed(names):
        home.start_agent(name)
    home.start_coordinator(model=False)
    with home.ready() as client:
        again = plan_of(client)
        assert np.array_equal(client.infer(image())["scores"], before)
    assert again.epoch > plan.epoch
    assert again.body.segments == plan.body.segments
    pushed = re.findall(r"sent ([\d.]+ \w+) of weights", home.log_of_run("coordinator"))
    assert pushed[-1] == "0 B"  # all chunks were in the stores
    home.stop("coordinator", 60.0)


# ---- served in tiles -----------------------------------------------------------------------------------------------------

_WEIGHT_BYTES = 32 << 20  # of the only product


@pytest.fixture(scope="module")
def tiled(home: TestHome) -> Path:
    """One row times a matrix of 32 MiB, then Relu."""
    nodes = [node("MatMul", "x w", "product"), node("Relu", "product", "y")]
    made = graph(nodes, [value("x", [1, 2048])], [value("y", None)], [weight("w", 2048, 4096)])
    return saved(home.folder / "product.onnx", made)


def assert_right(client: Home, tiled: Path, seed: int) -> None:
    inputs = {"x": np.random.default_rng(seed).standard_normal((1, 2048)).astype(np.float32)}
    assert_as_onnxruntime(client.infer(inputs, timeout_seconds=60.0), tiled, inputs)


def tiled_plan(home: Home) -> GraphPlan:
    plan = plan_of(home)
    assert is_graph_plan(plan)
    assert plan.model.tiles[0].pieces == (1, 2, 1)  # columns: of one row, they move the fewest bytes
    return plan


@pytest.fixture(scope="module")
def limits(home: TestHome, tiled: Path) -> list[str]:
    """Options of `hearth serve` by which neither device can hold the whole model."""
    with home.serving("ab", "--min-devices", "2", "--strategy", "local", model=tiled) as client:
        limit = plan_of(client).devices[0].memory.total - _WEIGHT_BYTES
    return ["--min-devices", "2", *(f"--limit={name}={limit}" for name in "ab")]


@pytest.mark.thorough
def test_tiles_run_where_no_device_holds_the_model_and_survive_a_restart_and_a_loss(
    home: TestHome, tiled: Path, limits: list[str]
) -> None:
    home.start_coordinator(*limits, model=tiled)
    with home.connect() as client:
        wait_for("the refusal", lambda: "memory" in client.readiness().state)
    home.stop("coordinator")
    with home.serving("ab", "--tiles", "2", *limits, model=tiled) as client:
        assert_right(client, tiled, 0)
        saved_plan = home.folder / "plan.json"
        saved_plan.write_text(tiled_plan(client).model_dump_json())
    # Without the limits, one device may be predicted to be faster: the plan for both is given.
    with home.serving("ab", "--min-devices", "2", "--plan", str(saved_plan), model=tiled) as client:
        plan = tiled_plan(client)
        assert plan.num_ranks == 2
        home.kill("coordinator")
        home.start_coordinator(model=False)
        with home.ready() as client:
            assert tiled_plan(client) == plan  # with its epoch: the workers were taken over
            assert_right(client, tiled, 1)
            home.kill("b")
            wait_for("a plan for the device that is left", lambda: client.ready() and tiled_plan(client).num_ranks == 1)
            assert_right(client, tiled, 2)


@pytest.mark.thorough
def test_standby_takes_over_tiles(home: TestHome, tiled: Path, limits: list[str]) -> None:
    # Without the limits, one device may be predicted to be faster.
    with home.serving("ab", "--tiles", "2", *limits, model=tiled) as client:
        plan = tiled_plan(client)
        assert plan.num_ranks == 2
        leader = f"{LOOPBACK}:{home.port('coordinator')}"
        home.start_coordinator("--standby", "--leader", leader, model=False, name="standby")
        wait_for("the copy of the state", lambda: "the standby of coordinator\n" in home.log("standby"))
        workers = [home.worker_pid(name) for name in "ab"]
        home.kill("coordinator")
        wait_for("the takeover", lambda: "took over from coordinator" in home.log("standby"))
    with connect(f"{LOOPBACK}:{home.port('standby')}", key=home.key) as client:
        client.wait_ready(30.0)
        assert tiled_plan(client) == plan  # with its epoch
        assert_right(client, tiled, 3)
    assert [home.worker_pid(name) for name in "ab"] == workers
