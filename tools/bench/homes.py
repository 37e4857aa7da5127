"""Homes to measure: real agents on the devices of a testbed, the coordinator and client apps on a hub, and a model.

Also finds the processes of agents and workers, and other checkouts.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from coordinator.models.checkpoint.families import FAMILIES
from hearth.errors import BadSetting
from tools.bench.shapes import find_shape, save_random_model
from tools.testbed import Scenario, Testbed, load_scenario
from tools.testbed.network import run_command
from tools.testbed.scenario import EmulatedDevice

HUB = "hub"  # the device of the coordinator and of client apps, with its own link; and the scenario that has one
_SHARED_MBIT = 1000.0  # of the links of devices that share all cores
_STOP_SECONDS = 20.0  # for a coordinator to end after SIGTERM: longer than it drains requests

Model = str | Mapping[str, Any]  # a shape's name, a config.json or its content


def hub_scenario(num_devices: int, mbit: float, cpu_share: float | None = None) -> Scenario:
    """The first devices of the hub scenario, and the hub. `mbit`: real rate of every link; `cpu_share`: of each device."""
    scenario = load_scenario(HUB)
    *devices, hub = scenario.devices
    chosen = [
        device.model_copy(update={"cpu_share": cpu_share or device.cpu_share}) for device in devices[:num_devices]
    ]
    return scenario.model_copy(update={"devices": (*chosen, hub)}).with_mbit(mbit)


@contextmanager
def agents(scenario: Scenario, folder: Path, *options: str, tree: Path | None = None) -> Iterator[Testbed]:
    """A testbed with an agent on every device except the coordinator's, until the end of the block or an interrupt.

    `options`: of `hearth-agent`. `tree`: the checkout whose programs run, by default this one. Raises BadSetting if the
    scenario cannot be emulated.
    """
    with Testbed(scenario, Path(tempfile.mkdtemp(prefix="testbed-", dir=folder)), tree=tree) as testbed:
        for name in agent_names(testbed):
            testbed.start_agent(name, *options)
        yield testbed


def agent_names(testbed: Testbed) -> list[str]:
    """The devices except the coordinator's."""
    return [each.name for each in testbed.scenario.devices if each.name != testbed.scenario.coordinator]


def stop_coordinator(coordinator: subprocess.Popen[bytes]) -> None:
    """End a coordinator, which unloads the workers and releases its leases; kill it if that takes too long."""
    coordinator.terminate()
    with suppress(subprocess.TimeoutExpired):
        coordinator.wait(_STOP_SECONDS)
    coordinator.kill()
    coordinator.wait(_STOP_SECONDS)


@contextmanager
def on_quietest_core(scenario: Scenario) -> Iterator[None]:
    """Pin processes started in the block without limits (coordinator, client apps) to the core that the devices use least.

    A home has a separate machine for them.
    """
    cores = os.sched_getaffinity(0)
    wanted = {core: sum(each.cpu_share for each in scenario.devices if each.core == core) for core in cores}
    os.sched_setaffinity(0, {min(cores, key=lambda core: wanted[core])})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def decoder_directory(model: Model, folder: Path, dtype: str = "bfloat16") -> Path:
    """A directory in `folder` with a model of random weights. Raises BadSetting.

    It has no end token, because it would emit it at random.
    """
    if isinstance(model, str):
        model = find_shape(model).config
    family = FAMILIES.get(str(model.get("model_type")))
    if family is None or not family.facts.get("causal"):
        raise BadSetting(
            setting="model", reason=f"the model_type {model.get('model_type')} is not a decoder that Hearth supports"
        )
    return save_random_model(folder / "model", {**model, "bos_token_id": None, "eos_token_id": None}, dtype=dtype)


def checkout(setting: str, folder: Path) -> Path:
    """A checkout of Hearth, to be measured next to this one. Raises BadSetting."""
    if not (folder / "tools" / "bench" / "runner.py").is_file():
        raise BadSetting(setting=setting, reason=f"{folder} is not a checkout of Hearth with tools/bench/runner.py")
    return folder.resolve()


@contextmanager
def own_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """A new folder has a file system of its own, in memory: one that can be full, or hang while it is frozen."""
    images = folder.with_name(f"{folder.name}-disk")
    for path in (folder, images):
        path.mkdir(parents=True)
    with ExitStack() as stack:
        run_command("mount", "-t", "tmpfs", "none", str(images))
        stack.callback(run_command, "umount", "--lazy", str(images), check=False)
        image = images / "image"
        with image.open("wb") as file:
            file.truncate(num_bytes)
        run_command("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(image))
        run_command("mount", "-o", "loop", str(image), str(folder))
        stack.callback(run_command, "umount", "--lazy", str(folder), check=False)
        stack.callback(run_command, "fsfreeze", "--unfreeze", str(folder), check=False)
        (folder / "lost+found").rmdir()
        yield


@contextmanager
def shared_home(folder: Path, num_devices: int, disk_bytes: int | None = None) -> Iterator[Testbed]:
    """Agents on devices that share this machine's cores with the hub. Raises BadSetting.

    `disk_bytes`: size of a disk for each agent's store and one for the coordinator's state; None: they are in `folder`.
    """
    cores = len(os.sched_getaffinity(0))
    names = [f"m{number}" for number in range(num_devices)]
    share = cores / (num_devices + 1)
    devices = tuple(
        EmulatedDevice(name=name, cpu_share=share, instruction_set="native", mbit=_SHARED_MBIT)
        for name in (*names, HUB)
    )
    scenario = Scenario(name="shared", coordinator=HUB, devices=devices)
    home = Path(tempfile.mkdtemp(prefix="home-", dir=folder))
    with ExitStack() as stack:
        if disk_bytes is not None:
            for folder in (*(home / name / "store" for name in names), home / "coordinator"):
                stack.enter_context(own_disk(folder, disk_bytes))
        testbed = stack.enter_context(Testbed(scenario, home))
        for cgroup in testbed.cgroups.values():
            cgroup.set_cpu_share(cores)
        for name in names:
            testbed.start_agent(name)
        yield testbed


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
