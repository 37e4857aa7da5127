"""ZeroMQ contexts that end with their test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import zmq.asyncio


@contextmanager
def zmq_context() -> Iterator[zmq.asyncio.Context]:
    """Destroyed with all its sockets, also when the test fails: pytest would wait at its exit for one that is left."""
    context = zmq.asyncio.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)
