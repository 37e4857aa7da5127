"""Drift: detection, the decision to plan again, and a controller that changes its plan while serving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import write_model
from support.controllers import ServedController, serving
from support.devices import with_telemetry
from support.fleets import TransformerFleet
from support.plans import BERT_LARGE, make_plan

from coordinator.cli.app import app
from coordinator.plan.limits import parse_limit
from coordinator.serve.replan.drift import (
    BASELINE_STEPS,
    MAX_PRESENCE_SECONDS,
    MIN_PRESENCE_SECONDS,
    REMEASURE_SLOW_SECONDS,
    REPLAN_SECONDS,
    SUSTAINED_STEPS,
    DriftMonitor,
    ReplanReasons,
    ReplanTrigger,
    SustainedDrift,
    describe_reasons,
    is_clearly_faster,
)
from coordinator.serve.state import TransformerGoal
from hearth.errors import DeviceLost
from hearth.plan.common import Prediction
from hearth.plan.plan import Plan, TransformerPlan
from hearth.plan.profile import BlockProfile
from hearth.wire import messages as wire
from hearth.wire.rpc import Reply

# ---- the monitor ----------------------------------------------------------------------------------------------------

SEQ_LEN = 100
TOTAL = 1.0


def planned(*compute_seconds: float, total: float = TOTAL) -> TransformerPlan:
    plan = make_plan(BERT_LARGE, "hmp", [1] * len(compute_seconds))
    devices = tuple(
        device.model_copy(update={"compute_seconds": seconds})
        for device, seconds in zip(plan.devices, compute_seconds, strict=True)
    )
    predicted = Prediction(
        latency_seconds=total, compute_seconds=max(compute_seconds), transfer_seconds=0.1, bottleneck_seconds=total
    )
    body = plan.body.model_copy(update={"seq_len": SEQ_LEN})
    return plan.model_copy(update={"devices": devices, "predicted": predicted, "body": body})


class Steps:
    """Feeds a monitor: `slow` multiplies each rank's time, `total` the step's time, `bias` all times of all steps."""

    def __init__(self, monitor: DriftMonitor, compute: Sequence[float], bias: float = 1.0, seed: int = 0) -> None:
        self.monitor = monitor
        self.compute = compute
        self.bias = bias
        self.random = np.random.default_rng(seed)

    def run(
        self, count: int, slow: Sequence[float] = (), total: float = 1.0, rows: int = SEQ_LEN, noise: float = 0.0
    ) -> SustainedDrift | None:
        """The first finding within `count` steps."""
        slow = slow or [1.0] * len(self.compute)
        for _ in range(count):
            share = self.bias * rows / SEQ_LEN
            shake = 1 + noise * self.random.uniform(-1, 1, len(slow) + 1)
            times = [c * s * share * n for c, s, n in zip(self.compute, slow, shake[1:], strict=True)]
            self.monitor.observe(rows / SEQ_LEN, times, total * TOTAL * share * shake[0])
            if self.monitor.drift is not None:
                return self.monitor.drift
        return None


def steps(*compute: float, **kwargs: Any) -> Steps:
    return Steps(DriftMonitor(planned(*compute)), compute, **kwargs)


@given(st.integers(1, 5), st.floats(0.1, 10), st.integers(0, 1000))
def test_constant_prediction_error_is_no_drift(num_devices: int, bias: float, seed: int) -> None:
    assert steps(*[0.5] * num_devices, bias=bias, seed=seed).run(60, noise=0.1) is None


@given(st.integers(2, 5), st.floats(1.5, 20), st.booleans(), st.integers(0, 1000))
def test_changed_device_is_found_soon_and_measured_accurately(n: int, change: float, faster: bool, seed: int) -> None:
    factor = 1 / change if faster else change
    feed = steps(*[0.5] * n, seed=seed)
    assert feed.run(BASELINE_STEPS + 5, noise=0.03) is None
    found = feed.run(SUSTAINED_STEPS + 4, [factor] + [1.0] * (n - 1), noise=0.03)
    assert not found.links_suspect
    assert found.factors["id0"] == pytest.approx(factor, rel=0.1)
    assert all(found.factors[f"id{rank}"] == pytest.approx(1.0, rel=0.1) for rank in range(1, n))
    feed.monitor.reset_baseline()
    assert feed.run(30, [factor] + [1.0] * (n - 1), noise=0.03) is None  # the new baseline
    back = feed.run(SUSTAINED_STEPS + 4, noise=0.03)
    assert back.factors["id0"] == pytest.approx(1 / factor, rel=0.15)


def test_opposite_changes_of_two_devices_are_drift() -> None:
    feed = steps(0.5, 0.5)
    feed.run(10)
    assert feed.run(50, [1.15, 1.0]) is None
    assert feed.run(20, [1.2, 0.85]) is not None


@given(st.floats(1.45, 10), st.booleans())
def test_step_drift_without_device_drift_makes_links_suspect(change: float, faster: bool) -> None:
    feed = steps(0.3, 0.3)
    feed.run(10)
    assert feed.run(12, total=1 / change if faster else change) == SustainedDrift(links_suspect=True)
    alone = steps(0.3)
    alone.run(10)
    assert alone.run(20, total=change) is None  # a single device has no links


@given(st.floats(1.4, 5))
def test_slow_device_does_not_make_links_suspect(change: float) -> None:
    feed = steps(0.9, 0.3)
    feed.run(10)
    found = feed.run(20, [change, 1.0], total=change)
    assert not found.links_suspect


@given(st.floats(2, 1e6), st.integers(0, 40))
def test_single_outlier_is_no_drift(size: float, when: int) -> None:
    feed = steps(0.5, 0.5)
    feed.run(1 + when)
    assert feed.run(1, [size, 1.0], total=size) is None
    assert feed.run(30) is None


def test_short_steps_are_ignored_and_brief_drift_expires() -> None:
    feed = steps(0.5, 0.5)
    assert feed.run(1, [50.0, 50.0], total=50.0) is None
    assert feed.run(100, [9.0, 1.0], rows=SEQ_LEN // 2 - 1) is None
    assert feed.run(BASELINE_STEPS + 1) is None
    assert feed.run(3, [2.0, 1.0]) is None  # the weighted drift lasts longer than the slowdown, but not long enough
    assert feed.run(10) is None
    assert feed.run(20, [2.0, 1.0], rows=SEQ_LEN // 2) is not None
    for _ in range(20):
        feed.run(1)
    assert feed.monitor.drift is None


def test_times_that_are_not_reported_or_predicted_are_ignored() -> None:
    monitor = DriftMonitor(planned(0.0, 0.5, total=0.0))
    for _ in range(50):
        monitor.observe(1.0, (0.3, 0.0), 1.0)
        assert monitor.drift is None


# ---- when to plan again ---------------------------------------------------------------------------------------------


def test_device_joins_only_after_the_stay_time() -> None:
    trigger = ReplanTrigger()
    trigger.record_plan(["a"], 0.0)
    assert trigger.reasons_to_replan(["a"], None, 100.0) is None
    assert trigger.reasons_to_replan(["a", "b"], None, 101.0) is None
    assert trigger.reasons_to_replan(["a"], None, 105.0) is None  # the device left, so the time starts again
    assert trigger.reasons_to_replan(["a", "b"], None, 106.0) is None
    assert trigger.reasons_to_replan(["a", "b"], None, 105.9 + MIN_PRESENCE_SECONDS) is None
    assert trigger.reasons_to_replan(["a", "b"], None, 106.0 + MIN_PRESENCE_SECONDS) == ReplanReasons(frozenset("b"))
    trigger.record_plan(["a", "b"], 117.0)
    assert trigger.reasons_to_replan(["a", "b"], None, 1000.0) is None
    assert trigger.reasons_to_replan(["a"], None, 1001.0) is None
    assert trigger.reasons_to_replan(["a", "b"], None, 1002.0) is None
    assert trigger.reasons_to_replan(["a", "b"], None, 1012.0) == ReplanReasons(frozenset("b"))  # the device came back


def test_device_left_out_as_slow_is_reconsidered_later() -> None:
    trigger = ReplanTrigger()
    trigger.record_plan(["a", "b"], 0.0, slow=["b"])
    assert trigger.reasons_to_replan(["a", "b"], None, REMEASURE_SLOW_SECONDS) is None
    assert trigger.reasons_to_replan(["a", "b"], None, REMEASURE_SLOW_SECONDS + MIN_PRESENCE_SECONDS) == ReplanReasons(
        frozenset("b")
    )


def test_measured_devices_are_a_reason_once_and_after_the_pause() -> None:
    trigger = ReplanTrigger()
    trigger.record_plan(["a", "b"], 0.0)
    trigger.record_measured(["a"])
    trigger.record_measured(["b"])
    assert trigger.reasons_to_replan(["a", "b"], None, 1.0) == ReplanReasons(measured=frozenset("ab"))
    trigger.record_measured(["a"])
    assert trigger.reasons_to_replan(["a", "b"], None, REPLAN_SECONDS) is None
    assert trigger.reasons_to_replan(["a", "b"], None, 1.0 + REPLAN_SECONDS) == ReplanReasons(measured=frozenset("a"))


@given(st.integers(1, 12))
def test_stay_time_doubles_with_each_loss(losses: int) -> None:
    trigger = ReplanTrigger()
    trigger.record_plan(["a"], 0.0)
    for _ in range(losses):
        trigger.record_loss("b", 0.0)
    stay = min(MIN_PRESENCE_SECONDS * 2 ** (losses - 1), MAX_PRESENCE_SECONDS)
    assert trigger.reasons_to_replan(["a", "b"], None, 10.0) is None
    assert trigger.reasons_to_replan(["a", "b"], None, 9.0 + stay) is None
    assert trigger.reasons_to_replan(["a", "b"], None, 10.0 + stay) is not None


@given(st.lists(st.tuples(st.floats(0, 30), st.booleans(), st.sets(st.sampled_from("abc"))), max_size=60))
def test_replanning_is_never_more_frequent_than_the_pause(looks: list[tuple[float, bool, set[str]]]) -> None:
    trigger, now, answered = ReplanTrigger(), 0.0, []
    for pause, drifted, devices in looks:
        now += pause
        if trigger.reasons_to_replan(sorted(devices), SustainedDrift(links_suspect=True) if drifted else None, now):
            answered.append(now)
            if now % 2 < 1:
                trigger.record_plan(devices, now)
    assert all(b - a >= REPLAN_SECONDS for a, b in zip(answered, answered[1:], strict=False))


def test_reasons_are_described_with_device_names() -> None:
    names = {"a": "attic", "b": "barn"}
    assert describe_reasons(ReplanReasons(frozenset("ba")), names) == "attic can join, barn can join"
    assert describe_reasons(ReplanReasons(drift=SustainedDrift(links_suspect=True)), names) == "the links have changed"
    assert describe_reasons(ReplanReasons(measured=frozenset("ba")), names) == "attic, barn: measured"
    assert (
        describe_reasons(ReplanReasons(drift=SustainedDrift({"a": 2.0, "b": 1.02})), names)
        == "attic takes 2.00x its time"
    )


def test_new_plan_must_gain_a_tenth() -> None:
    assert is_clearly_faster(0.9, 1.0)
    assert not is_clearly_faster(0.91, 1.0)


# ---- a controller that re-plans -------------------------------------------------------------------------------------


def transformers(folder: Path, **wishes: Any) -> TransformerGoal:
    return TransformerGoal.model_validate(
        {"model_dir": str(write_model(folder / "model")), "strategy": "hmp", **wishes}
    )


@asynccontextmanager
async def serving_transformer(
    folder: Path, names: str = "ab", plan: Plan | None = None, **goal: Any
) -> AsyncIterator[ServedController]:
    fleet = TransformerFleet(names)
    async with serving(fleet, folder / "state", transformers(folder, **goal), plan) as home:
        yield home
        assert home.controller.requests.num_failed == 0


async def ask(home: ServedController, count: int) -> None:
    """Send requests of full length."""
    for _ in range(count):
        assert (await home.hidden_states(16)).shape == (16, 24)


async def test_device_left_out_as_slow_is_measured_again(tmp_path: Path) -> None:
    async with serving_transformer(tmp_path, strategy="auto") as home:
        assert home.names() == "ab"
        await ask(home, 10)
        home.fleet.slow["a"] = 1000.0
        await ask(home, 15)
        await home.until(lambda: home.names() == "b" and home.ready)
        home.fleet.slow["a"] = 1.0
        home.now += REMEASURE_SLOW_SECONDS
        await home.wait_for_replanner()
        assert home.names() == "b"
        home.now += MIN_PRESENCE_SECONDS
        await home.until(lambda: home.names() == "ab" and home.ready)
        assert home.tools.profiler.slowdown("a") == 1.0


def equal_agents_of_one_machine() -> TransformerFleet:
    fleet = TransformerFleet("ab")
    for name, device in fleet.devices.items():
        fleet.devices[name] = with_telemetry(device, cpu_model="N100", host_id="one")
    return fleet


async def test_plan_from_the_profile_of_an_equal_device_is_replaced_once_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device b is eight times as slow as a, although its telemetry is the same."""
    fleet = equal_agents_of_one_machine()
    working, profiled = fleet.call, []

    async def call(device_id: str, message: wire.Message, *rest: Any, **named: Any) -> Reply:
        reply = await working(device_id, message, *rest, **named)
        if not isinstance(message, wire.Profile):
            return reply
        profiled.append(device_id)
        assert isinstance(reply.message, wire.Profiled)
        assert isinstance(reply.message.result, BlockProfile)
        return Reply(wire.Profiled(result=reply.message.result.scaled(8.0 if device_id == "b" else 1.0)))

    monkeypatch.setattr(fleet, "call", call)

    async with serving(fleet, tmp_path / "state", transformers(tmp_path), provisional=True) as home:
        assert home.plan.body.heads in ((1, 2), (2, 1))  # as for equal devices
        await ask(home, 1)
        await home.until(lambda: home.plan.epoch == 2 and home.ready)
        assert home.count_lines("b: measured: changing the plan") == 1
        assert (profiled, home.plan.body.heads) == (["a", "a", "b"], (3, 0))  # a was probed first
        await ask(home, 1)
        assert home.controller.requests.num_failed == 0


async def test_measurement_that_a_request_disturbs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = equal_agents_of_one_machine()
    working, profiled, released = fleet.call, [], asyncio.Event()

    async def call(device_id: str, message: wire.Message, *rest: Any, **named: Any) -> Reply:
        if isinstance(message, wire.Profile):
            profiled.append(device_id)
            if device_id == "b":
                await released.wait()
        return await working(device_id, message, *rest, **named)

    monkeypatch.setattr(fleet, "call", call)

    async with serving(fleet, tmp_path / "state", transformers(tmp_path), provisional=True) as home:
        await home.until(lambda: profiled == ["a", "a", "b"])  # a was probed first
        await ask(home, 1)
        released.set()
        await home.wait_for_replanner()
        assert home.count_lines("b: measured") == 0
        assert profiled == ["a", "a", "b"]
        home.now += 60.0
        await home.until(lambda: home.count_lines("b: measured: the plan stays") == 1)
        assert profiled == ["a", "a", "b", "b"]


async def test_drifted_links_are_measured_again_and_the_best_plan_stays(tmp_path: Path) -> None:
    async with serving_transformer(tmp_path) as home:
        await ask(home, 10)
        before = home.plan
        home.fleet.link_factor = 2.0
        await ask(home, 12)
        await home.until(lambda: home.count_lines("the links have changed: the plan stays"))
        rates = {link.bytes_per_second for link in home.tools.profiler.links.values()}
        assert rates == {home.fleet.link_bytes_per_second / 2}
        await ask(home, BASELINE_STEPS)  # the new baseline
        home.fleet.link_factor = 4.0
        await ask(home, 30)
        await home.wait_for_replanner()
        assert home.count_lines("the plan stays") == 1  # not before the pause is over
        home.now += REPLAN_SECONDS
        await home.until(lambda: home.count_lines("the plan stays") == 2)
        assert home.plan is before


async def test_excluded_device_does_not_join(tmp_path: Path) -> None:
    async with serving_transformer(tmp_path, exclude=("c",)) as home:
        home.fleet.add("c")
        await home.wait_for_replanner()
        home.now += MIN_PRESENCE_SECONDS
        await home.wait_for_replanner()
        assert home.names() == "ab"


async def test_given_plan_is_kept_when_devices_join(tmp_path: Path) -> None:
    async with serving_transformer(tmp_path / "free", "a") as free:
        plan = free.plan
        async with serving_transformer(tmp_path / "kept", "a", plan, keep_plan=True) as kept:
            # the harness without a given plan shows how long joining takes
            for name, members in (("b", "ab"), ("c", "abc")):
                for home in (free, kept):
                    home.fleet.add(name)
                await free.wait_for_replanner()
                for home in (free, kept):
                    home.now += REPLAN_SECONDS
                await free.until(lambda members=members: free.names() == members and free.ready)
            assert kept.plan == plan


async def test_limits_apply_and_unknown_names_are_reported(tmp_path: Path) -> None:
    limits = tuple(parse_limit(text) for text in ("a=1GiB", "b=50%", "c=2GiB", "cellar=1GiB"))

    def budgets(home: ServedController) -> dict[str, int]:
        return {device.name: device.budget_bytes >> 30 for device in home.plan.devices}  # type: ignore[union-attr]

    async with serving_transformer(tmp_path, limits=limits) as home:
        assert budgets(home) == {"a": 1, "b": 4}
        assert home.count_lines("no device here is called cellar yet") == 1
        home.fleet.add("c")
        await home.wait_for_replanner()
        home.now += MIN_PRESENCE_SECONDS
        await home.until(lambda: home.names() == "abc" and home.ready)
        assert budgets(home) == {"a": 1, "b": 4, "c": 2}  # half of what is offered, not half of the limited budget


async def test_given_plan_that_exceeds_a_limit_is_rejected(tmp_path: Path) -> None:
    async with serving_transformer(tmp_path) as home:
        given = home.plan
    held = given.devices[0].memory.total
    for goal, refused in (
        ({"limits": (parse_limit(f"a={held}"),)}, 0),
        ({"limits": (parse_limit(f"a={held - 1}"),)}, 1),
        ({"exclude": ("a",)}, 1),
    ):
        async with serving_transformer(tmp_path, plan=given, keep_plan=True, **goal) as home:
            assert home.count_lines("the saved plan is not used: a ") == refused


async def test_device_that_cannot_be_measured_does_not_disturb_serving(tmp_path: Path) -> None:
    async with serving_transformer(tmp_path) as home:
        working = home.fleet.call

        async def call(device_id: str, message: wire.Message, *rest: Any, **named: Any) -> Reply:
            if device_id == "c" and isinstance(message, wire.Profile):
                raise DeviceLost(device="c", reason="of all times now")
            return await working(device_id, message, *rest, **named)

        home.fleet.call = call  # type: ignore[method-assign]
        home.fleet.add("c")
        await home.wait_for_replanner()
        home.now += MIN_PRESENCE_SECONDS
        await home.until(lambda: home.count_lines("c can join: the plan stays"))
        home.now += 10 * REPLAN_SECONDS
        await ask(home, 5)
        await home.wait_for_replanner()
        assert home.count_lines("c can join") == 1


@pytest.mark.parametrize(("budget", "chosen"), [(0.2, "int8"), (0.01, "bf16"), (0.005, "fp16"), (1e-4, "exact")])
async def test_fastest_format_within_the_budget_is_measured_and_used(
    budget: float, chosen: str, tmp_path: Path
) -> None:
    async with serving_transformer(tmp_path, accuracy_budget=budget) as home:
        await ask(home, 1)  # served immediately, in the exact format
        await home.until(lambda: home.count_lines(f"activations travel as {chosen} "))
        home.fleet.asked.clear()
        await ask(home, 30)
        steps = [message for _, message in home.fleet.asked if isinstance(message, wire.Run)]
        assert {step.values for step in steps} == {chosen}
        assert not home.count_lines("the plan stays")  # a faster format is no drift


async def test_nothing_is_calibrated_without_a_budget_or_links(tmp_path: Path) -> None:
    async with serving_transformer(tmp_path / "plain") as home:
        await ask(home, 2)
        values = {message.values for _, message in home.fleet.asked if isinstance(message, wire.Run)}
        assert values == {None}
    async with serving_transformer(tmp_path / "alone", names="a", accuracy_budget=0.1) as home:
        await ask(home, 2)
        await home.wait_for_replanner()
        assert not home.count_lines("activations")


async def test_messages_of_a_plan_change_are_in_order(tmp_path: Path) -> None:
    async with serving_transformer(tmp_path) as home:
        await ask(home, 10)
        home.fleet.slow["a"] = 8.0
        before = home.plan
        asking = asyncio.create_task(ask(home, 40))
        await home.until(lambda: home.plan is not before and home.ready)
        await asking
        kinds = [type(message) for _, message in home.fleet.asked]
        first_run = kinds.index(wire.Run)
        reload = first_run + kinds[first_run:].index(wire.Load)
        assert wire.FindMissing in kinds[first_run:reload]  # weights were sent while the old plan served
        assert wire.Unload not in kinds[:reload]  # workers go on in the new plan
        connect = reload + kinds[reload:].index(wire.ConnectPeers)
        warm_up = connect + kinds[connect:].index(wire.Run)
        await home.until(lambda: wire.Unload in [type(message) for _, message in home.fleet.asked[warm_up:]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("MODEL", "--accuracy-budget", "0"), "above 0"),
        (("MODEL", "--accuracy-budget", "nan"), "above 0"),
        (("--accuracy-budget", "0.1"), "needs a MODEL"),
        (("MODEL", "--accuracy-budget", "0.1", "--wire", "int8"), "omit --wire"),
    ],
)
def test_invalid_accuracy_budget_is_one_clear_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    write_model(tmp_path / "MODEL")
    places = {"MODEL": str(tmp_path / "MODEL")}
    runner = CliRunner()
    assert runner.invoke(app, ["key", "new", "--key", str(tmp_path / "key")]).exit_code == 0
    command = ["serve", *(places.get(argument, argument) for argument in arguments), "--key", str(tmp_path / "key")]
    result = runner.invoke(app, command)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
