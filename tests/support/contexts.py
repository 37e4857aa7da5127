"""ZeroMQ contexts that are destroyed with their test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import zmq.asyncio


@contextmanager
def zmq_context() -> Iterator[zmq.asyncio.Context]:
    """A context, destroyed with all its sockets even if the test fails: open ones would block pytest's exit."""
    context = zmq.asyncio.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)
