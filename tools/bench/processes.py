"""Child processes of a benchmark: the parent starts them on devices of a testbed and calls their methods; they `serve`.

Requests and answers are JSON over a socket, one at a time.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from inspect import isawaitable
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from typing_extensions import Self

from hearth.client.home import AsyncHome, connect_async
from hearth.errors import BadSetting, DeadlineExceeded, HearthError, InternalError
from tools.interrupts import shielded
from tools.testbed import Testbed

_ANSWER_SECONDS = 180.0  # default timeout of a call: long enough to load a large model on a slow device
_POLL_MILLISECONDS = 500  # interval at which to check that a process is alive
_AFTER_ERROR_SECONDS = 15.0  # for the answers of the other processes, most of which wait 5 s for the one with the error
_STACK_SECONDS = 1.0  # for all processes to print their stacks, which takes milliseconds of a core
_SHOWN_CHARACTERS = 6000  # of a log: the stacks of a dozen threads


class ProcessGroup:
    """Processes of one module of `tools.bench`, one per device. Leaving the context closes sockets; the testbed ends them."""

    def __init__(self, testbed: Testbed, module: str) -> None:
        self._testbed = testbed
        self._module = module
        self._context: zmq.Context[Any] = zmq.Context.instance()
        self._sockets: dict[str, zmq.Socket[Any]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for socket in self._sockets.values():
            socket.close()

    def start(self, device: str, *arguments: str, limited: bool = True) -> None:
        """Start the process of a device. Not `limited`: without the device's CPU quota."""
        path = self._testbed.folder / f"{self._module}-{device}"
        if len(str(path)) > zmq.IPC_PATH_MAX_LEN:
            raise BadSetting(setting="TMPDIR", reason=f"{path} is too long for a socket")
        address = f"ipc://{path}"
        socket = self._context.socket(zmq.PAIR)
        socket.linger = 0
        socket.bind(address)
        self._sockets[device] = socket
        with shielded(), self._log(device).open("ab") as log:
            self._processes[device] = self._testbed.popen(
                device, sys.executable, "-m", f"tools.bench.{self._module}", address, *arguments,
                limited=limited, stdout=log, stderr=log, stdin=subprocess.DEVNULL, memory_limited=False,
                environment={"GLOO_SOCKET_IFNAME": "eth0"},
            )  # fmt: skip

    def call_each(
        self, requests: Mapping[str, Mapping[str, Any]], timeout_seconds: float = _ANSWER_SECONDS
    ) -> dict[str, dict[str, Any]]:
        """Send each device its request, wait for all answers. Raises InternalError (a child's error), DeadlineExceeded.

        The first error is raised soon, even if others do not answer: they may wait for the device with the error.
        """
        for device, request in requests.items():
            self._wait([device], zmq.POLLOUT, time.monotonic() + _ANSWER_SECONDS)  # until the child has connected
            self._sockets[device].send(json.dumps(request).encode())
        deadline = time.monotonic() + timeout_seconds
        answers: dict[str, dict[str, Any]] = {}
        failed = ""
        while waiting := [device for device in requests if device not in answers]:
            try:
                device = self._wait(waiting, zmq.POLLIN, deadline)
            except HearthError:
                if failed:
                    break
                raise
            answers[device] = json.loads(self._sockets[device].recv())
            if "error" in answers[device] and not failed:
                failed, deadline = device, min(deadline, time.monotonic() + _AFTER_ERROR_SECONDS)
        if failed:
            logs = "".join(f"; log of {other}: {line}" for other in requests if (line := self._last_line(other)))
            raise InternalError(where=f"{self._module} on {failed}", reason=answers[failed]["error"] + logs)
        return {device: answers[device] for device in requests}

    def call_all(
        self, devices: Sequence[str], method: str, own: Sequence[Mapping[str, Any]] = (), **arguments: Any
    ) -> dict[str, dict[str, Any]]:
        """Send all these devices the same request, if given with `own` arguments of each; answers as `call_each`."""
        ranks = zip(devices, own or [{}] * len(devices), strict=True)
        return self.call_each({device: {"do": method, **arguments, **each} for device, each in ranks})

    def _wait(self, devices: Sequence[str], event: int, deadline: float) -> str:
        """Wait until the socket of one of these children can be read or written, as long as all run; returns its device.

        After the deadline, the stacks of all children of the group go to stderr.
        """
        began = time.monotonic()
        poller = zmq.Poller()
        for device in devices:
            poller.register(self._sockets[device], event)
        while not (ready := dict(poller.poll(_POLL_MILLISECONDS))):
            for device in devices:
                if self._processes[device].poll() is not None:
                    reason = f"it has ended: {self._last_line(device) or 'no output'}"
                    raise InternalError(where=f"{self._module} on {device}", reason=reason)
            if time.monotonic() > deadline:
                self._print_stacks()
                names = ", ".join(devices)
                raise DeadlineExceeded(action=f"{self._module} on {names}", seconds=time.monotonic() - began)
        return next(device for device in devices if self._sockets[device] in ready)

    def _print_stacks(self) -> None:
        """Print the stacks of all children, and what they have logged last, to tell why one does not answer."""
        for process in self._processes.values():
            process.send_signal(signal.SIGUSR1)
        time.sleep(_STACK_SECONDS)
        for device in self._processes:
            said = self._log(device).read_text(errors="replace")[-_SHOWN_CHARACTERS:]
            print(f"---- the end of the log of {self._module} on {device}:\n{said}", file=sys.stderr, flush=True)

    def _last_line(self, device: str) -> str:
        return (self._log(device).read_text(errors="replace").strip().splitlines() or [""])[-1]

    def _log(self, device: str) -> Path:
        return self._testbed.folder / f"{self._module}-{device}.log"


class DeviceProcess(ProcessGroup):
    """One process on one device."""

    def __init__(self, testbed: Testbed, module: str, device: str, *arguments: str, limited: bool = True) -> None:
        super().__init__(testbed, module)
        self._device = device
        self.start(device, *arguments, limited=limited)

    def call(self, method: str, timeout_seconds: float = _ANSWER_SECONDS, /, **arguments: Any) -> dict[str, Any]:
        """Call a method of the child and return its answer. Raises as `call_each`."""
        return self.call_each({self._device: {"do": method, **arguments}}, timeout_seconds)[self._device]


class ClientProcess(DeviceProcess):
    """Client apps on the hub, without limits: a process with a `HomeClients`."""

    def __init__(self, testbed: Testbed, module: str) -> None:
        hub = testbed.scenario.coordinator_device
        super().__init__(testbed, module, hub, str(testbed.key), testbed.address(hub), limited=False)

    def ready_status(self, timeout_seconds: float) -> dict[str, Any]:
        """Wait until the coordinator serves; returns its status. Raises InternalError with the end of its log."""
        try:
            # the child's own timeout is the shorter one, because its error says more
            return self.call("wait_ready", timeout_seconds + 30.0, timeout_seconds=timeout_seconds)
        except HearthError as error:
            log = self._testbed.log("coordinator.log").strip()[-500:]
            raise InternalError(where="the coordinator", reason=f"{error}; its log ends: {log}") from None


# ---- in the child -----------------------------------------------------------------------------------------------------

_CONNECT_SECONDS = 30.0  # most time to reach a coordinator that serves already
_POLL_SECONDS = 0.5  # between looks at the status


class HomeClients:
    """Client apps of one home, on the client library. Subclasses add their requests."""

    def __init__(self, key: Path, address: str) -> None:
        self._key, self._address = key, address

    async def connected(self, timeout_seconds: float = _CONNECT_SECONDS) -> AsyncHome:
        return await connect_async(self._address, self._key, timeout_seconds)

    async def wait_ready(self, timeout_seconds: float) -> dict[str, Any]:
        """Wait until the coordinator serves; returns its status. Raises the errors of the client library."""
        async with await self.connected(timeout_seconds) as home:
            await home.wait_ready(timeout_seconds)
            return (await home.status()).model_dump(mode="json")

    async def wait_prepared(self, timeout_seconds: float) -> dict[str, Any]:
        """Wait until the coordinator has planned for each loss of a device, which takes processor time of requests."""
        async with await self.connected(timeout_seconds) as home:
            deadline = asyncio.get_running_loop().time() + timeout_seconds
            while not losses_are_prepared((await home.status()).redundancy):
                if asyncio.get_running_loop().time() > deadline:
                    raise DeadlineExceeded(action="plans for the loss of each device", seconds=timeout_seconds)
                await asyncio.sleep(_POLL_SECONDS)
        return {}


def losses_are_prepared(redundancy: str) -> bool:
    """Whether the loss of each device has been prepared for, with the devices that are there now, or found impossible.

    `redundancy` is that of the coordinator's status.
    """
    return "spare weights" in redundancy or redundancy.startswith("cannot lose")


def serve(address: str, target: object) -> None:
    """Answer requests `{"do": METHOD, ...}` by calling methods of `target`, until the parent ends this process.

    An answer is the returned dictionary ({} for None), or `{"error": TEXT}`. Methods may be coroutines; tasks that they start
    also run between requests.
    """
    faulthandler.register(signal.SIGUSR1)  # prints the stacks of all threads
    asyncio.run(_serve(address, target))


async def _serve(address: str, target: object) -> None:
    socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
    socket.connect(address)
    while True:
        request = json.loads(await socket.recv())
        try:
            answer = getattr(target, request.pop("do"))(**request)
            if isawaitable(answer):
                answer = await answer
        except Exception as error:
            text = str(error) if isinstance(error, HearthError) else f"{type(error).__name__}: {error}"
            answer = {"error": text}
        await socket.send(json.dumps(answer or {}).encode())
