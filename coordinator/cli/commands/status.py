"""`hearth status`: the state of the running coordinator, once or on the whole terminal (`--watch`)."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.markup import escape

from coordinator.cli.options import AsJsonOption, HomeOptions, TimeoutOption
from coordinator.cli.output import out, print_json, print_line
from coordinator.cli.render.events import Watched, watch_view
from coordinator.cli.render.graph_tables import graph_plan_tables, prediction_line
from coordinator.cli.render.tables import device_table, draft_line, history_table, loss_table, model_table, plan_tables
from hearth.client.home import AsyncHome
from hearth.errors import BadSetting, HearthError, NotServing
from hearth.plan.plan import is_graph_plan, is_transformer_plan
from hearth.platform.asyncio_tools import cancel_all
from hearth.platform.units import format_bytes, format_seconds
from hearth.wire.messages import DeviceInfo, RecordedEvent, ServedModel, Status

# After a standby has answered: for another coordinator of the home, which leads, to be found and to answer.
_OTHER_COORDINATOR_SECONDS = 2.0
_NUM_SHOWN_PHASES = 12  # the latest phases: enough for a start and a recovery; `--json` prints all
_REFRESH_SECONDS = 1.0
_DEVICES_SECONDS = 5.0  # interval of reading the devices, which costs each of them a moment
_NUM_REQUESTS, _NUM_EVENTS = 100, 50  # that are kept for a tall terminal
_EVENT_KINDS = ("request_ended", "device_changed", "plan_changed", "phase_changed", "coordinator_started")


def status(
    model: Annotated[
        str | None,
        typer.Option(help="Name of a served model, as `hearth ps` shows it. Default: the oldest one.", metavar="NAME"),
    ] = None,
    timeout: TimeoutOption = 10.0,
    *,
    where: HomeOptions,
    watch: Annotated[bool, typer.Option("--watch", help="Show devices, requests and events until Ctrl-C.")] = False,
    as_json: AsJsonOption = False,
) -> None:
    """Show the coordinator's state, plan, devices, requests and last error. Needs an admin or home key."""
    if watch:
        if as_json:
            raise BadSetting(setting="--watch", reason="it has no --json; use `hearth events --follow --json`")
        watch_status(where, timeout)
        return
    with where.connect(timeout) as home:
        readiness = home.readiness(timeout, model=model)
        is_standby = not readiness.model  # only a coordinator that leads has a model
        try:
            now = home.status(min(timeout, _OTHER_COORDINATOR_SECONDS) if is_standby else timeout, model=model)
        except NotServing:
            if not is_standby:
                raise
            if as_json:
                print_json({"phase": "standby", "state": readiness.state})
            else:
                print_line(f"{escape(readiness.state)}; the coordinator that leads shows devices and plan")
            return
        devices, models = home.devices(timeout), () if as_json else home.models(timeout)
    if as_json:
        print_json({**now.model_dump(mode="json"), "devices": devices.model_dump(mode="json")["devices"]})
        return
    print_line(f"[bold]{now.name}[/] (Hearth {now.version}): {escape(now.state)}")
    if len(models) > 1:
        out.print(model_table(models))
        print_line(f"[bold]{escape(now.deployment)}[/] (others with --model NAME):")
    peaks = {device.device_id: device.peak_bytes for device in devices.devices}
    if is_transformer_plan(now.plan):
        out.print(*plan_tables(now.plan, peaks), sep="\n")
        if line := draft_line(now.plan):
            print_line(escape(line))
    elif is_graph_plan(now.plan):
        out.print(*graph_plan_tables(now.plan, peaks), sep="\n")
        print_line(prediction_line(now.plan))
    out.print(device_table(devices.devices))
    if now.redundancy:
        print_line(f"loss of a device: {escape(now.redundancy)}")
    if len(now.losses) > 1:
        out.print(loss_table(now.losses))
    latency = f", last {format_seconds(now.last_latency_seconds)}" if now.last_latency_seconds is not None else ""
    print_line(
        f"requests: {now.served_requests} served, {now.failed_requests} failed, {now.queued_requests} waiting{latency}"
    )
    if now.num_prompt_tokens:
        share = now.num_cached_tokens / now.num_prompt_tokens
        print_line(
            f"prompts: {now.num_prompt_tokens} tokens, {now.num_cached_tokens} ({share:.0%}) found in the KV cache"
        )
    if now.num_drafted_tokens:
        share = now.num_accepted_tokens / now.num_drafted_tokens
        print_line(f"guessed tokens: {now.num_drafted_tokens}, {now.num_accepted_tokens} ({share:.0%}) accepted")
    if now.wire.num_tiles:
        saved = 1 - now.wire.sent_bytes / max(now.wire.raw_bytes, 1)
        print_line(
            f"activations: {now.wire.num_tiles} tiles, {format_bytes(now.wire.sent_bytes)} sent "
            f"({saved:.0%} saved, {now.wire.lz4_tiles} tiles by lz4), {now.dropped_messages} messages dropped"
        )
    if now.refused_requests or now.refused_connections:
        print_line(f"refused: {now.refused_requests} requests, {now.refused_connections} connections")
    if now.hung_files:
        files = ", ".join(sorted(set(now.hung_files)))
        print_line(f"[red]the coordinator's disk does not answer: {len(now.hung_files)} accesses[/] ({escape(files)})")
    if now.last_error:
        print_line(f"last error: {escape(now.last_error)}")
    if now.history:
        out.print(history_table(now.history[-_NUM_SHOWN_PHASES:]))


# ---- --watch ---------------------------------------------------------------------------------------------------------


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
