"""Metrics in Prometheus's text format: counters and histograms of events, and gauges that are read when they are asked for.

All counters begin at zero with the coordinator's process, and so does its leadership: Prometheus takes that for a restart.
They are not saved: what a file held after a power cut could be less than what was scraped before, and then too much is counted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

import hearth
from coordinator.devices.fleet import Fleet
from coordinator.devices.profiling import Profiler
from coordinator.devices.registry import Device
from coordinator.serve.events.samples import sample_of
from coordinator.serve.model.controller import Controller
from coordinator.serve.model.lifecycle_text import STARTED, WITHOUT_LOSS
from hearth.plan.plan import is_graph_plan, is_transformer_plan
from hearth.wire import messages as wire

CONTENT_TYPE: str = CONTENT_TYPE_PLAIN_0_0_4

# Upper limits of histograms, in seconds.
_REQUEST_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_QUEUE_SECONDS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)


class _Totals(NamedTuple):
    """Counters of a deployment's workers. They begin at zero with each plan."""

    raw_bytes: int = 0
    sent_bytes: int = 0
    dropped: int = 0

    @classmethod
    def of(cls, controller: Controller) -> _Totals:
        deployment = controller.deployment
        if deployment is None:
            return cls()
        return cls(deployment.wire.raw_bytes, deployment.wire.sent_bytes, deployment.dropped_messages)


class HomeMetrics:
    """All metrics of a coordinator. `count` is called with each event."""

    def __init__(self, fleet: Fleet, profiler: Profiler, controllers: Mapping[str, Controller]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._registry.register(_Gauges(fleet, profiler, controllers))
        model = ["model"]
        self._requests = self._counter("requests", "Requests that have ended.", ["api", "model", "outcome"])
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that were answered.", model)
        self._generated_tokens = self._counter("generated_tokens", "Tokens of answers.", model)
        self._cache_queries = self._counter(
            "prefix_cache_queries", "Tokens of prompts that were looked up in the prefix cache.", model
        )
        self._cache_hits = self._counter("prefix_cache_hits", "Of these, tokens that were found.", model)
        self._replans = self._counter("replans", "Changes of plan, by what ended the plan before.", ["reason"])
        self._recoveries = self._counter("recoveries", "Changes of plan after the loss of one.", [])
        self._seconds = self._histogram(
            "request_duration_seconds", "From the arrival of a request to its end.", _REQUEST_SECONDS
        )
        self._queue = self._histogram("request_queue_seconds", "Time of a request in the queue.", _QUEUE_SECONDS)
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From the arrival of a request to its first token.", _FIRST_TOKEN_SECONDS
        )
        self._token = self._histogram(
            "time_per_output_token_seconds", "Mean time of a later token of an answer.", _TOKEN_SECONDS
        )

    def count(self, event: wire.Event) -> None:
        """Count an event."""
        match event:
            case wire.RequestEnded():
                self._count_request(event)
            case wire.PlanChanged() if event.reason != STARTED:
                self._replans.labels(event.reason).inc()
                if event.reason not in WITHOUT_LOSS:
                    self._recoveries.inc()

    def text(self) -> bytes:
        """All metrics now."""
        return generate_latest(self._registry)

    def _count_request(self, ended: wire.RequestEnded) -> None:
        model = ended.deployment
        self._requests.labels(ended.operation, model, ended.outcome).inc()
        if ended.outcome != "served":
            return
        self._seconds.labels(model).observe(ended.seconds)
        queued = ended.queued_seconds or 0.0
        self._queue.labels(model).observe(queued)
        self._prompt_tokens.labels(model).inc(ended.num_prompt_tokens)
        if ended.operation != "generate":
            return
        self._generated_tokens.labels(model).inc(ended.num_tokens)
        self._cache_queries.labels(model).inc(ended.num_prompt_tokens)
        self._cache_hits.labels(model).inc(ended.num_cached_tokens)
        if ended.first_token_seconds is not None and ended.num_tokens:
            self._first_token.labels(model).observe(queued + ended.first_token_seconds)
        if ended.tokens_per_second:
            self._token.labels(model).observe(1 / ended.tokens_per_second)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"hearth_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, limits: Iterable[float]) -> Histogram:
        return Histogram(f"hearth_{name}", text, ["model"], buckets=tuple(limits), registry=self._registry)


class _Gauges(Collector):
    """What is read from the parts of the coordinator at each scrape; it asks no device."""

    def __init__(self, fleet: Fleet, profiler: Profiler, controllers: Mapping[str, Controller]) -> None:
        self._fleet = fleet
        self._profiler = profiler
        self._controllers = controllers
        # Counters of the workers, summed over all plans: by deployment, those of ended plans and the newest of this one.
        self._ended: dict[str, _Totals] = {}
        self._newest: dict[str, tuple[int, _Totals]] = {}  # with the plan's epoch

    def describe(self) -> Iterable[Metric]:
        """Nothing is read at the registration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield _gauge("build_info", "The coordinator's version.", ["version"], {(hearth.__version__,): 1})
        yield from self._of_deployments()
        yield from self._of_devices()
        yield from self._of_links()

    def _of_deployments(self) -> Iterator[Metric]:
        plans, running, waiting, steps = {}, {}, {}, {}
        for controller in list(self._controllers.values()):
            name = controller.name
            admission = controller.requests.admission
            running[(name,)] = admission.num_running
            waiting[(name,)] = admission.num_waiting
            if (plan := controller.plan) is None or controller.deployment is None:
                continue
            if is_transformer_plan(plan):
                plans[name, plan.body.title, getattr(controller.goal, "weights", "")] = 1
                if plan.model.causal:
                    steps[name, "decode", "predicted"] = plan.predicted.decode_seconds
            elif is_graph_plan(plan):
                plans[name, plan.planner, ""] = 1
            steps[name, "step", "predicted"] = plan.predicted.latency_seconds
            if (seconds := controller.requests.last_latency_seconds) is not None:
                steps[name, "request", "measured"] = seconds
        yield _gauge("model_info", "The plan of a model.", ["model", "strategy", "weights"], plans)
        yield _gauge("requests_running", "Requests on the devices.", ["model"], running)
        yield _gauge("requests_waiting", "Requests in the queue.", ["model"], waiting)
        yield _gauge(
            "step_seconds",
            "Predicted: one step of a transformer, one token of a decoder, one request of a graph. Measured: the last request.",
            ["model", "kind", "source"],
            steps,
        )
        totals = self._totals()
        wire_bytes = CounterMetricFamily(
            "hearth_wire_bytes", "Activations between devices: before and after their encoding.", labels=["form"]
        )
        wire_bytes.add_metric(["raw"], sum(each.raw_bytes for each in totals))
        wire_bytes.add_metric(["sent"], sum(each.sent_bytes for each in totals))
        yield wire_bytes
        yield CounterMetricFamily(
            "hearth_dropped_messages",
            "Messages between workers that were dropped.",
            sum(each.dropped for each in totals),
        )

    def _totals(self) -> list[_Totals]:
        """Of each deployment, over all its plans: never less than at the last call."""
        for name, controller in list(self._controllers.items()):
            now = _Totals.of(controller)
            epoch = controller.deployment.epoch if controller.deployment is not None else -1
            before_epoch, before = self._newest.get(name, (epoch, now))
            if epoch == before_epoch:  # a worker of the same plan that has started again counts from zero
                self._newest[name] = epoch, _Totals(*map(max, before, now))
            else:
                self._ended[name] = _Totals(*map(sum, zip(self._ended.get(name, _Totals()), before, strict=True)))
                self._newest[name] = epoch, now
        ended = [*self._ended.values()]
        return [*ended, *(newest for _, newest in self._newest.values())]

    def _of_devices(self) -> Iterator[Metric]:
        label = ["device"]
        up: dict[tuple[str, ...], float] = {}
        samples: dict[tuple[str, ...], wire.DeviceSampled] = {}
        for name, device in _by_name(self._fleet.devices.values()).items():
            up[name,] = float(device.health in ("alive", "suspect"))
            if up[name,] and (sample := sample_of(device)) is not None:
                samples[name,] = sample
        yield _gauge("device_up", "Whether a device answers.", label, up)
        for sensor in wire.SENSORS:
            known = {key: read for key, each in samples.items() if (read := getattr(each, sensor.field)) is not None}
            yield _gauge(f"device_{sensor.metric}", sensor.help, label, known)

    def _of_links(self) -> Iterator[Metric]:
        names = {device.device_id: name for name, device in _by_name(self._fleet.devices.values()).items()}
        rates, times = {}, {}
        for (source, target), link in list(self._profiler.links.items()):
            with contextlib.suppress(KeyError):  # a device that is no longer known
                pair = names[source], names[target]
                rates[pair] = link.bytes_per_second
                times[pair] = link.round_trip_seconds
        labels = ["source", "target"]
        yield _gauge("link_bytes_per_second", "Measured rate of a link.", labels, rates)
        yield _gauge("link_round_trip_seconds", "Measured round trip of a link.", labels, times)


def _by_name(devices: Iterable[Device]) -> dict[str, Device]:
    """Devices by name; of several with one name, each but the first with its id, so that no series occurs twice."""
    named: dict[str, Device] = {}
    for device in sorted(devices, key=lambda each: each.device_id):
        name = device.name if device.name not in named else f"{device.name} ({device.device_id[:8]})"
        named[name] = device
    return named


def _gauge(name: str, text: str, labels: Sequence[str], values: Mapping[Any, float]) -> GaugeMetricFamily:
    """A gauge. `values` are by the values of the labels, a tuple."""
    family = GaugeMetricFamily(f"hearth_{name}", text, labels=labels)
    for label_values, value in values.items():
        family.add_metric(list(label_values), value)
    return family
