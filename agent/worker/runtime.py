"""The interface of the part of a worker that depends on the kind of model."""

from __future__ import annotations

from typing import Protocol

from agent.worker.server import SendAnswer
from hearth.wire.messages import ConnectPeers, Message, SegmentParts, Start, WorkerBound, WorkerProgress


class Runtime(Protocol):
    """One rank of one plan. The main thread calls `load`, `connect`, then `run`, which computes.

    Meanwhile the control thread calls `handle`, `abort` and `progress`, which return at once. Every request that `handle`
    accepts is answered by calling the `answer` that was given to the runtime's constructor.
    """

    def load(self) -> WorkerBound:
        """Load the rank's chunks and bind its data-plane socket."""

    def connect(self, request: ConnectPeers) -> None: ...

    def run(self) -> None:
        """Compute until `close` is called."""

    def handle(self, request: bytes, message: Message, payload: list[bytes]) -> None:
        """Accept a request. Raises BadRequest, QueueFull."""

    def abort(self, step: int | None, reason: str) -> None:
        """Fail the running request with this step number, or all (None)."""

    def progress(self) -> WorkerProgress:
        """The step that the main thread computes, once it has called `run`; returns at once."""

    def close(self) -> None: ...


def create_runtime(start: Start, answer: SendAnswer) -> Runtime:
    """The runtime for the plan's kind of model. Imports only that kind's libraries."""
    if isinstance(start.load.parts, SegmentParts):
        from agent.worker.graph.runtime import GraphRuntime

        return GraphRuntime(start, answer)
    from agent.worker.transformer.runtime import TransformerRuntime

    return TransformerRuntime(start, answer)
