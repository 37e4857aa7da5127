"""What a benchmark's planner knows: devices profiled once for each shape and length, and kept current by a few real steps
before every setting; links measured once for each rate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import permutations

from coordinator.drift import COMPUTE_DRIFT
from coordinator.pooling import pooled
from hearth.plan import Plan
from hearth.profile import BlockProfile, ClusterProfile, DeviceProfile, Link
from tools.bench.drive import EngineRunners, StoredModel
from tools.bench.load import calmest_of
from tools.bench.plans import Entry, plan_for, reference_plan, without_limits
from tools.testbed import Scenario, Testbed

Report = Callable[[str], None]

_WITHOUT_LIMIT_BYTES = 8 << 30
_LINK_SECONDS = 1.0
_PROBE = Entry("hmp", "exact")
_PROBE_KEY = "probe"
_PROBE_STEPS, _MOST_PROBE_STEPS = 3, 11
_PROBE_SECONDS = 0.6  # in steps together: short ones differ more
_MOST_ATTEMPTS = 3  # that something is measured, where the host or others disturb


class Profiles:
    """Of the devices of one testbed, whose runners are up. Memory limits are the scenario's, not the testbed's."""

    def __init__(self, scenario: Scenario, testbed: Testbed, engine: EngineRunners, report: Report) -> None:
        self._scenario, self._testbed, self._engine, self._report = scenario, testbed, engine, report
        self._blocks: dict[tuple[str, str, int], BlockProfile] = {}
        self._links: dict[tuple[float | None, str, str], Link] = {}

    def current(self, model: StoredModel, names: Sequence[str], seq_len: int, mbit: float | None) -> ClusterProfile:
        """The profile of these devices, each as slow as real steps show it to be now: the host drifts.

        How slow in all, one device alone tells: in a step of several, one that waited has quota in hand and bursts. Which
        of them differ, a step of all tells.
        """
        cluster = self._profiled(model, names, seq_len, mbit)
        alone = reference_plan(model.spec, cluster, seq_len)
        level, _ = self._drifted(alone, model, seq_len, cluster)
        relative: dict[str, float] = {}
        if len(names) > 1:
            together = plan_for(_PROBE, model.spec, without_limits(cluster), seq_len)
            typical, drifted = self._drifted(together, model, seq_len, cluster)
            relative = {name: factor / typical for name, factor in drifted.items()}
        level /= relative.get(alone.devices[0].device_id, 1.0)
        devices = tuple(
            device.model_copy(update={"blocks": device.blocks.scaled(level * relative.get(device.device_id, 1.0))})
            for device in cluster.devices
        )
        return cluster.model_copy(update={"devices": devices})

    def _drifted(
        self, plan: Plan, model: StoredModel, seq_len: int, cluster: ClusterProfile
    ) -> tuple[float, dict[str, float]]:
        """The `drift_factors` of a few real steps of this plan."""
        slowest = min((link.bytes_per_second for link in cluster.links), default=1e9)
        self._engine.load(_PROBE_KEY, plan, model, plan.num_ranks > 1, slowest)
        wanted = math.ceil(_PROBE_SECONDS / self._engine.run(_PROBE_KEY, seq_len).seconds)
        count = min(max(wanted, _PROBE_STEPS), _MOST_PROBE_STEPS)
        steps = [self._engine.run(_PROBE_KEY, seq_len).compute_seconds for _ in range(count)]
        self._engine.unload(_PROBE_KEY)
        return drift_factors(plan, steps)

    def _profiled(self, model: StoredModel, names: Sequence[str], seq_len: int, mbit: float | None) -> ClusterProfile:
        spec = model.spec
        shape = spec.model_copy(update={"num_layers": 1, "name": "", "vocab_size": 1}).model_dump_json()
        missing = [name for name in names if (name, shape, seq_len) not in self._blocks]
        for together in self._one_per_core(missing):
            self._report(f"{self._scenario.name}: profiling {spec.name} on {', '.join(together)}")
            threads = {name: self._testbed.device(name).num_threads for name in together}
            found = calmest_of(partial(self._engine.profile, threads, spec, seq_len), _MOST_ATTEMPTS)
            self._blocks.update({(name, shape, seq_len): blocks for name, blocks in found.items()})
        blocks = pooled({name: self._blocks[name, shape, seq_len] for name in names})
        memory = {device.name: device.memory_bytes or _WITHOUT_LIMIT_BYTES for device in self._scenario.devices}
        return ClusterProfile(
            devices=tuple(
                DeviceProfile(
                    device_id=name,
                    name=name,
                    budget_bytes=memory[name],
                    blocks=blocks[name],
                )
                for name in names
            ),
            links=tuple(self._link(*pair, mbit) for pair in permutations(names, 2)),
        )

    def _one_per_core(self, names: Sequence[str]) -> list[list[str]]:
        """Groups in which no two devices share a core; a device without one of its own is alone."""
        groups: list[tuple[set[int], list[str]]] = []
        for name in names:
            core = self._testbed.device(name).core
            for taken, members in groups:
                if core is not None and core not in taken and taken:
                    taken.add(core)
                    members.append(name)
                    break
            else:
                groups.append((set() if core is None else {core}, [name]))
        return [members for _, members in groups]

    def _link(self, source: str, target: str, mbit: float | None) -> Link:
        """Measured once for each rate; where all links and devices are alike, one pair stands for all."""
        devices = self._scenario.devices
        alike = len({(device.mbit if mbit is None else 0, device.cpu_share) for device in devices}) == 1
        if alike:
            first, second = devices[0].name, devices[1].name
        else:
            first, second = source, target
        if (mbit, first, second) not in self._links:
            rate = "" if mbit is None else f" at {mbit:.0f} Mbit/s"
            self._report(f"{self._scenario.name}: measuring the link from {first} to {second}{rate}")
            measure = partial(self._engine.measure_link, first, second, _LINK_SECONDS)
            self._links[mbit, first, second] = calmest_of(measure, _MOST_ATTEMPTS)
        return self._links[mbit, first, second].model_copy(update={"source": source, "target": target})


def drift_factors(plan: Plan, steps: Sequence[Sequence[float]]) -> tuple[float, dict[str, float]]:
    """How many times its predicted busy seconds a device took in these steps: typically, and those that differ, by id.

    What is within chance is typical: equal devices stay equal. `steps` hold busy seconds by rank.
    """
    own = {
        device.device_id: statistics.median(step[rank] for step in steps) / device.compute_seconds
        for rank, device in enumerate(plan.devices)
        if device.compute_seconds > 0
    }
    typical = statistics.median(own.values())
    return typical, {
        name: ratio for name, ratio in own.items() if not 1 / COMPUTE_DRIFT < ratio / typical < COMPUTE_DRIFT
    }
