"""The `hearth-agent` command: builds the daemon from its settings and runs it until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
from contextlib import AsyncExitStack

import zmq.asyncio

from agent.daemon.config import AgentSettings, add_arguments, load_agent_settings
from agent.daemon.configuration import StoredConfiguration
from agent.daemon.daemon import CONTROL_MESSAGES, AgentDaemon
from agent.daemon.gpu import GpuReader
from agent.daemon.identity import load_identity
from agent.daemon.links import LinkServer
from agent.daemon.store import ShardStore
from agent.daemon.telemetry import TelemetryReader
from hearth.errors import BadKey, HearthError
from hearth.platform.asyncio_tools import cancel_all, supervised
from hearth.platform.discovery import AGENT_SERVICE, advertised
from hearth.platform.disk import FILE_SECONDS, on_disk
from hearth.platform.loop_gatekeeper import LoopGatekeeper
from hearth.platform.machine import raise_file_limit, share_one_arena
from hearth.platform.network import choose_address, current_address
from hearth.platform.notify import Notifier
from hearth.platform.security import DeviceKey, HomeKey, agent_trust, load_credential
from hearth.wire.rpc import Policy, RpcServer

log = logging.getLogger("hearth.agent")

ZAP_DOMAIN = "agent"


async def run_agent(settings: AgentSettings) -> None:
    """Run the agent until SIGTERM or SIGINT. Raises KeyMissing, BadKey, BadSetting or PortInUse at start-up."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    credential = await on_disk(settings.key_path, FILE_SECONDS, load_credential, settings.key_path)
    if not isinstance(credential, HomeKey | DeviceKey):
        reason = (
            f"an agent needs a device's key (`hearth key add-device`) or the home key, not an {credential.kind} key"
        )
        raise BadKey(source=str(settings.key_path), reason=reason)
    agent_keys, coordinator_public, admin_public = agent_trust(credential)
    address = choose_address(settings.interface)
    async with AsyncExitStack() as stack:
        state_dir, store_dir, gpu = settings.state_dir, settings.store_dir, GpuReader(settings.compute_device)
        identity = await on_disk(state_dir, FILE_SECONDS, stack.enter_context, load_identity(state_dir))
        configuration = await on_disk(state_dir, FILE_SECONDS, StoredConfiguration, state_dir)
        store = await on_disk(store_dir, FILE_SECONDS, ShardStore, store_dir, settings.store_bytes, settings.name)
        telemetry = await on_disk(store_dir, FILE_SECONDS, TelemetryReader, settings, gpu)
        await gpu.probe()
        context = zmq.asyncio.Context()
        stack.callback(context.destroy, linger=0)
        gatekeeper = LoopGatekeeper(context)
        gatekeeper.admit(ZAP_DOMAIN, lambda key: key in (coordinator_public, admin_public))
        gatekeeper.start()
        stack.callback(gatekeeper.stop)
        links = LinkServer(
            context, gatekeeper, settings.bind_host, settings.link_port, identity.keypair,
            lambda chunk: on_disk(store.path, FILE_SECONDS, lambda: store.path_of(chunk).read_bytes()),
        )  # fmt: skip
        stack.push_async_callback(links.close)
        daemon = AgentDaemon(settings, identity, store, configuration, telemetry, links, context, coordinator_public)
        server = RpcServer(
            context, settings.bind_host, settings.control_port, agent_keys, ZAP_DOMAIN, daemon.handle,
            port_setting="--control-port", policy=Policy(CONTROL_MESSAGES, daemon.authorise),
        )  # fmt: skip
        stack.push_async_callback(server.close)
        stack.push_async_callback(daemon.close)
        if settings.advertise:
            await stack.enter_async_context(
                advertised(
                    AGENT_SERVICE, server.port, agent_keys.public, secrets.token_hex(8),
                    lambda: [current_address(settings.interface)],
                )
            )  # fmt: skip
        notifier = Notifier(os.environ)
        notifier.send("READY=1")
        log.info("%s is ready on %s, control port %d", settings.name, address, server.port)
        proofs = {
            "the control port": server.has_worked, "the link port": links.has_worked, "the gatekeeper": gatekeeper.has_worked,
        }  # fmt: skip
        tasks = [
            supervised(daemon.watch_leases(), "the watch of leases"),
            supervised(daemon.spawner.keep_templates(), "the templates of workers"),
            supervised(notifier.keep_alive(daemon.status_line, proofs), "the watchdog"),
        ]
        await stop.wait()
        notifier.send("STOPPING=1")
        await cancel_all(tasks)


def main() -> None:
    """Entry point of `hearth-agent`. Prints an error and exits with status 1 on a HearthError."""
    parser = argparse.ArgumentParser(
        prog="hearth-agent",
        description="Lend this device to its home: run the agent that a Hearth coordinator finds and uses.",
    )
    add_arguments(parser)
    try:
        settings = load_agent_settings(parser.parse_args(), os.environ)
        logging.basicConfig(level=settings.log_level.upper(), format="%(name)s %(levelname)s %(message)s")
        raise_file_limit()
        share_one_arena()
        asyncio.run(run_agent(settings))
    except HearthError as error:
        print(f"hearth-agent: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
