"""A home and its HTTP gateway: agents on emulated devices, coordinator and gateway on a hub, clients on the hub's loopback."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from hearth.errors import InternalError
from tools.bench.experiment import Context
from tools.bench.homes import agents, stop_coordinator
from tools.bench.processes import ClientProcess
from tools.bench.shared_devices import shared_scenario
from tools.bench.watch import with_argument
from tools.testbed import Testbed
from tools.testbed.cluster import check_possible

HOST, PORT = "127.0.0.1", 47880  # of the gateway, on the hub
_GATEWAY = "coordinator.http"  # module of its process
_READY_SECONDS = 600.0  # for the coordinator to profile, plan, push and load on a busy machine


class HttpHome:
    """A served home, its gateway, and a process with client apps (`tools.bench.http.clients`)."""

    def __init__(self, testbed: Testbed, clients: ClientProcess, coordinator: int) -> None:
        self.testbed, self.clients = testbed, clients
        self._coordinator = coordinator

    def new_app(self, name: str) -> str:
        """Admit an app; returns its bearer token."""
        hub = self.testbed.address(self.testbed.scenario.coordinator_device)
        answer: dict[str, Any] = json.loads(
            self.testbed.hearth("key", "add-app", name, "--token", "--json", "--address", hub)
        )
        return str(answer["token"])

    def gateway(self) -> psutil.Process:
        """The gateway's process. Raises InternalError if there is none."""
        children = psutil.Process(self._coordinator).children(recursive=True)
        process = with_argument((child.pid for child in children), _GATEWAY)
        if process is None:
            raise InternalError(where="the gateway", reason="its process has ended; see coordinator.log")
        return process

    def log(self) -> str:
        """The log of the coordinator and the gateway."""
        return self.testbed.log("coordinator.log")


@contextmanager
def http_home(context: Context, model: Path, num_devices: int, mbit: float, *options: str) -> Iterator[HttpHome]:
    """Serve a model on devices that share all cores. `options`: of `hearth serve`.

    Raises BadSetting (the testbed), InternalError, DeadlineExceeded.
    """
    cores = len(os.sched_getaffinity(0))
    scenario = shared_scenario(num_devices, cores, mbit)
    check_possible(scenario)
    with agents(scenario, context.folder, mbit) as testbed, ClientProcess(testbed, "http.clients") as clients:
        for cgroup in testbed.cgroups.values():
            cgroup.set_cpu_share(cores)
        context.report("planning, pushing and loading")
        coordinator = testbed.start_coordinator(
            str(model), "--http", f"{HOST}:{PORT}", "--min-devices", str(num_devices), *options
        )
        clients.ready_status(_READY_SECONDS)
        yield HttpHome(testbed, clients, coordinator.pid)
        stop_coordinator(coordinator)
