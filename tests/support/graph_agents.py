"""A minimal coordinator of real agents for one graph: pushed chunks, workers, peers and requests."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import numpy as np
from support.contexts import zmq_context
from support.graph_engines import segment_files
from support.home import LOOPBACK, TestHome
from support.waiting import until

from agent.worker.graph.schedule import routes_for
from hearth.errors import LeaseLost
from hearth.plan.plan import GraphPlan
from hearth.platform.security import agent_access, load_credential
from hearth.protocol import DEFAULT_DEPLOYMENT
from hearth.wire import messages as wire
from hearth.wire.framing import pack_array, unpack_array
from hearth.wire.rpc import Reply, RpcClient

HOLDER = "test"
_NO_STEP = 9999


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
        """Connect to these agents and take the lease of each; release it at the end."""
        access = agent_access(load_credential(running_home.key))
        async with AsyncExitStack() as stack:
            context = stack.enter_context(zmq_context())
            clients = []
            for name in names:
                clients.append(RpcClient(context, f"tcp://{LOOPBACK}:{running_home.port(name)}", access, HOLDER))
                stack.push_async_callback(clients[-1].close)
            agents = cls(clients, deployment)
            await agents.all(wire.AcquireLease(holder=HOLDER, holder_name=HOLDER, seconds=60.0))
            yield agents
            with suppress(LeaseLost):
                await agents.all(wire.ReleaseLease(holder=HOLDER))

    async def ask(self, rank: int, message: wire.Message, payload: Sequence[Any] = (), seconds: float = 60.0) -> Reply:
        return await self._clients[rank].call(message, payload, timeout_seconds=seconds)

    async def begin(self, rank: int, request: wire.Run, payload: Sequence[Any]) -> asyncio.Task[Reply]:
        """Send a request, and return once the worker has it: requests on one connection are read in order."""
        asked = asyncio.create_task(self.ask(rank, request, payload))
        await until("the request is sent", lambda: self._clients[rank].pending)
        await self.ask(
            rank, wire.Abort(**self.command, epoch=request.epoch, step=_NO_STEP, reason="a step that never began")
        )
        return asked

    async def all(self, message: wire.Message) -> None:
        await asyncio.gather(*(self.ask(rank, message) for rank in range(len(self._clients))))

    async def deploy(self, model: Any, plan: GraphPlan, max_in_flight: int = 16) -> None:
        chunks: dict[str, bytes] = {}

        def put(data: bytes) -> str:
            name = hashlib.sha256(data).hexdigest()
            chunks[name] = data
            return name

        loads = [
            wire.Load(
                **self.command, plan=plan, rank=rank, plan_token=bytes(range(16)),
                parts=wire.SegmentParts(files=segment_files(model, plan, rank, put), max_in_flight=max_in_flight),
            )
            for rank in range(plan.num_ranks)
        ]  # fmt: skip
        for rank, load in enumerate(loads):
            missing = (await self.ask(rank, wire.FindMissing(holder=HOLDER, hashes=load.parts.hashes))).message
            for name in missing.hashes:  # type: ignore[union-attr]
                await self.ask(rank, wire.PutChunk(holder=HOLDER, hash=name), [chunks[name]])
        bound = await asyncio.gather(*(self.ask(rank, load) for rank, load in enumerate(loads)))
        peers = []
        for rank, reply in enumerate(bound):
            assert isinstance(reply.message, wire.WorkerBound)
            peers.append(
                wire.Peer(
                    rank=rank, host=LOOPBACK, port=reply.message.port, public_key=reply.message.public_key,
                    bytes_per_second=1e8,
                )
            )  # fmt: skip
        for rank in range(plan.num_ranks):
            others = tuple(peer for peer in peers if peer.rank != rank)
            await self.ask(rank, wire.ConnectPeers(**self.command, epoch=plan.epoch, peers=others))

    async def run(self, plan: GraphPlan, step: int, feeds: dict[str, Any], timeout: float = 30.0) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def one(rank: int) -> None:
            names = tuple(sorted(routes_for(plan, rank).graph_inputs))
            request = wire.Run(
                **self.command, epoch=plan.epoch, step=step, timeout_seconds=timeout, names=names
            )  # fmt: skip
            reply = await self.ask(rank, request, [frame for name in names for frame in pack_array(feeds[name])])
            assert isinstance(reply.message, wire.RunDone)
            for index, name in enumerate(reply.message.names):
                found[name] = np.array(unpack_array(reply.payload[2 * index : 2 * index + 2]))

        await asyncio.gather(*(one(rank) for rank in range(plan.num_ranks)))
        return found
