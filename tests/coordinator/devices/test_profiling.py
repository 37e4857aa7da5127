"""Profiles for both kinds of model: the cache, drift, and devices that cannot be profiled."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Literal

import pytest
from support.devices import with_telemetry
from support.fleets import FakeFleet, GraphFleet, TransformerFleet
from support.graphs import save_two_branch_model
from support.plans import BERT_LARGE, LLAMA_1B

from coordinator.devices.block_profiling import block_cluster, block_workload
from coordinator.devices.graph_profiling import graph_cluster, graph_workload
from coordinator.devices.other_models import NOTHING_TAKEN, TakenByOthers
from coordinator.devices.profile_cache import Workload
from coordinator.devices.profiling import Profiler
from coordinator.devices.shared_media import Pair
from coordinator.models.graph_file import GraphFile, read_graph_file
from hearth.errors import DeviceLost, NoDevices, UnsupportedWeights
from hearth.plan.profile import ClusterProfile
from hearth.wire.messages import BlocksOf, Gpu, MeasureLink, Message, Profile
from hearth.wire.rpc import Reply

INT4 = LLAMA_1B.model_copy(update={"weights": "int4"})
Kind = Literal["transformer", "graph"]


def probes(fleet: FakeFleet) -> list[bool]:
    """Whether each request for a profile of blocks was for a quick one."""
    subjects = [message.subject for _, message in fleet.asked if isinstance(message, Profile)]
    return [subject.quick for subject in subjects if isinstance(subject, BlocksOf)]


def profiled_on(fleet: FakeFleet) -> str:
    return "".join(device for device, message in fleet.asked if isinstance(message, Profile))


class Case:
    """One kind of model with a fleet, and a profiler that keeps its results in `folder`."""

    def __init__(self, kind: Kind, folder: Path, names: str = "ab") -> None:
        self.kind = kind
        self.folder = folder
        self.lines: list[str] = []
        self.graph: GraphFile | None = None
        self.fleet: FakeFleet = TransformerFleet(names)
        self.workload: Workload[Any] = block_workload(BERT_LARGE, 64)
        if kind == "graph":
            self.graph = read_graph_file(save_two_branch_model(folder / "model.onnx", channels=4), {})
            self.fleet, self.workload = GraphFleet(names, self.graph), graph_workload(self.graph)
        self.profiler = self.restarted()

    def restarted(self) -> Profiler:
        self.profiler = Profiler(self.fleet, self.folder / "profiles", self.lines.append)  # type: ignore[arg-type]
        return self.profiler

    def cluster(self, taken: TakenByOthers = NOTHING_TAKEN) -> Any:
        devices = list(self.fleet.devices.values())
        if self.graph is not None:
            return asyncio.run(graph_cluster(self.profiler, devices, self.graph, self.workload, taken=taken))
        return asyncio.run(block_cluster(self.profiler, devices, self.workload, taken))

    def seconds(self) -> dict[str, float]:
        """Profiled seconds by device."""
        cluster = self.cluster()
        if isinstance(cluster, ClusterProfile):
            return {device.device_id: self.workload.total_seconds(device.blocks) for device in cluster.devices}
        return {device.device_id: sum(row[i] for row in cluster.seconds) for i, device in enumerate(cluster.devices)}


@pytest.mark.parametrize("kind", ["transformer", "graph"])
def test_profile_is_cached_per_device_model_and_settings(kind: Kind, tmp_path: Path) -> None:
    case = Case(kind, tmp_path)
    first = case.seconds()
    assert sorted(profiled_on(case.fleet)) == ["a", "b"]
    case.restarted()
    assert case.seconds() == first
    assert sorted(profiled_on(case.fleet)) == ["a", "b"]
    case.fleet.devices["a"] = with_telemetry(case.fleet.devices["a"], num_threads=3)
    case.seconds()
    assert sorted(profiled_on(case.fleet)) == ["a", "a", "b"]


@pytest.mark.parametrize("kind", ["transformer", "graph"])
def test_links_of_a_cluster_are_those_that_other_deployments_leave(kind: Kind, tmp_path: Path) -> None:
    case = Case(kind, tmp_path)
    sent: dict[Pair, float] = {}
    taken = TakenByOthers(traffic=lambda: sent)

    def rates() -> dict[Pair, float]:
        cluster = case.cluster(taken)
        links = cluster.links if isinstance(cluster, ClusterProfile) else cluster.links()
        return {(link.source, link.target): link.bytes_per_second for link in links}

    alone = rates()
    sent["a", "b"] = 0.4 * alone["a", "b"]
    assert rates() == {("a", "b"): pytest.approx(0.6 * alone["a", "b"]), ("b", "a"): alone["b", "a"]}
    case.profiler.forget_links("ab")  # they are measured again with that traffic, which counts once
    assert rates() == alone
    sent.clear()
    assert rates()["a", "b"] == pytest.approx(1.4 * alone["a", "b"])


@pytest.mark.parametrize("kind", ["transformer", "graph"])
def test_drift_factor_scales_measured_seconds(kind: Kind, tmp_path: Path) -> None:
    case = Case(kind, tmp_path)
    before = case.seconds()
    case.profiler.multiply_slowdown("a", 2.0)
    case.profiler.multiply_slowdown("a", 1.5)
    assert case.seconds() == {"a": pytest.approx(3 * before["a"]), "b": before["b"]}
    asyncio.run(case.profiler.remeasure(case.fleet.devices["a"], case.workload))
    assert profiled_on(case.fleet) in ("aba", "baa")
    assert case.profiler.slowdown("a") == 1.0
    assert case.seconds() == before


@pytest.mark.parametrize("kind", ["transformer", "graph"])
def test_failing_device_is_left_out_and_last_failure_is_raised(kind: Kind, tmp_path: Path) -> None:
    case = Case(kind, tmp_path)
    working, lost = case.fleet.call, {"b"}

    async def call(device_id: str, message: Message, *rest: Any, **named: Any) -> Reply:
        if device_id in lost and isinstance(message, Profile):
            raise DeviceLost(device=device_id, reason="of all times now")
        return await working(device_id, message, *rest, **named)

    case.fleet.call = call  # type: ignore[method-assign]
    assert set(case.seconds()) == {"a"}
    assert any(line.startswith("b is left out: The device b was lost") for line in case.lines)
    lost.add("a")
    case.folder = tmp_path / "other"
    case.restarted()
    with pytest.raises(DeviceLost):
        case.seconds()
    case.fleet.devices.clear()
    with pytest.raises(NoDevices):
        case.seconds()


def int4(fleet: TransformerFleet, folder: Path, lines: list[str]) -> ClusterProfile:
    profiler = Profiler(fleet, folder, lines.append)  # type: ignore[arg-type]
    return asyncio.run(block_cluster(profiler, list(fleet.devices.values()), block_workload(INT4, 64)))


def with_gpu(names: str, gpus: str, version: tuple[int, int] = (7, 2)) -> TransformerFleet:
    """A fleet of which some compute on a GPU of this compute capability."""
    fleet = TransformerFleet(names)
    for name in gpus:
        gpu = Gpu(name="x", kind="cuda", memory_total_bytes=8, memory_free_bytes=4, compute_capability=version)
        fleet.devices[name] = with_telemetry(fleet.devices[name], compute_device="cuda", gpu=gpu)
    return fleet


def test_gpu_without_int4_is_left_out_and_named(tmp_path: Path) -> None:
    fleet, lines = with_gpu("ag", "g"), []
    assert [device.name for device in int4(fleet, tmp_path, lines).devices] == ["a"]
    assert profiled_on(fleet) == "a"
    (notice,) = [line for line in lines if "left out" in line]
    assert notice.startswith("g is left out: g cannot keep weights as int4")
    assert "`--weights int8`" in notice


def test_gpu_with_int4_is_used(tmp_path: Path) -> None:
    fleet, lines = with_gpu("ag", "g", version=(8, 7)), []
    assert [device.name for device in int4(fleet, tmp_path, lines).devices] == ["a", "g"]
    assert not any("left out" in line for line in lines)


def test_no_device_with_int4_raises_unsupported_weights(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedWeights, match="g cannot"):
        int4(with_gpu("g", "g"), tmp_path, [])


@pytest.mark.parametrize("jump_seconds", [0, 365 * 86400, -365 * 86400])
def test_cached_links_are_measured_again_after_a_jump_of_the_clock(
    jump_seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("transformer", tmp_path)
    devices = list(case.fleet.devices.values())
    links = asyncio.run(case.profiler.measure_links(devices))
    num_measured = len(measured_links(case.fleet))
    now = time.time() + jump_seconds
    monkeypatch.setattr(time, "time", lambda: now)
    assert asyncio.run(case.restarted().measure_links(devices)) == links
    assert len(measured_links(case.fleet)) == (2 if jump_seconds else 1) * num_measured


def equals(case: Case, **telemetry: Any) -> None:
    """Name the processor of all devices; `telemetry`: what is different on the device b."""
    for name, device in case.fleet.devices.items():
        changes = {"cpu_model": "N100", "host_id": "one", **(telemetry if name == "b" else {})}
        case.fleet.devices[name] = with_telemetry(device, **changes)


def provisional(case: Case) -> Profiler:
    case.profiler = Profiler(case.fleet, case.folder / "profiles", case.lines.append, provisional=True)  # type: ignore[arg-type]
    return case.profiler


def names_of_provisional(case: Case) -> str:
    return "".join(
        name for name, device in case.fleet.devices.items() if case.profiler.is_provisional(device, case.workload)
    )


def test_device_is_probed_and_stands_for_equal_ones_until_they_are_measured(tmp_path: Path) -> None:
    case = Case("transformer", tmp_path, "abc")
    equals(case)
    provisional(case)
    first = case.seconds()
    assert (profiled_on(case.fleet), names_of_provisional(case)) == ("a", "abc")
    assert case.seconds() == first  # not probed again
    assert probes(case.fleet) == [True]
    assert first["a"] == first["b"] == first["c"]

    async def measure(name: str, disturbed: bool) -> bool:
        device = case.fleet.devices[name]
        return await case.profiler.measure_provisional(device, case.workload, lambda: disturbed)

    case.profiler.multiply_slowdown("b", 2.0)  # against the times of a, which are not its own
    assert not asyncio.run(measure("b", disturbed=True))
    assert (names_of_provisional(case), case.profiler.slowdown("b")) == ("abc", 2.0)
    assert asyncio.run(measure("b", disturbed=False))
    assert (names_of_provisional(case), case.profiler.slowdown("b")) == ("ac", 1.0)
    assert probes(case.fleet) == [True, False, False]
    provisional(case)
    case.seconds()  # the others have the profile of b
    assert (profiled_on(case.fleet), names_of_provisional(case)) == ("abb", "ac")


@pytest.mark.parametrize(
    "change",
    [
        {"cpu_model": "N200"}, {"cpu_model": ""}, {"num_cores": 2}, {"num_threads": 2}, {"memory_total_bytes": 4 << 30},
        {"compute_device": "cuda"},
    ],
)  # fmt: skip
def test_profile_is_not_that_of_other_hardware(change: dict[str, Any], tmp_path: Path) -> None:
    case = Case("transformer", tmp_path)
    equals(case, **change)
    provisional(case)
    case.seconds()
    assert (profiled_on(case.fleet), names_of_provisional(case)) == ("ab", "ab")


@pytest.mark.parametrize("kind", ["transformer", "graph"])
def test_only_transformers_have_provisional_profiles(kind: Kind, tmp_path: Path) -> None:
    case = Case(kind, tmp_path)
    equals(case)
    case.seconds()  # not asked for
    assert profiled_on(case.fleet) == "ab"
    case.folder = tmp_path / "other"
    provisional(case)
    case.seconds()  # the times learnt of a graph are factors of its profile, which must not change
    assert profiled_on(case.fleet) == "aba" + "b" * (kind == "graph")


def test_old_links_are_provisional_until_they_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("transformer", tmp_path, "abc")
    devices = list(case.fleet.devices.values())
    links = asyncio.run(case.profiler.measure_links(devices))
    now = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: now)
    profiler = provisional(case)
    case.fleet.link_factor = 2.0
    assert asyncio.run(profiler.measure_links(devices)) == links
    assert len(measured_links(case.fleet)) == len(links) == len(profiler.provisional_links)
    asyncio.run(profiler.measure_provisional_links(devices[:2]))
    assert profiler.provisional_links == {("a", "c"), ("c", "a"), ("b", "c"), ("c", "b")}
    assert profiler.links["a", "b"].bytes_per_second == links["a", "b"].bytes_per_second / 2
    case.fleet.kill("c")
    asyncio.run(profiler.measure_provisional_links(devices))
    assert not profiler.provisional_links
    assert profiler.links.keys() == {("a", "b"), ("b", "a")}


def measured_links(fleet: FakeFleet) -> list[MeasureLink]:
    return [message for _, message in fleet.asked if isinstance(message, MeasureLink)]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"source": "a"}', "\N{SNOWMAN}"])
def test_damaged_cache_files_are_measured_again(content: str, tmp_path: Path) -> None:
    case = Case("transformer", tmp_path)
    first = case.seconds()
    for path in (tmp_path / "profiles").iterdir():
        path.write_text(content)
    case.restarted()
    assert case.seconds() == first
    assert sorted(profiled_on(case.fleet)) == ["a", "a", "b", "b"]


async def test_link_that_was_found_cut_is_not_measured_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("transformer", tmp_path)
    devices = list(case.fleet.devices.values())
    cut = (devices[0].device_id, devices[1].device_id)

    before = await case.profiler.measure_links(devices)
    num_measured = len(measured_links(case.fleet))
    case.profiler.forget_links(cut)
    case.profiler.link_is_cut(*cut)
    both = {cut, cut[::-1]}
    assert (await case.profiler.measure_links(devices)).keys() == before.keys() - both
    assert case.profiler.failed_links == both
    assert len(measured_links(case.fleet)) == num_measured
    monkeypatch.setattr("coordinator.devices.profiling._CUT_SECONDS", 0.0)
    assert await case.profiler.measure_links(devices) == before
    assert not case.profiler.failed_links
