"""Profiles for the planners of a benchmark.

Devices are profiled once per shape and length and rescaled by a few real steps before every setting; links are measured
once per rate. Devices share no medium.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations

from coordinator.devices.block_profiling import smooth_profiles
from hearth.errors import BadSetting
from hearth.plan.profile import DECODING_TIMES, BlockProfile, ClusterProfile, DeviceProfile, Link
from tools.bench.drive import EngineRunners, StoredModel
from tools.bench.load import calmest_of
from tools.bench.plans import reference_plan
from tools.testbed import Scenario, Testbed

Report = Callable[[str], None]

_WITHOUT_LIMIT_BYTES = 8 << 30  # planner's memory budget of a device without a limit
_LINK_SECONDS = 1.0  # of one link measurement
_PROBE_KEY = "probe"
_PROBE_STEPS, _MOST_PROBE_STEPS = 3, 11  # least and most steps of a probe
_PROBE_SECONDS = 0.6  # intended total of a probe: short steps vary more, so more of them are run
_MOST_ATTEMPTS = 3  # to measure without background load


class Profiles:
    """Profiles of one testbed with started runners. Memory limits are the scenario's, not the testbed's.

    `repeat_disturbed`: measure again what other programs disturbed. Raises BadSetting if devices share a medium.
    """

    def __init__(
        self, scenario: Scenario, testbed: Testbed, engine: EngineRunners, report: Report, repeat_disturbed: bool = True
    ) -> None:
        if scenario.media:
            reason = f"the devices of {scenario.name} share a medium, which only the experiment `scenarios` profiles"
            raise BadSetting(setting="scenario", reason=reason)
        self._scenario, self._testbed, self._engine, self._report = scenario, testbed, engine, report
        self._most_attempts = _MOST_ATTEMPTS if repeat_disturbed else 1
        self._blocks: dict[tuple[str, str, int], BlockProfile] = {}
        self._links: dict[tuple[float | None, str, str], Link] = {}

    def current(self, model: StoredModel, names: Sequence[str], seq_len: int, mbit: float | None) -> ClusterProfile:
        """The profile of these devices, scaled to the current speed of real steps, because the host's speed drifts."""
        return self.rescaled(self.profiled(model, names, seq_len, mbit), model, seq_len)

    def rescaled(self, cluster: ClusterProfile, model: StoredModel, seq_len: int) -> ClusterProfile:
        """The profile, scaled to the current speed of real steps.

        The times of decoding are left as they are: a step of many rows is bound by compute, a token by memory. Measured with
        a plan on one device: in a step of several, a device that waits saves CPU quota and then bursts.
        """
        alone = reference_plan(model.spec, cluster, seq_len)
        self._engine.load(_PROBE_KEY, alone, model, encrypt=False, link_bytes_per_second=1e9, profile=cluster)
        wanted = math.ceil(_PROBE_SECONDS / self._engine.run(_PROBE_KEY, seq_len).seconds)
        count = min(max(wanted, _PROBE_STEPS), _MOST_PROBE_STEPS)
        seconds = statistics.median(self._engine.run(_PROBE_KEY, seq_len).seconds for _ in range(count))
        self._engine.unload(_PROBE_KEY)
        factor = seconds / alone.predicted.latency_seconds
        devices = tuple(
            device.model_copy(update={"blocks": _with_step_speed(device.blocks, factor)}) for device in cluster.devices
        )
        return cluster.model_copy(update={"devices": devices})

    def profiled(self, model: StoredModel, names: Sequence[str], seq_len: int, mbit: float | None) -> ClusterProfile:
        """The profile as it is measured, once for each shape and length, as a home does."""
        spec = model.spec
        shape = spec.model_copy(update={"num_layers": 1, "name": "", "vocab_size": 1}).model_dump_json()
        missing = [name for name in names if (name, shape, seq_len) not in self._blocks]
        for together in self._one_per_core(missing):
            self._report(f"{self._scenario.name}: profiling {spec.name} on {', '.join(together)}")
            found = calmest_of(partial(self._engine.profile, together, spec, seq_len), self._most_attempts)
            self._blocks.update({(name, shape, seq_len): blocks for name, blocks in found.items()})
        blocks = smooth_profiles({name: self._blocks[name, shape, seq_len] for name in names})
        memory = {device.name: device.memory_bytes or _WITHOUT_LIMIT_BYTES for device in self._scenario.devices}
        return ClusterProfile(
            devices=tuple(
                DeviceProfile(device_id=name, name=name, budget_bytes=memory[name], blocks=blocks[name])
                for name in names
            ),
            links=tuple(self._link(*pair, mbit) for pair in permutations(names, 2)),
        )

    def _one_per_core(self, names: Sequence[str]) -> list[list[str]]:
        """Groups of devices that share no core. A device that is not pinned to a core has its own group."""
        groups: list[dict[int | None, str]] = []  # by core
        for name in names:
            core = self._testbed.device(name).core
            free = (group for group in groups if core not in group and None not in (core, *group))
            if (group := next(free, None)) is not None:
                group[core] = name
            else:
                groups.append({core: name})
        return [list(group.values()) for group in groups]

    def _link(self, source: str, target: str, mbit: float | None) -> Link:
        """The link, measured once per rate. If all links and devices are equal, one pair is measured for all."""
        devices = self._scenario.devices
        alike = len({(device.mbit if mbit is None else 0, device.cpu_share, device.medium) for device in devices}) == 1
        first, second = (devices[0].name, devices[1].name) if alike else (source, target)
        if (mbit, first, second) not in self._links:
            rate = "" if mbit is None else f" at {mbit:.0f} Mbit/s"
            self._report(f"{self._scenario.name}: measuring the link from {first} to {second}{rate}")
            measure = partial(self._engine.measure_link, first, second, _LINK_SECONDS)
            self._links[mbit, first, second] = calmest_of(measure, self._most_attempts)
        return self._links[mbit, first, second].model_copy(update={"source": source, "target": target})


def _with_step_speed(blocks: BlockProfile, factor: float) -> BlockProfile:
    """The profile with all times but those of decoding multiplied by `factor`."""
    return blocks.scaled(factor).model_copy(update={name: getattr(blocks, name) for name in DECODING_TIMES})
