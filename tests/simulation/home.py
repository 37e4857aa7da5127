"""A simulated home: the real programs `hearth-agent` and `hearth serve`, and clients, as processes on simulated hosts."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import zmq.asyncio
from simulation import disk, model
from simulation.clock import CURRENT_PROCESS, Process, VirtualLoop
from simulation.history import History
from simulation.network import Context, Gatekeeper, Host, Network
from simulation.schedule import Schedule
from simulation.worker import WorkerProcess, sample

import agent.daemon.daemon
import agent.daemon.links
import agent.daemon.main
import agent.daemon.store
import agent.daemon.supervisor
import coordinator.deploy.distribution
import coordinator.devices.connections
import coordinator.serve.deployments
import coordinator.serve.kinds.transformer
import coordinator.serve.roles
import coordinator.serve.service
import coordinator.serve.standby.replica
import coordinator.serve.standby.standby
import coordinator.serve.state
import hearth.wire.intake
from agent.daemon.config import AgentSettings
from agent.daemon.daemon import AgentDaemon
from agent.daemon.identity import Identity
from agent.daemon.main import run_agent
from coordinator.devices.profiling import Profiler
from coordinator.port.protocol import PortState
from coordinator.serve.clients.client_port import ClientPort, refuse
from coordinator.serve.clients.trust import CLIENT_MESSAGES, Trust
from coordinator.serve.config import CoordinatorSettings
from coordinator.serve.model.controller import Controller
from coordinator.serve.roles import run_coordinator
from coordinator.serve.service import Service
from coordinator.serve.state import TransformerGoal
from hearth.client.home import AsyncHome, connect_async
from hearth.errors import HearthError
from hearth.platform.curve import KeyPair, new_keypair
from hearth.platform.security import (
    AppKey,
    DeviceKey,
    HomeKey,
    agent_trust,
    derive_keypair,
    new_device_key,
    new_home_key,
)
from hearth.wire import messages as wire
from hearth.wire.envelope import message_tag
from hearth.wire.messages import decode
from hearth.wire.rpc import Caller, Policy, RpcServer

CONTROL_PORT, LINK_PORT, COORDINATOR_PORT = 47800, 47801, 47830
AGENT_START_SECONDS = 0.3  # from the start of the process until it listens
COORDINATOR_START_SECONDS = 1.0
RESTART_SECONDS = 3.0  # until systemd starts a program again that has failed

HOME = new_home_key()
_HOME_BYTES = HOME.key_bytes()


@lru_cache
def _keypair(name: str) -> KeyPair:
    return new_keypair()


@lru_cache
def app_key(name: str) -> tuple[AppKey, str]:
    """The credential of an app, and its public key."""
    keys = _keypair(name)
    public = derive_keypair(_HOME_BYTES, "coordinator").public
    return AppKey(name=name, secret=keys.secret, coordinator_public=public), keys.public


@lru_cache
def device_key(name: str) -> DeviceKey:
    """The key of a device that has one of its own."""
    return new_device_key(HOME, name)


def device_public_key(name: str) -> str:
    return agent_trust(device_key(name)).own.public


class Home:
    """All hosts, and what is started on them. Faults are methods of `network` and of this class."""

    def __init__(self, loop: VirtualLoop, random: Random, folder: Path, schedule: Schedule) -> None:
        self.loop = loop
        self.random = random
        self.history = History()
        self.network = Network(loop, random, folder)
        self.devices = schedule.devices
        self.coordinators = schedule.coordinators  # the first leads at the beginning, the others stand by
        self.clients: list[str] = []
        self.agents: dict[str, Process] = {}
        self.serving: dict[str, Process] = {}
        self._schedule = schedule
        for name in (*self.devices, *self.coordinators):
            self._add_host(name)

    def _add_host(self, name: str) -> Host:
        host = self.network.add_host(name)
        host.variables["network"] = self.network
        host.variables["history"] = self.history
        host.variables["step seconds"] = self._schedule.step_seconds
        host.variables["leaders"] = self.leaders
        host.variables["own key"] = name == self._schedule.own_key
        host.variables["known links"] = self._schedule.devices if self._schedule.links_known else []
        return host

    def note(self, line: str) -> None:
        self.history.lines.append((self.loop.time(), line))

    # ---- agents -----------------------------------------------------------------------------------------------------

    def start_agent(self, name: str) -> None:
        host = self.network.hosts[name]
        process = self.agents[name] = self.network.start_process(host, "agent")
        process.run(self._run_agent(host))

    async def _run_agent(self, host: Host) -> None:
        await asyncio.sleep(AGENT_START_SECONDS)
        settings = AgentSettings(
            name=host.name, state_dir=host.disk.folder, store_dir=host.disk.folder / "store", key_path=Path("home key"),
            bind_host="0.0.0.0", advertise=False, spare_worker="off",
        )  # fmt: skip
        await run_agent(settings)

    # ---- coordinators -----------------------------------------------------------------------------------------------

    def start_coordinator(self, name: str, restart: bool = False) -> None:
        host = self.network.hosts[name]
        process = self.serving[name] = self.network.start_process(host, "coordinator")
        running = process.run(self._run_coordinator(host, restart))
        running.add_done_callback(lambda _: self._coordinator_ended(name, running))

    async def _run_coordinator(self, host: Host, restart: bool) -> None:
        await asyncio.sleep(COORDINATOR_START_SECONDS)
        devices = ",".join(f"{name}:{CONTROL_PORT}" for name in self.devices)
        others = ",".join(f"{name}:{COORDINATOR_PORT}" for name in self.coordinators if name != host.name)
        settings = CoordinatorSettings(
            name=host.name, state_dir=host.disk.folder, port=COORDINATOR_PORT, advertise=False, devices=devices,
            settle_seconds=0.5, min_devices=1, standby=host.name != self.coordinators[0], leader=others,
        )  # fmt: skip
        goal = TransformerGoal(model_dir="decoder" if self._schedule.causal else "encoder")
        saved = restart and (host.disk.folder / "serving.json").exists()
        await run_coordinator(
            settings,
            HOME,
            lambda line: self.note(f"{host.name}: {line}"),
            lambda name, done, total: None,
            None if saved or settings.standby else goal,
        )

    def _coordinator_ended(self, name: str, running: asyncio.Task[None]) -> None:
        """systemd starts a program again that has failed."""
        process = self.serving[name]
        if not running.cancelled() and (error := running.exception()) is not None:
            self.note(f"{name}: the coordinator ended with {error!r}")
            process.kill(1)
            self.loop.call_in(None, RESTART_SECONDS, self._restart_coordinator, name)

    def _restart_coordinator(self, name: str) -> None:
        if not self.serving[name].alive:
            self.start_coordinator(name, restart=True)

    @property
    def leading(self) -> dict[str, _Service]:
        """The services of the coordinators that lead, or have led, by host."""
        return {
            name: process.variables["service"]
            for name, process in self.serving.items()
            if process.alive and "service" in process.variables
        }

    def controllers(self) -> list[Controller]:
        """The deployments of the coordinators that lead, or have led."""
        return [each for service in self.leading.values() for each in service.deployments.controllers.values()]

    def leaders(self) -> tuple[str, ...]:
        """The holders of leases that would run a step now."""
        if len(self.coordinators) == 1:
            return ()
        return tuple(each.deployment.command_fields["holder"] for each in self.controllers() if _may_run(each))

    # ---- clients ----------------------------------------------------------------------------------------------------

    def add_client(self, name: str) -> Process:
        self.clients.append(name)
        return self.network.start_process(self._add_host(name), "client")

    async def connect(self, key: HomeKey | AppKey, timeout_seconds: float = 60.0) -> AsyncHome:
        addresses = ",".join(f"{name}:{COORDINATOR_PORT}" for name in self.coordinators)
        return await connect_async(addresses, key, timeout_seconds)

    def run_world(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task outside of all processes."""
        return self.loop.create_task(coroutine)


def _may_run(controller: Controller) -> bool:
    try:
        if controller.deployment is not None:
            controller.deployment.check_may_run()
    except HearthError:
        return False
    return controller.deployment is not None


# ---- what the simulation replaces -----------------------------------------------------------------------------------------


@contextmanager
def simulated(seed: int) -> Iterator[tuple[VirtualLoop, Random, Path]]:
    """A virtual loop, with the operating system's services replaced, until the context ends."""
    random = Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="hearth-simulation-", dir=_memory_folder()))
    loop = VirtualLoop()
    level = logging.root.manager.disable
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        logging.disable(logging.WARNING)
        stack.callback(logging.disable, level)
        for target, name, stand_in in _replacements(random):
            stack.enter_context(mock.patch.object(target, name, stand_in))
        asyncio.set_event_loop(loop)
        stack.callback(asyncio.set_event_loop, None)
        yield loop, random, folder


def _memory_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _replacements(random: Random) -> list[tuple[Any, str, Any]]:
    """What stands for what: modules or classes, names in them, and stand-ins."""
    tokens = Random(random.random())
    main, service = agent.daemon.main, coordinator.serve.service
    transformer = coordinator.serve.kinds.transformer
    return [
        (zmq.asyncio, "Context", Context),
        (main, "LoopGatekeeper", Gatekeeper),
        (coordinator.serve.standby.standby, "Browser", _Browser),
        (coordinator.serve.standby.standby, "refuses_connections", _refuses_connections),
        (coordinator.serve.roles, "Service", _Service),
        (service, "Profiler", _profiler),
        (coordinator.serve.roles, "client_port", _client_port),
        (main, "load_credential", _load_credential),
        (agent.daemon.daemon, "give_back_freed_buffers", lambda: None),
        (coordinator.deploy.distribution, "give_back_freed_buffers", lambda: None),
        (main, "load_identity", _load_identity),
        (main, "GpuReader", _Gpu),
        (main, "TelemetryReader", _Telemetry),
        (main, "AgentDaemon", _Daemon),
        (main, "choose_address", lambda interface: "127.0.0.1"),
        (coordinator.serve.state, "locked_folder", lambda folder: nullcontext()),
        (coordinator.devices.connections, "Browser", _Browser),
        (agent.daemon.daemon, "measure_link", _measure_link),
        (agent.daemon.supervisor, "SocketFolder", _SocketFolder),
        (agent.daemon.supervisor, "_sample", sample),
        (agent.daemon.supervisor.WorkerProcess, "peak_bytes", 0),
        (agent.daemon.supervisor.WorkerProcess, "busy_seconds", 0.0),
        (agent.daemon.store, "_HASH_THREADS", 1),
        (asyncio, "create_subprocess_exec", _start_process),
        # Tasks are entered in a WeakSet, of which nothing here makes use.
        *((tasks, "add", lambda task: None) for tasks in _sets_of_tasks()),
        (shutil, "disk_usage", lambda path: SimpleNamespace(free=disk.current_disk().free_bytes())),
        (secrets, "token_hex", lambda num_bytes=8: tokens.randbytes(num_bytes).hex()),
        (secrets, "token_bytes", lambda num_bytes=16: tokens.randbytes(num_bytes)),
        (secrets, "randbits", tokens.getrandbits),
        *((module, "write_atomically", disk.write_atomically) for module in _users_of("write_atomically")),
        *((module, "derive_keypair", _derived) for module in _users_of("derive_keypair")),
        (coordinator.serve.deployments, "open_checked", model.open_transformer),
        (coordinator.serve.standby.replica, "check_model", lambda goal, state_dir: None),
        (transformer, "block_cluster", model.block_cluster),
        (transformer, "solve_transformer", model.solve_transformer),
        (transformer, "plans_or_errors", model.plans_or_errors),
        (transformer, "build_plan", model.build_plan),
        (transformer, "request_seconds", model.request_seconds),
        (transformer, "shard_weights", model.shard_weights),
        (transformer, "transformer_files", lambda directory: []),
        (wire, "decode", _decode),
        (hearth.wire.intake, "message_tag", _message_tag),
    ]


def _sets_of_tasks() -> list[Any]:
    """The sets behind `asyncio.all_tasks`; their name differs between versions of Python."""
    return [vars(asyncio.tasks)[name] for name in ("_all_tasks", "_scheduled_tasks") if name in vars(asyncio.tasks)]


@lru_cache
def _users_of(name: str) -> list[ModuleType]:
    """The modules of the product in which this name is defined or imported."""
    return [
        module
        for title, module in sys.modules.items()
        if title.partition(".")[0] in ("agent", "coordinator", "hearth") and hasattr(module, name)
    ]


@lru_cache
def _derived(home_key: bytes, role: Any) -> KeyPair:
    return derive_keypair(home_key, role)


@lru_cache(maxsize=4096)
def _decoded(data: bytes) -> wire.Message:
    return decode(data)


def _decode(data: bytes | memoryview, *_: Any) -> wire.Message:
    """The real decoding; equal messages, which are immutable, are decoded once."""
    return _decoded(bytes(data))


@lru_cache(maxsize=4096)
def _known_tag(data: bytes, any_version: frozenset[str]) -> str:
    return message_tag(data, any_version)


def _message_tag(data: bytes | memoryview, any_version: frozenset[str]) -> str:
    """The real function, called once for equal messages."""
    return _known_tag(bytes(data), any_version)


def _load_credential(path: Path) -> HomeKey | DeviceKey:
    process = CURRENT_PROCESS.get()
    assert process is not None
    return device_key(process.host.name) if process.host.variables["own key"] else HOME


@contextmanager
def _load_identity(state_dir: Path) -> Iterator[Identity]:
    process = CURRENT_PROCESS.get()
    name = process.host.name
    keys = _keypair(name)
    yield Identity(device_id=f"id-{name}", hardware="", public_key=keys.public, secret_key=keys.secret)


class _Daemon(AgentDaemon):
    """The real daemon, which the checks at the end of a run look at."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        process = CURRENT_PROCESS.get()
        process.host.variables["daemon"] = self
        self._history: History = process.host.variables["history"]

    async def _acquire_lease(self, caller: Caller, message: wire.AcquireLease) -> wire.Message:
        found = {name: (worker, worker.epoch) for name, worker in self._workers.items()}
        granted = await super()._acquire_lease(caller, message)
        for name, worker in self._workers.items():
            is_same = found.get(name) == (
                worker,
                worker.epoch,
            )  # not if this took long, and a plan was loaded meanwhile
            if is_same and message.adopt is not None and message.adopt.get(name) != worker.epoch:
                self._history.stale_workers.append(
                    f"{self.name} keeps a worker of {name}, epoch {worker.epoch}, for {message.holder}, "
                    f"who takes over {message.adopt}"
                )
        return granted


class _Service(Service):
    """The real service, which the checks at the end of a run look at."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.is_running = False
        process = CURRENT_PROCESS.get()
        process.variables["service"] = self

    async def run(self, *arguments: Any) -> None:
        self.is_running = True
        try:
            await super().run(*arguments)
        finally:
            self.is_running = False


def _profiler(*arguments: Any, **settings: Any) -> Profiler:
    """The real profiler, which may know the links from an earlier run."""
    process = CURRENT_PROCESS.get()
    assert process is not None
    profiler = Profiler(*arguments, **settings)
    for source, target in itertools.permutations(process.host.variables["known links"], 2):
        profiler.links[f"id-{source}", f"id-{target}"] = model.link(f"id-{source}", f"id-{target}")
    return profiler


class _ClientPort(RpcServer):
    """The client port in the coordinator's own process."""

    def __init__(self, context: Context, settings: CoordinatorSettings, trust: Trust) -> None:
        policy = Policy(CLIENT_MESSAGES, trust.authorise, lambda key: trust.access.limits(key), wire.CLIENT_SIZES)
        super().__init__(
            context, settings.bind_host, settings.port, trust.keypair, "coordinator", refuse, policy=policy
        )

    serving = ClientPort.serving
    counters = PortState(0, 0)

    def change_access(self) -> None:
        pass


@asynccontextmanager
async def _client_port(settings: CoordinatorSettings, trust: Trust) -> AsyncIterator[_ClientPort]:
    context = Context()
    gatekeeper = Gatekeeper(context)
    gatekeeper.admit("coordinator", lambda key: trust.access.admits(key))
    gatekeeper.start()
    port = _ClientPort(context, settings, trust)
    try:
        yield port
    finally:
        await port.close()
        await gatekeeper.close()
        context.destroy(linger=0)


class _Gpu:
    compute_device = "cpu"

    def __init__(self, *_: Any) -> None:
        pass

    async def probe(self) -> None:
        pass


@lru_cache
def _telemetry(name: str, free_bytes: int) -> wire.Telemetry:
    return wire.Telemetry(
        host_id=name, cpu_model="", num_cores=1, load_1min=0.0, frequency_mhz=None, memory_total_bytes=8 << 30,
        memory_available_bytes=8 << 30, memory_budget_bytes=8 << 30, disk_free_bytes=free_bytes,
        temperature_celsius=None, gpu=None, num_threads=1, compute_device="cpu", clock_unix_seconds=0.0,
        python_version="3",
    )  # fmt: skip


class _Telemetry:
    budget_is_limit = True

    def __init__(self, *_: Any) -> None:
        pass

    def has_room(self, num_bytes: int) -> bool:
        return True

    def free_memory_bytes(self) -> int:
        return 8 << 30

    def read_disk(self) -> None:
        pass

    def read(self, now: float, idle: bool = False) -> wire.Telemetry:
        process = CURRENT_PROCESS.get()
        return _telemetry(process.host.name, process.host.disk.free_bytes())


class _Browser:
    """mDNS finds nothing; the coordinator knows the agents' addresses."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.services: dict[str, Any] = {}

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass


async def _measure_link(request: wire.MeasureLink, own_keypair: KeyPair) -> wire.LinkMeasured:
    """One exchange with the other agent's link port; the real measurement sends megabytes."""
    async with agent.daemon.links._link_client(request, own_keypair) as client:
        await client.call(wire.Done(), timeout_seconds=request.max_seconds + 2.0)
    return wire.LinkMeasured(
        bytes_per_second=model.BYTES_PER_SECOND, round_trip_seconds=model.ROUND_TRIP_SECONDS, num_bytes=0, stable=True
    )


async def _refuses_connections(host: str, port: int, timeout_seconds: float) -> bool:
    process = CURRENT_PROCESS.get()
    network, own = process.host.variables["network"], process.host.name
    if network.refuses(own, host, port):
        await asyncio.sleep(2 * network.delay(own, host))
        return True
    await asyncio.sleep(2 * network.delay(own, host) if network.connected(own, host) else timeout_seconds)
    return False


class _SocketFolder:
    _numbers = itertools.count()

    def __init__(self, prefix: str) -> None:
        self.path = Path(f"/simulated/{prefix}{next(self._numbers)}")

    def remove(self) -> None:
        pass


async def _start_process(*command: str, **_: Any) -> WorkerProcess:
    """Stands for `asyncio.create_subprocess_exec`."""
    process = CURRENT_PROCESS.get()
    assert process is not None
    module = command[2]
    await asyncio.sleep(0.005)
    if module == "agent.worker.main":
        return WorkerProcess(command[3], process.host.variables["history"])
    raise FileNotFoundError(f"the simulation has no {module}")
