"""One HTTP request as its handler sees it, and the two forms of answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from coordinator.http.failures import Failure, unknown_model
from coordinator.http.homes import Served, wait_until_ready
from coordinator.http.parts import Receive

_READY_SECONDS = 5.0  # for a home that is not ready now: one that has lost a device plans again within a second or two


class EventStream(NamedTuple):
    """An answer in pieces. `events` raises HearthError or Failure; `failed` is the last piece after one of them."""

    media_type: str
    events: AsyncGenerator[bytes, None]
    failed: Callable[[Failure], bytes]


class Call(NamedTuple):
    """One request: the home as its token sees it, its body as JSON, and the variables of its path."""

    served: Served
    receive: Receive
    body: object
    path: Mapping[str, str]

    async def ready(self, model: str) -> Served:
        """The home, once it serves this model. Raises Failure for another model, NotServing."""
        served = self.served
        if served.model and not is_name_of(model, served.model):
            raise unknown_model(model, served.model)
        return await wait_until_ready(served, _READY_SECONDS)


Answer = dict[str, Any] | EventStream
Handler = Callable[[Call], Awaitable[Answer]]


def is_name_of(name: str, model: str) -> bool:
    """Whether a request's name means the served model: its own name, with Ollama's tag or without."""
    return name in (model, f"{model}:latest")
