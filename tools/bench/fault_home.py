"""A home under load to which faults are done: agents on emulated devices, the coordinator and the clients on a hub."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import psutil

from hearth.errors import BadSetting, InternalError
from tools.bench.experiment import Context
from tools.bench.fault_rows import Happened, answers_steadily
from tools.bench.homes import HUB, agent_names, decoder_directory, shared_home, template_of
from tools.bench.processes import ClientProcess, DeviceProcess, losses_are_prepared
from tools.bench.results import REPOSITORY
from tools.bench.shapes import SMALL_LLAMA
from tools.testbed import Testbed
from tools.testbed.cluster import wait_until

LoadName = Literal["embed", "generate", "infer"]
LOADS: tuple[LoadName, ...] = ("embed", "generate", "infer")
CLIENTS = 4  # at once, of each load
_FAR_CLIENTS = 2  # more of them, on the device of the standby
_MINILM = REPOSITORY / ".models" / "minilm"
_DISK_BYTES = 256 << 20  # of a device's store: the models here, and the 64 MiB that an agent leaves free
_BRANCH_WIDTH = 96  # channels of the two-branch graph: enough compute for a pipeline of several devices
_POLL_SECONDS = 0.2  # between two looks at the coordinator
_STEADY_SECONDS = 1.5  # for which every client must get answers until a home counts as recovered
_FOLLOWS = "this is the standby of "  # begin of the state of a coordinator that follows another one
_COPIES = "copied"  # in it, until it has a copy of the leader's state
# After the start of a coordinator: it counts a device as lost after 3 s until it knows for 30 s how long it usually is silent.
_LEARNING_SECONDS = 33.0
_ANSWER_SECONDS = 30.0  # for a busy coordinator to tell its plan
_READY_SECONDS = 240.0  # for the coordinator to profile, plan, push and load on a busy machine


def make_model(load: LoadName, folder: Path) -> Path:
    """The model of a load: a file or directory. Raises BadSetting if MiniLM is missing."""
    if load == "embed":
        if not _MINILM.is_dir():
            raise BadSetting(setting="loads", reason=f"{_MINILM} is missing; `make test` fetches it")
        return _MINILM
    if load == "generate":
        return decoder_directory(SMALL_LLAMA, folder, "float32")
    from tools.graph_models import build, export

    path = folder / "two-branch.onnx"
    return path if path.exists() else export(build("two_branch", branch_width=_BRANCH_WIDTH), path)


@contextmanager
def served_home(
    loads: Sequence[LoadName], context: Context, num_devices: int, standby: bool = False, far_clients: bool = False
) -> Iterator[FaultHome]:
    """A home that serves the models of these loads on emulated devices that share all cores. The loads have not begun.

    `far_clients`: clients on the device of the standby, too. Raises BadSetting (the testbed, the model), InternalError,
    DeadlineExceeded.
    """
    name = "+".join(loads)
    context.report(f"{name}: making the model")
    models = {load: make_model(load, context.folder) for load in loads}
    with (
        shared_home(context.folder, num_devices, _DISK_BYTES * len(loads)) as testbed,
        ClientProcess(testbed, "load_clients") as clients,
    ):
        context.report(f"{name}: planning, pushing and loading")
        home = FaultHome(testbed, clients, models)
        home.serve(standby, far_clients)
        yield home


class FaultHome:
    """One home: the models of some loads are served and asked for. The clients' process must run in the testbed."""

    def __init__(self, testbed: Testbed, clients: ClientProcess, models: Mapping[LoadName, Path]) -> None:
        self.testbed, self.load = testbed, "+".join(models)
        self.names = agent_names(testbed)
        self._clients, self._models = clients, models
        self._apps: list[tuple[DeviceProcess, int]] = [(clients, CLIENTS)]  # processes, and the clients of each
        self.coordinators: dict[str, subprocess.Popen[bytes]] = {}  # by device, and name
        self._served = 0.0  # since when the coordinator of the hub runs
        self._template_seconds: dict[int, float] = {}  # CPU time of the templates of workers, by pid, at the last look
        self.steady_seconds = _STEADY_SECONDS
        self._num_planned = 0  # devices of the first plan: a graph may leave some out

    # ---- serving --------------------------------------------------------------------------------------------------

    def serve(self, standby: bool = False, far_clients: bool = False) -> None:
        """Serve on all devices, and ask for the references. `standby`: of the coordinator, on the last device.

        Raises InternalError, DeadlineExceeded.
        """
        self.start_coordinator(HUB)
        status = self._clients.ready_status(_READY_SECONDS)
        for load in list(self._models)[1:]:
            state = ("--state-dir", str(self.testbed.folder / "coordinator"))
            self.testbed.hearth("serve", *self._options_of(load), *state, timeout_seconds=_READY_SECONDS)
        self._num_planned = len(status["plan"]["devices"])
        if far_clients:
            options = (str(self.testbed.key), self.testbed.address(HUB))
            far = DeviceProcess(self.testbed, "load_clients", self.names[-1], *options, limited=False)
            self._apps.append((far, _FAR_CLIENTS))
        self._call("prepare", loads=list(self._models))
        if standby:
            device = self.names[-1]
            self.start_coordinator(device)
            wait_until("the standby", lambda: self._follows(device), _ANSWER_SECONDS)
            self._call("use", addresses=",".join(map(self.testbed.address, (HUB, device))))

    def begin(self) -> None:
        """Start the load."""
        for process, count in self._apps:
            process.call("begin", num_clients=count)

    def _call(self, method: str, **arguments: Any) -> list[dict[str, Any]]:
        """Call a method of all clients' processes."""
        return [process.call(method, **arguments) for process, _ in self._apps]

    def start_coordinator(self, device: str) -> None:
        """Start the coordinator of the hub, or the standby of another device, always with the same options."""
        if device == HUB:
            first = next(iter(self._models))
            options = (*self._options_of(first), "--min-devices", str(len(self.names)), "--name", HUB)
            self.coordinators[HUB] = self.testbed.start_coordinator(*options)
            self._served = time.monotonic()
        else:
            options = ("--standby", "--leader", self.testbed.address(HUB), "--name", device)
            self.coordinators[device] = self.testbed.start_coordinator(*options, device=device)

    def _options_of(self, load: LoadName) -> tuple[str, ...]:
        """The model of a load as arguments of `hearth serve`."""
        options = {
            "embed": ("--strategy", "hmp"),
            "generate": ("--strategy", "hmp", "--context", "256", "--sequences", str(CLIENTS)),
            "infer": ("--objective", "throughput", "--strategy", "pipeline-exact", "--time-limit", "3"),
        }
        return (str(self._models[load]), "--as", load, *options[load])

    def _follows(self, device: str) -> bool:
        """Whether the coordinator of a device follows another one and has a copy of its state."""
        state = str(self._clients.call("state_of", address=self.testbed.address(device))["state"])
        return state.startswith(_FOLLOWS) and _COPIES not in state

    @property
    def model_bytes(self) -> int:
        """Bytes of the models' weights on disk."""
        files = (model.glob("*.safetensors") if model.is_dir() else [model] for model in self._models.values())
        return sum(file.stat().st_size for file in chain.from_iterable(files))

    def change_keys(self, app: str) -> None:
        """Admit an app, and revoke it: not with `hearth key`, whose start takes processor time of requests here."""
        self._clients.call("change_keys", app=app)

    def leader(self) -> str:
        """The device of the coordinator that leads."""
        return self.look(devices=False).coordinator or HUB

    # ---- observing ------------------------------------------------------------------------------------------------

    def look(self, devices: bool = True) -> HomeState:
        """What the coordinator says; without `devices` it asks none of them, which is faster."""
        return HomeState(self._clients.call("look", devices=devices))

    def take(self) -> list[Happened]:
        """What has happened to the clients since the last call."""
        return [
            (seconds, client + number * CLIENTS * len(self._models), kind, what)
            for number, taken in enumerate(self._call("take"))
            for seconds, client, kind, what in taken["happened"]
        ]

    def planned(self) -> list[str]:
        """The names of the devices of the plan, once the coordinator answers. Raises InternalError."""
        state = self.wait_for(lambda state: bool(state.planned), _ANSWER_SECONDS)
        if state is None:
            reason = f"it names no plan within {_ANSWER_SECONDS:g} s; its log ends: {self.logs_since({}, 500)}"
            raise InternalError(where="the coordinator", reason=reason)
        return state.planned

    def learning_seconds(self) -> float:
        """Seconds until the coordinator knows how long its devices usually are silent."""
        return max(self._served + _LEARNING_SECONDS - time.monotonic(), 0.0)

    def is_complete(self, state: HomeState) -> bool:
        """Whether it serves, with all devices there."""
        return state.serves and state.alive >= set(self.names)

    def is_ready(self, missing: int, state: HomeState) -> bool:
        """Whether it can lose a device again.

        Its plan has all devices but `missing` ones, the losses of its devices are prepared for, the processes from which
        workers are forked are idle, and a coordinator that does not lead follows the other one.
        """
        spares = len(state.planned) >= self._num_planned - missing and state.prepared
        return self.is_complete(state) and spares and self._templates_are_idle() and self._is_followed(state)

    def _is_followed(self, state: HomeState) -> bool:
        return all(self._follows(device) for device in self.coordinators if device != state.coordinator)

    def _templates_are_idle(self) -> bool:
        """Whether they have used no CPU time since the last look."""
        found = [template for name in self.names if (template := template_of(self.testbed, name)) is not None]
        before, self._template_seconds = self._template_seconds, {}
        for template in found:
            with suppress(psutil.NoSuchProcess):
                self._template_seconds[template.pid] = sum(template.cpu_times()[:2])
        return self._template_seconds == before

    def wait_until_steady(self, holds: Callable[[HomeState], bool], seconds: float) -> tuple[bool, list[Happened]]:
        """Wait until a condition holds and every client gets answers, for a moment without a break, at most for `seconds`.

        Returns whether that came about, and what happened to the clients.
        """
        since = time.monotonic()
        deadline, happened = since + seconds, []
        while True:
            time.sleep(_POLL_SECONDS)
            holds_now = holds(self.look())
            happened += self.take()
            now = time.monotonic()
            since = since if holds_now else now
            clients = range(sum(count for _, count in self._apps) * len(self._models))
            steady = self.steady_seconds
            if now - since >= steady and answers_steadily(happened, clients, now - steady, now):
                return True, happened
            if now > deadline:
                return False, happened

    def wait_for(self, holds: Callable[[HomeState], bool], seconds: float) -> HomeState | None:
        """Look at the coordinator until a condition holds; returns the state in which it does, None if not within `seconds`."""
        deadline = time.monotonic() + seconds
        while not holds(state := self.look()):
            if time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
        return state

    def log_sizes(self) -> dict[str, int]:
        """Characters of the log of each coordinator and agent, by its name."""
        return {path.name: len(self.testbed.log(path.name)) for path in self.testbed.folder.glob("*.log")}

    def logs_since(self, sizes: Mapping[str, int], most: int) -> str:
        """The ends of the logs, at most so many characters of each, without what they had at `sizes`."""
        new = {name: self.testbed.log(name)[sizes.get(name, 0) :][-most:] for name in sorted(self.log_sizes())}
        return "\n".join(f"{name}: {text}" for name, text in new.items())


class HomeState:
    """What the coordinator says of itself and of each model; nothing, if it does not answer. The plan is the first one's."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        statuses = answer.get("statuses") or [{}]
        status = statuses[0]
        self.phase: str = status.get("phase", "")
        self.serves = all(each.get("phase") == "serving" for each in statuses)
        self.coordinator: str = status.get("name", "")  # the name of the coordinator that answered
        self.planned: list[str] = [device["name"] for device in (status.get("plan") or {}).get("devices", ())]
        # Whether the loss of each device has been prepared for, with the devices that are there now, or found impossible.
        self.prepared = all(losses_are_prepared(each.get("redundancy", "")) for each in statuses)
        self.alive = {device["name"] for device in answer.get("devices", ()) if device["state"] == "alive"}
