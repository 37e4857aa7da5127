"""The fault experiments: pauses, tables and schedules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.errors import BadSetting
from tools.bench.experiment import Context, make_experiment, read_settings
from tools.bench.fault_actions import FAULTS
from tools.bench.fault_rows import (
    FaultRow,
    Gap,
    Happened,
    answers_steadily,
    longest_gap,
    pauses,
    summarise_faults,
    two_leaders,
    worst_pause,
)
from tools.bench.faults import Faults
from tools.bench.idle_cost import Census, IdleRow, role_of
from tools.testbed.cluster import what_is_missing


def answers(client: int, *times: float) -> list[Happened]:
    return [(seconds, client, "answer", "") for seconds in times]


def row(fault: str = "worker killed", **fields: Any) -> FaultRow:
    values = {
        "load": "embed", "number": 0, "fault": fault, "target": "m0", "answers": 10,
        "pause_seconds": 0.5, "plan_devices_before": 4, "limit_seconds": FAULTS[fault].limit_seconds,
    }  # fmt: skip
    return FaultRow.model_validate({**values, **fields})


def faults(**changes: Any) -> Faults:
    experiment = make_experiment({**read_settings("faults"), **changes})
    assert isinstance(experiment, Faults)
    return experiment


# ---- pauses -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([0.0, 1.0, 4.0, 5.0], Gap(1.0, 4.0)),  # the fault is at 2
        ([0.0, 0.5, 1.0], Gap(1.0, 10.0)),  # no answer came any more
        ([], Gap(2.0, 10.0)),
        ([0.0, 1.9, 2.1, 8.0, 9.0], Gap(1.9, 2.1)),  # the long gap begins after the repair at 3
    ],
)
def test_longest_gap_is_one_that_meets_the_time_of_the_fault(times: list[float], expected: Gap) -> None:
    assert longest_gap(times, since=2.0, until=2.05, end=10.0) == expected


def test_pause_is_that_of_the_client_that_waits_longest_less_its_usual_gap() -> None:
    happened = [*answers(0, 0.0, 1.0, 2.0, 5.0, 6.0), *answers(1, 0.5, 1.5, 3.0, 4.0, 6.0)]
    found = pauses(happened, since=2.0, until=4.0, end=6.5)
    assert found == {0: (pytest.approx(2.0), Gap(2.0, 5.0)), 1: (pytest.approx(0.5), Gap(1.5, 3.0))}
    assert worst_pause(found, 2.0) == found[0]
    assert worst_pause({}, 2.0) == (0.0, Gap(2.0, 2.0))


def test_failed_calls_do_not_end_a_pause() -> None:
    happened: list[Happened] = [*answers(0, 0.0, 1.0), (2.0, 0, "failed", "DeviceLost"), *answers(0, 9.0)]
    assert pauses(happened, since=1.5, until=9.0, end=9.0)[0][1] == Gap(1.0, 9.0)


def test_client_without_any_answer_waits_from_the_fault_to_the_end() -> None:
    assert pauses([(3.0, 0, "failed", "gone")], since=2.0, until=8.0, end=8.0)[0][0] == pytest.approx(6.0)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30).map(sorted), st.floats(0, 100), st.floats(0, 100))
def test_longest_gap_lies_within_the_observation(times: list[float], one: float, other: float) -> None:
    since, until = sorted((one, other))
    gap = longest_gap(times, since, until, end=100.0)
    assert gap.seconds >= 0
    assert min(times[0], since) <= gap.start <= gap.end <= 100.0


# ---- recovery and partitions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("happened", "steady"),
    [
        ([*answers(0, 8.6, 9.4), *answers(1, 8.9, 9.9)], True),
        ([*answers(0, 8.6, 9.4), *answers(1, 8.9)], False),  # stalls
        ([*answers(0, 8.6, 9.4), *answers(1, 7.0, 9.9)], False),
        ([*answers(0, 8.6, 9.4), (8.9, 1, "failed", "gone"), *answers(1, 9.9)], False),
        (answers(0, 8.6, 9.4), False),
        ([], False),
    ],
)
def test_home_has_recovered_once_every_client_goes_on_getting_answers(happened: list[Happened], steady: bool) -> None:
    assert answers_steadily(happened, range(2), since=8.0, until=10.0) == steady


@pytest.mark.parametrize(
    ("near", "far", "harm"),
    [
        ([0.5, 1.0, 2.0], [3.0, 4.0], False),  # the other side took over
        ([3.0, 4.0], [1.0, 2.0], False),
        ([0.5, 5.0], [], False),
        ([0.5, 1.0], [0.02, 3.0], False),  # the first one had passed the network before it was parted
        ([0.5, 3.5], [3.0, 4.0], True),
        ([3.0], [2.0, 4.0], True),
    ],
)
def test_two_leaders_are_seen_by_answers_on_both_sides(near: list[float], far: list[float], harm: bool) -> None:
    happened = [*answers(0, *near), *answers(4, *far), *answers(0, 12.0), *answers(5, 12.0)]
    assert bool(two_leaders(happened, num_near=4, parted=0.0, mended=10.0)) == harm


# ---- summary ------------------------------------------------------------------------------------------------------------


def test_summary_fails_for_a_lost_call_a_wrong_answer_and_a_home_that_stays_down() -> None:
    assert not summarise_faults([row(), row("link cut")]).failure
    for harm in ({"failed": ("DeviceLost",)}, {"wrong": ("off by 0.1",)}, {"recovered": False}):
        summary = summarise_faults([row(), row(**harm)])
        assert summary.failure
        assert "2 faults" in summary.conclusions[0]


def test_table_has_worst_pause_and_limit_of_each_fault() -> None:
    rows = [
        row(pause_seconds=seconds, rejoin_pause_seconds=seconds / 2, load=load)
        for load in ("embed", "infer")
        for seconds in (0.5, 1.5)
    ]
    summary = summarise_faults(rows)
    embed, infer = summary.tables
    cells = dict(zip(embed.columns, embed.rows[0], strict=True))
    assert (cells["times"], cells["limit"]) == ("2", "1.00 s")
    assert cells["over the limit"] == "**1 of 2**"
    assert cells["pause at rejoining, worst"] == "750 ms"
    assert (cells["pause, median"], cells["pause, worst"]) == ("1.00 s", "1.50 s")
    assert infer.title.endswith("infer")
    assert "2 of 4 pauses are within their limits" in summary.conclusions
    assert "over the limit: worker killed, 2 of 4, worst 1.50 s under infer, limit 1.00 s" in summary.conclusions


def test_every_fault_but_those_without_a_target_has_a_limit() -> None:
    without = {name for name, fault in FAULTS.items() if fault.limit_seconds is None}
    assert without == {"store full", "coordinator stopped", "coordinator parted"}


# ---- settings -----------------------------------------------------------------------------------------------------------


def test_schedule_has_each_fault_as_often_and_repeats_for_a_seed() -> None:
    experiment = faults(loads=["embed"], count=3, faults=["worker killed", "link cut"])
    schedule = experiment._schedule("embed", 0, 1)
    assert sorted(schedule) == ["link cut"] * 3 + ["worker killed"] * 3
    assert schedule == experiment._schedule("embed", 0, 1)
    assert len({tuple(faults(count=3, seed=seed)._schedule("embed", 0, 1)) for seed in range(5)}) == 5


def test_faults_are_divided_among_the_loads() -> None:
    experiment = faults(count=5, faults=["worker killed", "link cut", "store full"])
    schedules = [experiment._schedule(load, place, 3) for place, load in enumerate(experiment.loads)]
    assert [len(schedule) for schedule in schedules] == [5, 5, 5]
    for fault in experiment.faults:
        assert sorted(schedule.count(fault) for schedule in schedules) == [1, 2, 2]


def test_unknown_fault_is_refused() -> None:
    with pytest.raises(BadSetting, match="'flood' is none of worker killed"):
        faults(faults=["flood"])


def test_network_is_parted_only_between_two_coordinators() -> None:
    assert faults(standby=True, faults=["coordinator parted", "link cut"]).standby
    with pytest.raises(BadSetting, match="between two coordinators"):
        faults(faults=["coordinator parted"])
    assert "coordinator parted" not in faults().faults


# ---- idle cost ----------------------------------------------------------------------------------------


def census(seconds: float, cpu_seconds: float) -> Census:
    def process(device: str, role: str, pid: int) -> dict[str, Any]:
        return {
            "device": device, "role": role, "pid": pid, "cpu_seconds": cpu_seconds, "proportional_bytes": 50 << 20,
        }  # fmt: skip

    processes = [process("hub", "hearth serve", 1), process("m0", "hearth-agent", 2), process("m1", "hearth-agent", 3)]
    sent = {"m0": 0, "m1": 0}
    return Census.model_validate({"seconds": seconds, "processes": processes, "store_bytes": 1000, "sent_bytes": sent})


@pytest.mark.parametrize(
    ("command", "role"),
    [
        (["python", "/x/bin/hearth-agent", "--name", "m0"], "hearth-agent"),
        (["python", "/x/bin/hearth", "serve", "model"], "hearth serve"),
        (["python", "-m", "agent.worker.main", "ipc://x"], "agent.worker.main"),
        (["python", "-m", "tools.bench.load_clients"], ""),
        (["python", "-m", "hearth.platform.child_main", "7", "--spare", "coordinator.serve"], "--spare"),
        (["sh", "-c", "mount"], ""),
    ],
)
def test_role_of_a_process_is_its_program(command: list[str], role: str) -> None:
    assert role_of(command) == role


def test_idle_cost_is_counted_by_program_and_minute() -> None:
    idle = IdleRow(load="embed", model_bytes=500, before=census(0.0, 1.0), after=census(120.0, 4.0))
    assert idle.cpu_seconds("hearth-agent") == pytest.approx(1.5)
    experiment = make_experiment(read_settings("idle-cost"))
    programs, figures = experiment.summary([idle]).tables
    assert [line[:3] for line in programs.rows] == [("hearth serve", "1", "1.50 s"), ("hearth-agent", "2", "1.50 s")]
    assert ("stores, all devices", "0.98 KiB (2.00 x the model)") in figures.rows


# ---- a real home --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.namespaces
def test_killed_worker_of_a_real_home_is_observed(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch has no wheel for this Python here")
    if reason := what_is_missing():
        pytest.skip(reason)
    experiment = faults(loads=["generate"], faults=["worker killed"], count=1, devices=2)
    (measured,) = experiment.measure(Context(tmp_path, lambda step: None))
    assert measured.harmless, f"{measured.failed} {measured.wrong} {measured.log}"
    assert measured.plan_devices_before == 2
    assert measured.pause_seconds > 0
