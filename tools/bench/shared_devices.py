"""Emulated devices that share all cores of this machine, each with a small file system for its store, and a hub.

Also finds the processes of their agents and workers.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from hearth.errors import BadSetting
from tools.bench.homes import agent_names
from tools.testbed import Scenario, Testbed
from tools.testbed.scenario import EmulatedDevice

HUB = "hub"  # the device of the coordinator and of client apps


def shared_scenario(num_devices: int, cores: int, mbit: float) -> Scenario:
    """Devices and a hub that share this machine's cores."""
    share = cores / (num_devices + 1)
    names = (*(f"m{number}" for number in range(num_devices)), HUB)
    devices = tuple(EmulatedDevice(name=name, cpu_share=share, instruction_set="native", mbit=mbit) for name in names)
    return Scenario(name="faults", coordinator=HUB, devices=devices)


@contextmanager
def devices_with_disks(scenario: Scenario, folder: Path, cores: int, disk_bytes: int) -> Iterator[Testbed]:
    """A testbed whose agents keep their stores on file systems of `disk_bytes`, and whose devices may use all `cores`."""
    home = Path(tempfile.mkdtemp(prefix="home-", dir=folder))
    stores = [home / device.name / "store" for device in scenario.devices if device.name != scenario.coordinator]
    try:
        for store in stores:
            store.mkdir(parents=True)
            _command("mount", "-t", "tmpfs", "-o", f"size={disk_bytes}", "none", str(store))
        with Testbed(scenario, home) as testbed:
            for cgroup in testbed.cgroups.values():
                cgroup.set_cpu_share(cores)
            for name in agent_names(testbed):
                testbed.start_agent(name)
            yield testbed
    finally:
        for store in stores:
            _command("umount", "--lazy", str(store), check=False)


def _command(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise BadSetting(setting="the testbed", reason=f"`{' '.join(arguments)}`: {done.stderr.strip()}")


def agent_of(testbed: Testbed, device: str) -> psutil.Process | None:
    """The agent process of a device, if it runs."""
    return with_argument(testbed.pids(device), "/hearth-agent")


def worker_of(testbed: Testbed, device: str) -> psutil.Process | None:
    """The worker process of a device, if there is one."""
    return with_argument(testbed.pids(device), "agent.worker.main")


def template_of(testbed: Testbed, device: str) -> psutil.Process | None:
    """The process from which a device's workers are forked, if there is one."""
    return with_argument(testbed.pids(device), "agent.worker.fork_server")


def with_argument(pids: Iterable[int], end: str) -> psutil.Process | None:
    """The first of these processes that has an argument with this end, if one does."""
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if any(part.endswith(end) for part in process.cmdline()):
                return process
        except psutil.NoSuchProcess:
            continue
    return None
