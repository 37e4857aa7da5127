"""The part of a worker that differs by kind of model."""

from __future__ import annotations

from typing import Protocol

from agent.worker.server import Answer
from hearth.wire.messages import ConnectPeers, Message, SegmentParts, Start, WorkerBound


class Runtime(Protocol):
    """One rank of one plan, called in this order: `load`, `connect`, then `run` in the main thread, which computes.

    Meanwhile the control thread calls `handle` and `abort`, which return at once. Every request that `handle` takes without
    raising is answered through the `answer` that the runtime was made with.
    """

    def load(self) -> WorkerBound:
        """Read the rank's chunks and bind its data-plane socket."""

    def connect(self, request: ConnectPeers) -> None: ...

    def run(self) -> None:
        """Compute until `close`."""

    def handle(self, request: bytes, message: Message, payload: list[bytes]) -> None:
        """Take a request. Raises BadRequest, QueueFull."""

    def abort(self, step: int | None, reason: str) -> None:
        """Make a request fail that runs, or all of them (None)."""

    def close(self) -> None: ...


def runtime_of(start: Start, answer: Answer) -> Runtime:
    """The runtime for this kind of model; only its libraries are imported."""
    if isinstance(start.load.parts, SegmentParts):
        from agent.worker.graph.runtime import GraphRuntime

        return GraphRuntime(start, answer)
    from agent.worker.transformer.runtime import TransformerRuntime

    return TransformerRuntime(start, answer)
