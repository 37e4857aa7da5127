"""Findings and their targets, and the experiments that measure in homes of real agents."""

from __future__ import annotations

from pathlib import Path

import pytest

from hearth.errors import BadSetting
from hearth.plan.parts import MemoryUse
from tools.bench.capacity import DeviceMemory
from tools.bench.experiment import make_experiment, read_settings
from tools.bench.findings import BYTES, RATIO, at_least, at_most, equal, summarise, within
from tools.bench.homes import decoder_directory, hub_scenario


def test_missed_target_fails_the_run_and_is_a_conclusion() -> None:
    good = [at_most("peak", 2.0, 2.0, RATIO), at_least("rate", 3.0, 2.5, RATIO), within("error", -0.1, 0.1, "a detail")]
    assert summarise("good", good).failure == ""
    assert summarise("good", good).conclusions == ("3 of 3 figures meet their targets",)
    summary = summarise("bad", [*good, equal("moved", 7, 0, BYTES)])
    assert "misses its target" in summary.failure
    assert summary.conclusions[1:] == ("missed: moved: 7 bytes; target: 0 bytes",)
    assert "| error | within 10% | -10.0% (a detail) | yes |" in summary.tables[0].markdown()
    assert "| moved | 0 bytes | 7 bytes | **no** |" in summary.tables[0].markdown()


def test_capacity_shows_planned_and_actual_memory_of_each_device() -> None:
    capacity = make_experiment(read_settings("capacity"))
    planned = MemoryUse(weights=50, embeddings=20, activations=10, workspace=10, kv_cache=10)
    row = DeviceMemory(device="m0", limit_bytes=200, planned=planned, worker_peak_bytes=95, held_peak_bytes=150)
    saved = capacity.ROW.validate_python(row.model_dump(mode="json"))
    assert saved == row
    memory = capacity.summary([saved]).tables[1]
    assert dict(zip(memory.columns, memory.rows[0], strict=True))["off by"] == "-5.0%"


@pytest.mark.parametrize(
    ("experiment", "change", "named"),
    [
        ("capacity", "limit=9X", "'9X' is not a size"),
        ("capacity", "limit=1M", "limit: Input should be greater than"),
        ("push", "devices=1", "devices: Input should be greater than"),
        ("push", "clients=2", "clients: Extra inputs are not permitted"),
    ],
)
def test_wrong_setting_is_named(experiment: str, change: str, named: str) -> None:
    with pytest.raises(BadSetting, match=named):
        make_experiment(read_settings(experiment, [change]))


@pytest.mark.parametrize("model", ["bert-base", {"model_type": "t5"}, {}])
def test_only_decoders_serve_in_a_home(model: str | dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="not a decoder"):
        decoder_directory(model, tmp_path)
    assert decoder_directory(str(tmp_path), tmp_path) == tmp_path


def test_hub_has_the_chosen_number_of_devices() -> None:
    scenario = hub_scenario(2, memory_bytes=1 << 30)
    assert [device.name for device in scenario.devices] == ["m0", "m1", "hub"]
    assert [device.memory_bytes for device in scenario.devices] == [1 << 30, 1 << 30, None]
