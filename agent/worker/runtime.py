"""The interface of the part of a worker that depends on the kind of model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from hearth.wire.messages import ConnectPeers, Message, WorkerBound, WorkerProgress


class LoadGivenUp(Exception):
    """A load ended early, because its plan has been replaced. The next runtime may take what this one has."""


class Runtime(Protocol):
    """One rank of one plan. The main thread calls `load`, `connect`, then `run`, which computes.

    Meanwhile the control thread calls `handle`, `abort`, `progress` and `end`, which return at once. Every request that
    `handle` accepts is answered by calling the `answer` that was given to the runtime's constructor.

    When the process goes on in another plan, the next runtime takes the transport and what it can use of the weights from this
    one, once `run` has returned or `load` was given up; this one is of no use then.
    """

    def load(self, is_given_up: Callable[[], bool]) -> WorkerBound:
        """Load the rank's chunks and bind its data-plane socket, or take both from the previous runtime.

        Raises LoadGivenUp soon after `is_given_up` has become true.
        """

    def connect(self, request: ConnectPeers) -> None: ...

    def run(self) -> None:
        """Compute until `end` is called. All requests have been answered then."""

    def handle(self, request: bytes, message: Message, payload: list[bytes]) -> None:
        """Accept a request. Raises BadRequest, QueueFull."""

    def abort(self, step: int | None, reason: str) -> None:
        """Fail the running request with this step number, or all (None)."""

    def progress(self) -> WorkerProgress:
        """The step that the main thread computes, once it has called `run`; returns at once."""

    @property
    def sent_bytes(self) -> tuple[int, ...]:
        """The bytes sent to each rank of the plan; for the control thread, like `progress`."""

    def end(self) -> None:
        """Fail the running and waiting requests, and make `run` return."""
