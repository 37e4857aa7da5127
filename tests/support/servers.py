"""Servers of real sockets on the loopback interface, for the keys that a test admits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio
from support.contexts import zmq_context

from hearth.platform.curve import KeyPair
from hearth.platform.loop_gatekeeper import LoopGatekeeper
from hearth.wire.rpc import ACCEPT_ALL, Handler, Policy, RpcServer

DOMAIN = "test"


def _everyone(public_key: str) -> bool:
    return True


@asynccontextmanager
async def guarded_context(admits: Callable[[str], bool] = _everyone) -> AsyncIterator[zmq.asyncio.Context]:
    """A context in which servers of `DOMAIN` admit these public keys."""
    with zmq_context() as context:
        gatekeeper = LoopGatekeeper(context)
        gatekeeper.admit(DOMAIN, admits)
        gatekeeper.start()
        try:
            yield context
        finally:
            await gatekeeper.close()


@asynccontextmanager
async def rpc_server(
    keypair: KeyPair,
    handler: Handler,
    port: int = 0,
    admits: Callable[[str], bool] = _everyone,
    policy: Policy = ACCEPT_ALL,
    sndhwm: int = 1000,
) -> AsyncIterator[RpcServer]:
    """A server that listens until the context ends. Port 0: any free port; `sndhwm`: answers that may wait for a client."""
    async with guarded_context(admits) as context:
        context.setsockopt(zmq.SNDHWM, sndhwm)
        server = RpcServer(context, "127.0.0.1", port, keypair, DOMAIN, handler, policy=policy)
        try:
            yield server
        finally:
            await server.close()
