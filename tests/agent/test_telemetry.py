"""Memory under cgroups, budgets, disks and GPUs of machines shown by their files."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import pytest

pytest.importorskip("psutil")

from agent.config import AgentSettings, load_settings
from agent.gpu import GpuReader
from agent.telemetry import TelemetryReader, host_id, memory, memory_budget, num_threads
from hearth.errors import BadSetting
from hearth.messages import Gpu

MEGABYTE = 1_000_000


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_page_cache_of_a_cgroup_is_not_in_use(tmp_path: Path) -> None:
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


def test_limits_of_all_enclosing_cgroups_hold(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/unit/leaf\n",
            "sys/fs/cgroup/slice/memory.max": "500000000",
            "sys/fs/cgroup/slice/memory.current": "450000000",  # mostly by other units
            "sys/fs/cgroup/slice/unit/memory.max": "300000000",
            "sys/fs/cgroup/slice/unit/memory.current": "10000000",
            "sys/fs/cgroup/slice/unit/leaf/memory.max": "max",
        },
    )
    assert memory(root) == (300 * MEGABYTE, 50 * MEGABYTE)


def test_a_limit_above_all_memory_promises_all_memory_only() -> None:
    assert memory_budget(4 << 30, 3 << 30, 100 << 30, None) == 4 << 30


class OneCuda(GpuReader):
    """A GPU with 8 GiB, 6 of them free."""

    @property
    def compute_device(self) -> str:  # type: ignore[override]
        return "cuda"

    def read(self) -> Gpu:
        return Gpu(name="x", kind="cuda", memory_total_bytes=8 << 30, memory_free_bytes=6 << 30)


@pytest.mark.parametrize(("percent", "expected"), [(50.0, 4 << 30), (None, (6 << 30) - int((8 << 30) * 0.10))])
def test_the_budget_of_a_gpu_is_a_share_of_its_own_memory(percent: float | None, expected: int, tmp_path: Path) -> None:
    settings = AgentSettings(
        name="x", state_dir=tmp_path, store_dir=tmp_path, key_path=tmp_path / "k", memory_percent=percent
    )
    assert TelemetryReader(settings, OneCuda("cuda")).read(now=0.0).memory_budget_bytes == expected


@pytest.mark.parametrize(
    ("cores", "threads", "percent", "expected"),
    [(8, None, None, 8), (8, None, 50, 4), (8, 6, 50, 6), (4, None, 99, 3), (4, None, 1, 1), (1, None, 50, 1)],
)
def test_a_share_of_the_cores_is_whole_threads_and_at_least_one(
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
def test_a_share_of_the_machine_holds_for_what_has_no_limit_of_its_own(
    limits: dict[str, str], budget: int, tmp_path: Path
) -> None:
    variables = {f"HEARTH_AGENT_{name.upper()}": value for name, value in limits.items()}
    settings = load_settings(argparse.Namespace(), {"HOME": str(tmp_path), **variables})
    found = TelemetryReader(settings, OneCuda("cuda")).read(now=0.0)
    assert found.memory_budget_bytes == budget
    assert found.num_threads == (1 if "threads" in limits else max(1, found.num_cores // 4))


@pytest.mark.parametrize("percent", ["0", "0.5", "101", "half"])
def test_a_share_that_is_none_is_refused(percent: str, tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="--percent"):
        load_settings(argparse.Namespace(percent=percent), {"HOME": str(tmp_path)})


def test_a_deleted_store_folder_does_not_end_telemetry(tmp_path: Path) -> None:
    store = tmp_path / "a" / "b"
    settings = AgentSettings(name="x", state_dir=tmp_path, store_dir=store, key_path=tmp_path / "k")
    free = shutil.disk_usage(tmp_path).free
    assert TelemetryReader(settings, GpuReader("cpu")).read(now=0.0).disk_free_bytes == pytest.approx(free, rel=0.2)


@pytest.mark.parametrize("unset", ["", "uninitialized\n"])
def test_a_machine_id_that_is_not_set_yet_names_no_machine(unset: str, tmp_path: Path) -> None:
    without = host_id(tmp_path / "none")
    assert host_id(write(tmp_path / "unset", {"etc/machine-id": unset})) == without
    assert host_id(write(tmp_path / "set", {"etc/machine-id": "0123456789abcdef0123456789abcdef\n"})) != without


@pytest.mark.parametrize("name", ["57000000.gpu", "17000000.gv11b", "17000000.ga10b", "17000000.gpu"])
def test_the_load_of_every_jetsons_gpu_is_found(name: str, tmp_path: Path) -> None:
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
    assert gpu is not None
    assert gpu.load_fraction == 0.37
