"""Memory under cgroups, memory budgets, disks and GPUs, read from file trees of example machines."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("psutil")

from agent.daemon import gpu as gpu_module
from agent.daemon.config import AgentSettings, load_agent_settings
from agent.daemon.gpu import GpuReader, Probed, free_memory_bytes, parse_probe, tegra_model, with_context
from agent.daemon.telemetry import TelemetryReader, cpu_model, host_id, memory, memory_budget, num_threads, temperature
from hearth.errors import BadSetting
from hearth.wire.messages import Gpu

MEGABYTE = 1_000_000


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_cgroup_page_cache_counts_as_available(tmp_path: Path) -> None:
    limits = {"memory.max": "500000000", "memory.current": "480000000"}
    stat = "anon 100000000\nfile 380000000\ninactive_file 350000000\nactive_file 30000000\n"
    v2 = write(tmp_path / "v2", {f"sys/fs/cgroup/{k}": v for k, v in {**limits, "memory.stat": stat}.items()})
    assert memory(v2) == (500 * MEGABYTE, 400 * MEGABYTE)
    v1 = write(
        tmp_path / "v1",
        {
            "proc/self/cgroup": "4:memory:/a\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "500000000",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "480000000",
            "sys/fs/cgroup/memory/a/memory.stat": "inactive_file 0\nactive_file 0\n"
            "total_inactive_file 350000000\ntotal_active_file 30000000\n",
        },
    )
    assert memory(v1) == (500 * MEGABYTE, 400 * MEGABYTE)


def test_limits_of_all_ancestor_cgroups_apply(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/unit/leaf\n",
            "sys/fs/cgroup/slice/memory.max": "500000000",
            "sys/fs/cgroup/slice/memory.current": "450000000",  # mostly other units of the slice
            "sys/fs/cgroup/slice/unit/memory.max": "300000000",
            "sys/fs/cgroup/slice/unit/memory.current": "10000000",
            "sys/fs/cgroup/slice/unit/leaf/memory.max": "max",
        },
    )
    assert memory(root) == (300 * MEGABYTE, 50 * MEGABYTE)


def settings_in(folder: Path, **limits: Any) -> AgentSettings:
    return AgentSettings(name="x", state_dir=folder, store_dir=folder, key_path=folder / "k", **limits)


class OneCuda(GpuReader):
    """A GPU with 8 GiB, of which 6 GiB are free."""

    @property
    def compute_device(self) -> str:  # type: ignore[override]
        return "cuda"

    def read(self, idle: bool = False) -> Gpu:
        return Gpu(name="x", kind="cuda", memory_total_bytes=8 << 30, memory_free_bytes=6 << 30)


@pytest.mark.parametrize(("percent", "expected"), [(50.0, 4 << 30), (None, (6 << 30) - int((8 << 30) * 0.10))])
def test_gpu_budget_is_a_share_of_gpu_memory(percent: float | None, expected: int, tmp_path: Path) -> None:
    settings = settings_in(tmp_path, memory_percent=percent)
    assert TelemetryReader(settings, OneCuda("cuda")).read(now=0.0).memory_budget_bytes == expected


@pytest.mark.parametrize(
    ("cores", "threads", "percent", "expected"),
    [(8, None, None, 8), (8, None, 50, 4), (8, 6, 50, 6), (4, None, 99, 3), (4, None, 1, 1), (1, None, 50, 1)],
)
def test_percent_of_cores_rounds_down_to_at_least_one_thread(
    cores: int, threads: int | None, percent: float | None, expected: int
) -> None:
    assert num_threads(cores, threads, percent) == expected


@pytest.mark.parametrize(
    ("limits", "budget"),
    [
        ({"percent": "25%"}, 2 << 30),
        ({"percent": "25", "threads": "1"}, 2 << 30),
        ({"percent": "25", "memory_bytes": "3GiB"}, 3 << 30),
        ({"percent": "25", "memory_percent": "50"}, 4 << 30),
    ],
)
def test_percent_applies_where_no_specific_limit_is_set(limits: dict[str, str], budget: int, tmp_path: Path) -> None:
    variables = {f"HEARTH_AGENT_{name.upper()}": value for name, value in limits.items()}
    settings = load_agent_settings(argparse.Namespace(), {"HOME": str(tmp_path), **variables})
    found = TelemetryReader(settings, OneCuda("cuda")).read(now=0.0)
    assert found.memory_budget_bytes == budget
    assert found.num_threads == (1 if "threads" in limits else max(1, found.num_cores // 4))


@pytest.mark.parametrize("percent", ["0", "0.5", "101", "half"])
def test_percent_out_of_range_is_rejected(percent: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="--percent"):
        load_agent_settings(argparse.Namespace(percent=percent), {"HOME": str(tmp_path)})


def test_telemetry_works_without_the_store_folder(tmp_path: Path) -> None:
    settings = settings_in(tmp_path / "a" / "b")
    free = shutil.disk_usage(tmp_path).free
    assert TelemetryReader(settings, GpuReader("cpu")).read(now=0.0).disk_free_bytes == pytest.approx(free, rel=0.2)


@pytest.mark.parametrize("unset", ["", "uninitialized\n"])
def test_unset_machine_id_is_ignored(unset: str, tmp_path: Path) -> None:
    without = host_id(tmp_path / "none")
    assert host_id(write(tmp_path / "unset", {"etc/machine-id": unset})) == without
    assert host_id(write(tmp_path / "set", {"etc/machine-id": "0123456789abcdef0123456789abcdef\n"})) != without


@pytest.mark.parametrize("name", ["57000000.gpu", "17000000.gv11b", "17000000.ga10b", "17000000.gpu"])
def test_gpu_load_is_read_on_all_jetson_models(name: str, tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/device-tree/model": "NVIDIA Jetson\0",
            "proc/device-tree/compatible": "nvidia,tegra234\0",
            f"sys/class/devfreq/{name}/device/load": "370\n",
            "sys/class/devfreq/15480000.nvdec/device/load": "990\n",
        },
    )
    gpu = GpuReader("cpu", root).read()
    assert gpu.load_fraction == 0.37


def test_board_model_gpu_and_temperature_are_read(tmp_path: Path) -> None:
    jetson = write(
        tmp_path,
        {
            "proc/cpuinfo": "processor : 0\nBogoMIPS : 62.50\n",
            "proc/device-tree/model": "NVIDIA Jetson Orin Nano\0",
            "proc/device-tree/compatible": "nvidia,p3768\0nvidia,tegra234\0",
            "sys/devices/gpu.0/load": "250\n",
            "sys/class/thermal/thermal_zone0/temp": "48500\n",
            "sys/class/thermal/thermal_zone1/temp": "51250\n",
            "sys/class/thermal/thermal_zone2/temp": "-256000\n",
        },
    )
    assert cpu_model(jetson) == "NVIDIA Jetson Orin Nano"
    assert tegra_model(jetson) == "NVIDIA Jetson Orin Nano"
    assert temperature(jetson) == 51.25
    gpu = GpuReader("cpu", jetson).read()
    assert (gpu.kind, gpu.load_fraction) == ("tegra", 0.25)
    assert temperature(tmp_path / "nothing") is None


def test_pc_is_named_by_its_cpu_model(tmp_path: Path) -> None:
    assert cpu_model(write(tmp_path, {"proc/cpuinfo": "model name\t: Intel(R) N100\n"})) == "Intel(R) N100"
    assert tegra_model(tmp_path) is None


V1, V2 = "sys/fs/cgroup/memory/", "sys/fs/cgroup/"


@pytest.mark.parametrize(
    ("limit", "usage", "membership"),
    [
        (f"{V2}memory.max", f"{V2}memory.current", ""),
        (f"{V1}memory.limit_in_bytes", f"{V1}memory.usage_in_bytes", ""),
        (f"{V2}a/b/memory.max", f"{V2}a/b/memory.current", "0::/a/b\n"),
        (f"{V1}x/memory.limit_in_bytes", f"{V1}x/memory.usage_in_bytes", "3:cpu,memory:/x\n"),
    ],
)
def test_cgroup_limit_is_reported_as_total_memory(limit: str, usage: str, membership: str, tmp_path: Path) -> None:
    root = write(tmp_path, {limit: "536870912\n", usage: "136870912\n", "proc/self/cgroup": membership})
    assert memory(root) == (512 << 20, 400_000_000)


@pytest.mark.parametrize(
    ("limit_bytes", "percent", "expected"),
    [
        (None, None, 6 << 30),
        (1 << 30, None, 1 << 30),
        (100 << 30, None, 10 << 30),
        (None, 50.0, 5 << 30),
        (1 << 30, 50.0, 1 << 30),
    ],
)
def test_memory_budget_is_limit_or_free_memory_minus_reserve(
    limit_bytes: int | None, percent: float | None, expected: int
) -> None:
    assert memory_budget(10 << 30, 7 << 30, limit_bytes, percent) == expected


def test_telemetry_of_this_machine(tmp_path: Path) -> None:
    telemetry = TelemetryReader(settings_in(tmp_path, threads=3), GpuReader("cpu")).read(now=5.0)
    assert telemetry.num_threads == 3
    assert 0 < telemetry.memory_available_bytes <= telemetry.memory_total_bytes
    assert telemetry.clock_unix_seconds == 5.0
    assert telemetry.cpu_model


def test_cuda_without_a_gpu_is_a_bad_setting() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU here")
    with pytest.raises(BadSetting, match=r"no CUDA device here: .*(torch|CUDA|GPU)"):
        asyncio.run(GpuReader("cuda").probe())


def test_device_with_a_gpu_that_torch_does_not_use_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver is there, and torch is a build for the CPU, for example."""
    asked = []

    async def probed() -> Probed:
        asked.append(1)
        return Probed(None, "torch 2.13.0+cpu is a build for the CPU only")

    monkeypatch.setattr(gpu_module, "probe_cuda", probed)
    (tmp_path / "dev").mkdir()
    for wanted, has_driver, says in (
        ("auto", False, ""), ("auto", True, "torch 2.13.0+cpu is a build for the CPU only"), ("cpu", True, ""),
    ):  # fmt: skip
        if has_driver:
            (tmp_path / "dev" / "nvidiactl").touch()
        gpu = GpuReader(wanted, tmp_path)  # type: ignore[arg-type]
        caplog.clear()
        asyncio.run(gpu.probe())
        telemetry = TelemetryReader(settings_in(tmp_path), gpu).read(now=0.0)
        assert (telemetry.compute_device, telemetry.gpu_problem) == ("cpu", says)
        assert [record.levelname for record in caplog.records] == (["WARNING"] if says else [])
    assert asked == [1]


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (b'{"gpu": null, "problem": "the driver is too old\\nsee the web"}', "the driver is too old"),
        (b'{"gpu": null, "problem": "' + b"x" * 999 + b'"}', "x" * 256),
        (b'{"gpu": {"name": "x"}, "problem": ""}', "the probe's answer cannot be read: 'uuid'"),
        (b"", "the probe's answer cannot be read"),
    ],
)
def test_problem_of_a_probe_is_one_short_line(output: bytes, problem: str) -> None:
    probed = parse_probe(output)
    assert probed.gpu is None
    assert probed.problem.startswith(problem)
    assert "\n" not in probed.problem
    assert len(probed.problem) <= 256


def test_free_memory_of_a_gpu_is_read_again_while_no_worker_holds_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program may have taken memory since the start; with a worker, its own part would count as taken."""
    found = {
        "name": "RTX", "memory_total_bytes": 8 << 30, "memory_free_bytes": 7 << 30, "compute_capability": [8, 6],
        "uuid": "3e5f",
    }  # fmt: skip
    gpu = GpuReader("auto")
    free = {"3e5f": 7 << 30 | 1 << 29}  # half a gigabyte more than in the probe, whose CUDA context has ended
    monkeypatch.setattr(gpu_module, "free_memory_bytes", free.get)
    gpu._probed = with_context(parse_probe(json.dumps({"gpu": found, "problem": ""}).encode()))
    free["3e5f"] = 5 << 30 | 1 << 29
    if gpu.compute_device == "cpu" or tegra_model() is not None:
        pytest.skip("a Jetson's GPU shares the system's memory")
    free_bytes = []
    for idle in (False, True, False):
        now = gpu.read(idle)
        free_bytes.append(now.memory_free_bytes >> 30)
    assert free_bytes == [7, 5, 5]
    free.clear()  # the driver does not say
    after = gpu.read(idle=True)
    assert after.memory_free_bytes >> 30 == 5


def test_free_memory_without_a_driver_is_unknown() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU here")
    assert free_memory_bytes("3e5f") is None
