"""Graphs on real agents: pushed chunks, segments in worker processes, encrypted transfers, requests in flight."""

from __future__ import annotations

import asyncio
import hashlib
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.contexts import zmq_context
from support.home import LOOPBACK, TestHome
from support.waiting import until

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from support.graph_engines import random_array, random_cut, random_model, reference, segment_files

from agent.worker.graph.schedule import routes_for
from hearth.errors import BadPlan, BadRequest, HearthError, LeaseLost, QueueFull, StepFailed, WorkerDied
from hearth.plan.plan import GraphPlan
from hearth.platform.security import agent_access, load_credential
from hearth.protocol import DEFAULT_DEPLOYMENT
from hearth.wire.framing import pack_array, unpack_array
from hearth.wire.messages import (
    Abort,
    AcquireLease,
    AgentState,
    ConnectPeers,
    FindMissing,
    GenerateTokens,
    GraphProfile,
    Heartbeat,
    LeaseGranted,
    Load,
    Message,
    OperatorsOf,
    Peer,
    Profile,
    Profiled,
    PutChunk,
    ReleaseLease,
    Run,
    RunDone,
    SegmentParts,
    Unload,
    WorkerBound,
)
from hearth.wire.rpc import Reply, RpcClient

pytestmark = pytest.mark.processes

HOLDER = "test"
NO_STEP = 9999


class Agents:
    """A minimal coordinator of two agents for one graph."""

    def __init__(self, clients: Sequence[RpcClient], deployment: str) -> None:
        self.command = {"holder": HOLDER, "deployment": deployment}
        self._clients = clients

    @classmethod
    @asynccontextmanager
    async def of(
        cls, running_home: TestHome, names: Sequence[str], deployment: str = DEFAULT_DEPLOYMENT
    ) -> AsyncIterator[Agents]:
        """Connect to these agents and take the lease of each."""
        access = agent_access(load_credential(running_home.key))
        async with AsyncExitStack() as stack:
            context = stack.enter_context(zmq_context())
            clients = []
            for name in names:
                clients.append(RpcClient(context, f"tcp://{LOOPBACK}:{running_home.port(name)}", access, HOLDER))
                stack.push_async_callback(clients[-1].close)
            agents = cls(clients, deployment)
            await agents.all(AcquireLease(holder=HOLDER, holder_name=HOLDER, seconds=60.0))
            yield agents

    async def ask(self, rank: int, message: Message, payload: Sequence[Any] = (), seconds: float = 60.0) -> Reply:
        return await self._clients[rank].call(message, payload, timeout_seconds=seconds)

    async def begin(self, rank: int, request: Run, payload: Sequence[Any]) -> asyncio.Task[Reply]:
        """Send a request, and return once the worker has it: requests on one connection are read in order."""
        asked = asyncio.create_task(self.ask(rank, request, payload))
        await until("the request is sent", lambda: self._clients[rank].pending)
        await self.ask(rank, Abort(**self.command, epoch=request.epoch, step=NO_STEP, reason="a step that never began"))
        return asked

    async def all(self, message: Message) -> None:
        await asyncio.gather(*(self.ask(rank, message) for rank in range(len(self._clients))))

    async def deploy(self, model: Any, plan: GraphPlan, max_in_flight: int = 16) -> None:
        chunks: dict[str, bytes] = {}

        def put(data: bytes) -> str:
            name = hashlib.sha256(data).hexdigest()
            chunks[name] = data
            return name

        loads = [
            Load(
                **self.command, plan=plan, rank=rank, plan_token=bytes(range(16)),
                parts=SegmentParts(files=segment_files(model, plan, rank, put), max_in_flight=max_in_flight),
            )
            for rank in range(plan.num_ranks)
        ]  # fmt: skip
        for rank, load in enumerate(loads):
            missing = (await self.ask(rank, FindMissing(holder=HOLDER, hashes=load.parts.hashes))).message
            for name in missing.hashes:  # type: ignore[union-attr]
                await self.ask(rank, PutChunk(holder=HOLDER, hash=name), [chunks[name]])
        bound = await asyncio.gather(*(self.ask(rank, load) for rank, load in enumerate(loads)))
        peers = []
        for rank, reply in enumerate(bound):
            assert isinstance(reply.message, WorkerBound)
            peers.append(
                Peer(
                    rank=rank, host=LOOPBACK, port=reply.message.port, public_key=reply.message.public_key,
                    bytes_per_second=1e8,
                )
            )  # fmt: skip
        for rank in range(plan.num_ranks):
            others = tuple(peer for peer in peers if peer.rank != rank)
            await self.ask(rank, ConnectPeers(**self.command, epoch=plan.epoch, peers=others))

    async def run(self, plan: GraphPlan, step: int, feeds: dict[str, Any], timeout: float = 30.0) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def one(rank: int) -> None:
            names = tuple(sorted(routes_for(plan, rank).graph_inputs))
            request = Run(
                **self.command, epoch=plan.epoch, step=step, timeout_seconds=timeout, names=names
            )  # fmt: skip
            reply = await self.ask(rank, request, [frame for name in names for frame in pack_array(feeds[name])])
            assert isinstance(reply.message, RunDone)
            for index, name in enumerate(reply.message.names):
                found[name] = np.array(unpack_array(reply.payload[2 * index : 2 * index + 2]))

        await asyncio.gather(*(one(rank) for rank in range(plan.num_ranks)))
        return found


@pytest.fixture(scope="module")
def running_home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with TestHome(tmp_path_factory.mktemp("home"), Path()) as found:
        for name in ("a", "b"):
            found.start_agent(name)
        yield found


def with_agents(running_home: TestHome, scenario: Any) -> None:
    async def run() -> None:
        async with Agents.of(running_home, ("a", "b")) as agents:
            await asyncio.wait_for(scenario(agents), 120)

    asyncio.run(run())


def worker_of(running_home: TestHome, agent: str) -> psutil.Process:
    pid = running_home.worker_pid(agent)
    assert pid is not None
    return psutil.Process(pid)


def test_graph_runs_on_two_devices_and_survives_failures(running_home: TestHome) -> None:
    rng = random.Random(3)
    model = random_model(rng, 20)
    feeds = [{"x": random_array(seed), "z": random_array(seed + 99)} for seed in range(8)]
    plan = random_cut(model, rng, 6, 2)

    async def scenario(agents: Agents) -> None:
        await agents.deploy(model, plan)
        for worker in (worker_of(running_home, "a"), worker_of(running_home, "b")):
            assert not any("torch" in mapped.path for mapped in worker.memory_maps())
        outputs = await asyncio.gather(*(agents.run(plan, step, fed) for step, fed in enumerate(feeds)))
        for fed, found in zip(feeds, outputs, strict=True):
            expected = reference(model, fed)
            assert found.keys() == expected.keys()
            for name in expected:
                np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-4)

        # Invalid requests are rejected and leave no state.
        step = Run(holder=HOLDER, epoch=1, step=20, timeout_seconds=30.0)
        with pytest.raises(BadRequest, match=r"the input .* is missing"):
            await agents.ask(next(rank for rank in range(2) if routes_for(plan, rank).graph_inputs), step)
        with pytest.raises(BadRequest, match="does not accept GenerateTokens"):
            await agents.ask(0, GenerateTokens(holder=HOLDER, epoch=1, max_tokens=1))

        # Only rank 1 gets the request: no tensors arrive, and the error names the missing one.
        waiting = next(rank for rank in range(2) if routes_for(plan, rank).sources)
        names = tuple(sorted(routes_for(plan, waiting).graph_inputs))
        payload = [frame for name in names for frame in pack_array(feeds[0][name])]
        late = step.model_copy(update={"step": 21, "names": names, "timeout_seconds": 0.5})
        with pytest.raises(StepFailed, match=f"had not arrived from rank {1 - waiting}"):
            await agents.ask(waiting, late, payload)

        # An abort from outside takes effect immediately.
        asked = await agents.begin(waiting, late.model_copy(update={"step": 22, "timeout_seconds": 60.0}), payload)
        await agents.ask(waiting, Abort(holder=HOLDER, epoch=1, step=22, reason="the client has gone"))
        with pytest.raises(StepFailed, match="the client has gone"):
            await asyncio.wait_for(asked, 45)

        # The death of a worker is reported to all waiting requests; the agent accepts the next plan.
        asked = await agents.begin(waiting, late.model_copy(update={"step": 23, "timeout_seconds": 60.0}), payload)
        worker_of(running_home, "ab"[waiting]).send_signal(signal.SIGKILL)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await asyncio.wait_for(asked, 45)
        again = plan.with_epoch(2)
        await agents.deploy(model, again, max_in_flight=1)
        assert (await agents.run(again, 1, feeds[0])).keys() == reference(model, feeds[0]).keys()
        late = late.model_copy(update={"epoch": 2, "step": 2, "timeout_seconds": 60.0})
        asked = await agents.begin(waiting, late, payload)
        with pytest.raises(QueueFull):
            await agents.ask(waiting, late.model_copy(update={"step": 3}), payload)
        await agents.all(Unload(holder=HOLDER, epoch=2))
        with pytest.raises(WorkerDied, match="stopped"):
            await asyncio.wait_for(asked, 45)
        with pytest.raises(StepFailed, match="not loaded"):
            await agents.run(again, 30, feeds[0])

    with_agents(running_home, scenario)


def test_agent_profiles_a_graph_and_reports_unsupported_ones(running_home: TestHome) -> None:
    data = random_model(random.Random(5), 12).SerializeToString()

    async def scenario(agents: Agents) -> None:
        half = len(data) // 2
        request = Profile(subject=OperatorsOf(), timeout_seconds=60.0)
        profiled = (await agents.ask(0, request, [data[:half], data[half:]])).message
        assert isinstance(profiled, Profiled)
        assert isinstance(profiled.result, GraphProfile)
        assert profiled.result.run_seconds > 0
        assert profiled.result.kernels
        for payload, error in (([], BadRequest), ([b"\x07\x07"], BadPlan)):
            with pytest.raises(HearthError) as told:
                await agents.ask(0, request, payload)
            assert type(told.value) is error

    with_agents(running_home, scenario)
    assert not list((running_home.folder / "a" / "store").glob("profile-*"))


def test_agent_has_a_worker_per_deployment_and_one_lease(running_home: TestHome) -> None:
    rng = random.Random(3)
    model = random_model(rng, 20)
    feeds = {"x": random_array(1), "z": random_array(100)}
    plan = random_cut(model, rng, 6, 2)
    expected = reference(model, feeds)

    async def scenario() -> None:
        async with Agents.of(running_home, ("a", "b"), "one") as one, Agents.of(running_home, ("a", "b"), "two") as two:
            await one.deploy(model, plan)
            await two.deploy(model, plan)  # the same epoch: each deployment counts its own
            for agents, step in ((one, 1), (two, 1), (one, 2)):
                found = await agents.run(plan, step, feeds)
                assert all(np.allclose(found[name], expected[name], rtol=1e-4, atol=1e-4) for name in expected)
            state = (await one.ask(0, Heartbeat(holder=HOLDER))).message
            assert isinstance(state, AgentState)
            assert {"one": "ready", "two": "ready"}.items() <= {w.deployment: w.state for w in state.workers}.items()
            await one.all(Unload(**one.command, epoch=plan.epoch))
            with pytest.raises(StepFailed, match="not loaded"):
                await one.run(plan, 3, feeds)
            assert (await two.run(plan, 2, feeds)).keys() == expected.keys()
            renewal = AcquireLease(holder=HOLDER, holder_name=HOLDER, seconds=60.0, adopt={"two": plan.epoch})
            granted = (await two.ask(0, renewal)).message
            assert isinstance(granted, LeaseGranted)
            assert [(each.deployment, each.rank, each.last_step) for each in granted.workers] == [("two", 0, 2)]
            await two.all(ReleaseLease(holder=HOLDER))
            with pytest.raises(LeaseLost):
                await two.run(plan, 3, feeds)

    asyncio.run(asyncio.wait_for(scenario(), 120))
