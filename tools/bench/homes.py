"""Homes to measure: real agents on the devices of a testbed, the coordinator and client apps on a hub, and a model."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from coordinator.models.checkpoint.families import FAMILIES
from hearth.errors import BadSetting
from tools.bench.shapes import SHAPES, find_shape, save_random_model
from tools.testbed import Scenario, Testbed, load_scenario

_HUB = "hub"  # scenario whose coordinator has its own link
_STOP_SECONDS = 20.0  # for a coordinator to end after SIGTERM: longer than it drains requests

Model = str | Mapping[str, Any]  # a checkpoint's directory; or a shape's name, a config.json or its content


def hub_scenario(num_devices: int, cpu_share: float | None = None, memory_bytes: int | None = None) -> Scenario:
    """The first devices of the hub scenario, and the hub. `cpu_share` (in cores), `memory_bytes`: of each device."""
    scenario = load_scenario(_HUB)
    *devices, hub = scenario.devices
    chosen = [
        device.model_copy(update={"cpu_share": cpu_share or device.cpu_share, "memory_bytes": memory_bytes})
        for device in devices[:num_devices]
    ]
    return scenario.model_copy(update={"devices": (*chosen, hub)})


@contextmanager
def agents(scenario: Scenario, folder: Path, mbit: float, *options: str, tree: Path | None = None) -> Iterator[Testbed]:
    """A testbed with an agent on every device except the coordinator's, until the end of the block or an interrupt.

    `mbit`: real rate of every link. `options`: of `hearth-agent`. Raises BadSetting if the scenario cannot be emulated.
    """
    with Testbed(scenario.with_mbit(mbit), Path(tempfile.mkdtemp(prefix="testbed-", dir=folder)), tree=tree) as testbed:
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


def forget_plans(testbed: Testbed) -> None:
    """Remove what coordinators that have ended were serving: the next one takes nothing over and plans with all devices."""
    for path in testbed.folder.glob("**/coordinator/serving*"):
        path.unlink()


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
    """The model's directory. If only its shape is given: random weights, saved in `folder`. Raises BadSetting.

    Such a model has no end token, because it would emit it at random.
    """
    if isinstance(model, str):
        if model not in SHAPES and Path(model).is_dir():
            return Path(model)
        model = find_shape(model).config
    family = FAMILIES.get(str(model.get("model_type")))
    if family is None or not family.facts.get("causal"):
        raise BadSetting(
            setting="model", reason=f"the model_type {model.get('model_type')} is not a decoder that Hearth supports"
        )
    return save_random_model(folder / "model", {**model, "bos_token_id": None, "eos_token_id": None}, dtype=dtype)
