"""Times of requests to one graph: the calibration, which is saved, and the latency of the deployed plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from coordinator.deploy.deployment import RunResult
from coordinator.deploy.graph import Arrays
from coordinator.plan.graph.calibration import Calibration, Factors, measured_transfers, segment_delays
from coordinator.plan.graph.cluster import GraphCluster
from coordinator.serve.state import DurableFile
from hearth.plan.graph_spec import GraphSpec
from hearth.plan.plan import GraphPlan
from hearth.platform.disk import DiskWork

FOLDER = "learnt"  # of the state directory: a file for each graph
_KEPT_SECONDS = 50  # latencies of the deployed plan: some minutes of use
# Standard error of a median times the root of the number of values, over their median absolute deviation (normal distribution).
_ERROR_PER_DEVIATION = 1.2533 * 1.4826
_TRACED_REQUESTS = 8  # one request of as many is traced, for the links: tracing costs well below 1 % of it


class SavedMeasurements(BaseModel):
    """The content of the file."""

    model_config = ConfigDict(frozen=True)

    version: Literal[1] = 1
    factors: Factors = Field(default_factory=Factors)


class Latency(NamedTuple):
    """The median seconds of requests that ran alone, and its standard error."""

    seconds: float
    standard_error: float


class Measurements:
    """Measured times of one graph. `slowdown`: the factor of a device's drift since it was profiled, by id."""

    def __init__(self, path: Path, spec: GraphSpec, slowdown: Callable[[str], float]) -> None:
        self._file = DurableFile(path, SavedMeasurements.model_validate_json)
        self.calibration = Calibration(Factors())
        self.reading = DiskWork(path, self._read)  # of what earlier runs have learnt
        self.reading.ask()
        self._spec = spec
        self._slowdown = slowdown
        self._known_slowdowns: dict[str, float] = {}  # at the latest request, by device id
        self._profiled: GraphCluster | None = None
        # By which transfers delay the deployed plan's segments, and the cluster for which this was simulated.
        self._delays: tuple[GraphCluster, list[list[float]]] | None = None
        self._has_changed = False
        self._begin(None)

    def _read(self) -> None:
        if (saved := self._file.read()) is not None:
            self.calibration = Calibration(saved.factors)

    # ---- the calibrated problem -----------------------------------------------------------------------------------

    def calibrated(self, profiled: GraphCluster) -> GraphCluster:
        """A cluster of profiled times with what was learnt of its devices and links.

        Drift is part of that for a device that runs requests. For any other one it counts if it was found since then.
        """
        ids = {device.device_id for device in profiled.devices}
        known = {device.device_id for device in self._profiled.devices} if self._profiled is not None else set()
        if not ids < known:  # not for the devices that would be left after a loss
            self._profiled = profiled
        running = {device.device_id for device in self._plan.devices} if self._plan is not None else set()
        slowdowns = {each: self._slowdown(each) for each in ids - running}
        drifted = {each: now for each, now in slowdowns.items() if now != self._known_slowdowns.get(each, 1.0)}
        return self.calibration.apply(profiled, drifted)

    # ---- requests -------------------------------------------------------------------------------------------------

    @property
    def wants_trace(self) -> bool:
        """Whether the next request should be traced."""
        return self.num_observed % _TRACED_REQUESTS == 1

    def observe(self, plan: GraphPlan, result: RunResult[Arrays], alone_seconds: float | None) -> None:
        """Record a request that succeeded. `alone_seconds`: its duration, if no other one ran at the same time."""
        if plan is not self._plan:
            self._begin(plan)
        if list(map(len, result.segment_seconds)) != self._num_segments:
            return
        self._num_seen += 1
        if self._num_seen == 1:  # a warm-up
            return
        self.num_observed += 1
        if alone_seconds is not None:
            self._latencies.append(alone_seconds)
        self._calibrate(plan, result)

    def _calibrate(self, plan: GraphPlan, result: RunResult[Arrays]) -> None:
        cluster = self._profiled
        ids = {device.device_id for device in plan.devices}
        if cluster is None or not ids <= {device.device_id for device in cluster.devices}:
            return
        if self._delays is None or self._delays[0] is not cluster:
            self._delays = (cluster, segment_delays(self._spec, plan, cluster))
        self.calibration.observe(cluster, plan, result.segment_seconds, self._delays[1])
        self._known_slowdowns |= {each: self._slowdown(each) for each in ids}
        if result.traces and plan.wire.values == "exact":
            for each in measured_transfers(result.traces, result.clock_errors, cluster, plan):
                self.calibration.observe_transfer(*each)
        self._has_changed = True

    def _begin(self, plan: GraphPlan | None) -> None:
        """Begin with the requests of another plan."""
        self._plan = plan
        self._num_seen = self.num_observed = 0
        self._latencies: deque[float] = deque(maxlen=_KEPT_SECONDS)
        self._num_segments = [len(plan.body.segments_of(rank)) for rank in range(plan.num_ranks)] if plan else []
        self._delays = None

    # ---- the deployed plan ----------------------------------------------------------------------------------------

    def num_observed_of(self, plan: GraphPlan) -> int:
        """Requests on this plan that were measured."""
        return self.num_observed if plan is self._plan else 0

    def latency(self, plan: GraphPlan, min_requests: int) -> Latency | None:
        """The latency of this plan; None before so many requests, at least two, have run alone on it."""
        if plan is not self._plan or len(self._latencies) < min_requests:
            return None
        middle = median(self._latencies)
        deviation = median(abs(each - middle) for each in self._latencies)
        return Latency(middle, _ERROR_PER_DEVIATION * deviation / len(self._latencies) ** 0.5)

    # ---- the file -------------------------------------------------------------------------------------------------

    async def save(self) -> None:
        """Write what has changed. Never fails (`DurableFile`)."""
        if self._has_changed:
            self._has_changed = False
            self._file.write(SavedMeasurements(factors=self.calibration.factors).model_dump_json())
        else:
            self._file.retry()
        await self._file.saved()
