"""The times of kernels are kept with the profiles, for `hearth devices --kernels`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.devices import ready_device, with_telemetry
from support.plans import LLAMA_1B, device_profile
from typer.testing import CliRunner

from coordinator.cli.app import app
from coordinator.devices.block_profiling import block_workload, kept_kernel_tables
from coordinator.devices.profile_cache import ProfileCache
from hearth.plan.kernels import KernelTime

SPEC = LLAMA_1B.model_copy(update={"weights": "int4"})
TIMES = tuple(
    KernelTime(
        num_outputs=64, num_inputs=32, rows=rows, layout="torch", kernel=kernel, seconds=seconds, bytes_per_weight=0.625
    )
    for kernel, by_rows in (("torch", {1: 1e-3, 16: 8e-3}), ("expand-bfloat16", {1: 5e-3, 16: 6e-3}))
    for rows, seconds in by_rows.items()
)


def keep_profile(folder: Path, name: str, processor: str, deterministic: bool = False) -> None:
    device = with_telemetry(ready_device(name), cpu_model=processor)
    blocks = device_profile(0, 1.0, SPEC).blocks.model_copy(update={"kernels": TIMES})
    workload = block_workload(SPEC, 64, deterministic)
    cache = ProfileCache(folder)
    cache.keep_result(device, workload, blocks)
    assert cache.result(device, workload) == blocks  # the description is ignored


def test_one_table_for_each_class_of_device_and_format(tmp_path: Path) -> None:
    (tmp_path / "blocks-of-another-version.json").write_text("{}")
    for name, processor in (("a", "N100"), ("b", "N100"), ("c", "A76")):
        keep_profile(tmp_path, name, processor)
    keep_profile(tmp_path, "c", "A76", deterministic=True)
    tables = kept_kernel_tables(tmp_path)
    assert [(each.measured_on.processor, each.subject.deterministic) for each in tables] == [
        ("N100", False), ("A76", False), ("A76", True),
    ]  # fmt: skip
    assert [len({name for choice in each.choices for name in choice.kernels}) for each in tables] == [2, 2, 1]


def test_command_shows_times_and_marks_the_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTH_COORDINATOR_STATE_DIR", str(tmp_path))
    none = CliRunner().invoke(app, ["devices", "--kernels"])
    assert "no kernels are known here" in none.output
    keep_profile(tmp_path / "profiles", "a", "N100")
    shown = CliRunner().invoke(app, ["devices", "--kernels"])
    assert shown.exit_code == 0, shown.output
    rows = [line.split("│") for line in shown.output.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert cells[-2:] == [["64 x 32", "1", "1*", "5"], ["", "16", "8", "6*"]]
    as_json = CliRunner().invoke(app, ["devices", "--kernels", "--json"])
    (table,) = json.loads(as_json.output)["kernels"]
    assert (table["weights"], table["choices"][0]["kernels"]) == ("int4", ["torch", "expand-bfloat16"])
