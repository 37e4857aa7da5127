"""One HTTP request as its handler sees it, and the two forms of answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from coordinator.http.failures import Failure, unknown_model
from coordinator.http.homes import Asked, Served, wait_until_ready
from coordinator.http.parts import Receive
from hearth.errors import NotServing

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

    async def ready(self, model: str) -> Asked:
        """The model of this name, once it is ready. Raises Failure for one that is not served, NotServing."""
        served = self.served
        if not served.models:
            raise NotServing(state="no model is served")
        if (found := served.named(model)) is None:
            raise unknown_model(model, served.models)
        return await wait_until_ready(served.home, found, _READY_SECONDS)


Answer = dict[str, Any] | EventStream
Handler = Callable[[Call], Awaitable[Answer]]
