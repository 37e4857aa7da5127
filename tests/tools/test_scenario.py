"""Scenarios of the testbed: built-in ones are valid, and errors are named."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.errors import BadSetting
from tools.testbed import cluster
from tools.testbed.cluster import check_possible
from tools.testbed.scenario import SCENARIOS, EmulatedDevice, Scenario, load_scenario, quota_and_period

DEVICE = '[[devices]]\nname = "m0"\ncpu_share = 0.45\nmbit = 190\n'
GIB = 1 << 30


def scenario(*devices: EmulatedDevice) -> Scenario:
    return Scenario(name="here", devices=devices)


def device(**changes: object) -> EmulatedDevice:
    return EmulatedDevice.model_validate({"name": "m0", "cpu_share": 0.5, "core": 0, "mbit": 100, **changes})


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with root access, two cores and 4 GiB of free memory."""

    class Memory:
        available = 4 * GIB

    monkeypatch.setattr(cluster, "what_is_missing", lambda: "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(psutil, "virtual_memory", Memory)


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.stem)
def test_builtin_scenarios_are_valid_and_fit_two_cores(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_scenario(path.stem)
    assert (found.name, bool(found.description)) == (path.stem, True)
    # these define a ratio of link to compute speed, not a rate
    assert found.scale_links == path.stem.startswith("galaxy-")
    monkeypatch.setattr(cluster, "what_is_missing", lambda: "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(cluster, "_HOST_RESERVE_BYTES", -64 * GIB)  # independent of this machine's free memory
    check_possible(found)


def test_paper_scenarios_have_the_papers_memory() -> None:
    budgets = {name: [one.memory_bytes for one in load_scenario(f"galaxy-{name}").devices] for name in "abcdef"}
    nano_l, nano_m, nano_s = int(1.5 * GIB), int(1.2 * GIB), 751619276
    assert budgets["c"] == [nano_l] * 4
    assert budgets["d"] == [nano_l, nano_m]
    assert budgets["f"] == [nano_l, nano_m, nano_s]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("devices = here", "line 1"),
        ("devices = [", "Invalid value"),
        ("", "devices is missing"),
        ("devices = []", "devices is missing"),
        ("devices = 3", "devices: Input should be a valid tuple"),
        ("devices = [3]", "devices.0: Input should be a valid dictionary"),
        (DEVICE + "speed = 3", "devices.0.speed"),
        ("every_device = 3\n" + DEVICE, "every_device and each of devices must be a table"),
        ("every_device = { speed = 3 }\n" + DEVICE, "devices.0.speed"),
        ("latency_ms = 3\n" + DEVICE, "latency_ms"),
        (DEVICE.replace("mbit = 190", ""), "devices.0.mbit"),
        (DEVICE.replace("190", "0"), "devices.0.mbit"),
        (DEVICE.replace("0.45", "-1"), "devices.0.cpu_share"),
        (DEVICE.replace("0.45", "nan"), "devices.0.cpu_share"),
        (DEVICE.replace("m0", "M 0"), "devices.0.name"),
        (DEVICE.replace("m0", "switch"), "switch"),
        (DEVICE + 'memory = "much"', "devices.0.memory: Value error, 'much' is not a size"),
        (DEVICE + 'memory = "1MiB"', "devices.0.memory: Input should be greater"),
        (DEVICE + 'instruction_set = "avx1024"', "devices.0.instruction_set"),
        (DEVICE + DEVICE, "same name"),
        ('coordinator = "m7"\n' + DEVICE, "m7"),
        (DEVICE.replace("0.45", "0.001"), "cpu_share"),
        (DEVICE + 'medium = "wifi"', "no medium is called wifi"),
        ('media = [{ name = "wifi", mbit = 9 }]\n' + DEVICE, "no device uses the medium wifi"),
        ('media = [{ name = "wifi" }]\n' + DEVICE, "media.0.mbit"),
    ],
)
def test_scenario_errors_name_the_field(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(BadSetting) as raised:
        load_scenario(path)
    assert str(path) in raised.value.setting
    assert named in raised.value.reason
    assert "\n" not in raised.value.reason


def test_unknown_scenario_error_lists_the_builtin_ones(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="galaxy-a, galaxy-b"):
        load_scenario("galaxy-z")
    with pytest.raises(BadSetting, match="neither a file"):
        load_scenario(tmp_path / "none.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(BadSetting, match="folder"):
        load_scenario(tmp_path / "folder.toml")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("impossible", "named"),
    [
        (scenario(device(core=7)), "no core 7 here, only 0, 1"),
        (scenario(device(cpu_share=0.6), device(name="m1", cpu_share=0.6)), "more of core 0 than"),
        (scenario(device(core=None, cpu_share=3)), "more of the machine than"),
        (scenario(device(memory_bytes=2 * GIB), device(name="m1", memory_bytes=2 * GIB)), "4096 MiB together"),
    ],
)
def test_scenario_that_the_machine_cannot_emulate_is_rejected(impossible: Scenario, named: str) -> None:
    with pytest.raises(BadSetting, match="here") as raised:
        check_possible(impossible)
    assert named in raised.value.reason


def test_emulation_requires_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BadSetting, match="sudo"):
        check_possible(scenario(device()))


@given(
    share=st.floats(0.002, 8.0),
    mbit=st.floats(0.1, 10_000),
    memory_bytes=st.none() | st.integers(64 << 20, 1 << 40),
    scale_links=st.booleans(),
)
def test_rates_and_shares_round_trip(
    tmp_path_factory: pytest.TempPathFactory, share: float, mbit: float, memory_bytes: int | None, scale_links: bool
) -> None:
    written = Scenario(
        name="trip",
        scale_links=scale_links,
        devices=(device(cpu_share=share, mbit=mbit, memory_bytes=memory_bytes), device(name="m1", mbit=mbit / 2)),
    )
    assert Scenario.model_validate_json(written.model_dump_json()) == written
    lines = [f"scale_links = {str(scale_links).lower()}"]
    for one in written.devices:
        lines += ["[[devices]]", f'name = "{one.name}"', f"cpu_share = {one.cpu_share!r}", f"mbit = {one.mbit!r}"]
        lines += [f"core = {one.core}", *([f"memory = {one.memory_bytes}"] if one.memory_bytes else [])]
    path = tmp_path_factory.mktemp("trip") / "trip.toml"
    path.write_text("\n".join(lines))
    assert load_scenario(path) == written


@given(share=st.floats(0.002, 64.0))
def test_quota_and_period_give_the_share_within_kernel_limits(share: float) -> None:
    quota, period = quota_and_period(share)
    assert quota / period == pytest.approx(share, abs=1 / period)
    assert quota >= 1000
    assert 1000 <= period <= 1_000_000


def test_instruction_set_follows_the_device_class() -> None:
    assert load_scenario("galaxy-c").devices[0].environment["MKL_ENABLE_INSTRUCTIONS"] == "SSE4_2"
    assert load_scenario("slow-pcs").devices[0].environment["MKL_ENABLE_INSTRUCTIONS"] == "AVX2"
    assert load_scenario("whole-cores").devices[0].environment == {}
