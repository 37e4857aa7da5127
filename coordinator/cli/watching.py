"""`hearth status --watch`: the state of the home on the whole terminal, refreshed every second."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from rich.console import RenderableType
from rich.live import Live

from coordinator.cli.options import HomeOptions
from coordinator.cli.output import out
from coordinator.cli.render.events import Watched, watch_view
from hearth.client.home import AsyncHome
from hearth.errors import BadSetting, HearthError
from hearth.platform.asyncio_tools import cancel_all
from hearth.wire.messages import DeviceInfo, RecordedEvent, ServedModel, Status

_REFRESH_SECONDS = 1.0
_DEVICES_SECONDS = 5.0  # interval of reading the devices, which costs each of them a moment
_NUM_REQUESTS, _NUM_EVENTS = 100, 50  # that are kept for a tall terminal
_EVENT_KINDS = ("request_ended", "device_changed", "plan_changed", "phase_changed", "coordinator_started")


def watch_status(where: HomeOptions, timeout: float) -> None:
    """Show the state until Ctrl-C. Raises BadSetting where there is no terminal."""
    if not out.is_terminal:
        raise BadSetting(setting="--watch", reason="it needs a terminal; elsewhere, use `hearth events --follow`")
    asyncio.run(_watch(where, timeout))


async def _watch(where: HomeOptions, timeout: float) -> None:
    async with await where.connect_async(timeout) as home:
        screen = _Screen(home, timeout)
        following = asyncio.create_task(screen.follow())
        try:
            with Live(console=out, auto_refresh=False, screen=True) as live:
                while not following.done():
                    await screen.read()
                    live.update(screen.view(), refresh=True)
                    await asyncio.wait({following}, timeout=_REFRESH_SECONDS)
            following.result()
        finally:
            await cancel_all([following])


class _Screen:
    """What is shown, as last read."""

    def __init__(self, home: AsyncHome, timeout_seconds: float) -> None:
        self._home = home
        self._timeout_seconds = timeout_seconds
        self._status: Status | None = None
        self._models: tuple[ServedModel, ...] = ()
        self._devices: tuple[DeviceInfo, ...] = ()
        self._devices_at = float("-inf")
        self._requests: deque[RecordedEvent] = deque(maxlen=_NUM_REQUESTS)
        self._events: deque[RecordedEvent] = deque(maxlen=_NUM_EVENTS)
        self._problem = ""

    async def follow(self) -> None:
        """Read events for as long as the coordinator answers."""
        async with self._home.events(kinds=_EVENT_KINDS) as events:
            async for recorded in events:
                (self._requests if recorded.event.kind == "request_ended" else self._events).append(recorded)

    async def read(self) -> None:
        """Ask for what no event says. A coordinator that does not answer is shown, and asked again."""
        try:
            self._status = await self._home.status(self._timeout_seconds)
            self._models = await self._home.models(self._timeout_seconds)
            if time.monotonic() - self._devices_at >= _DEVICES_SECONDS:
                self._devices = (await self._home.devices(self._timeout_seconds)).devices
                self._devices_at = time.monotonic()
            self._problem = ""
        except HearthError as error:
            self._problem = str(error)

    def view(self) -> RenderableType:
        """The screen."""
        watched = Watched(self._status, self._models, self._devices, [*self._requests], [*self._events], self._problem)
        return watch_view(watched, time.time(), out.height)
