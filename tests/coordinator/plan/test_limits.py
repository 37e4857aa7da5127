"""Memory limits of the user: parsing, effect on budgets, and plans that respect them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planning import plan_for
from support.plans import BERT_LARGE, cluster, device_profile, make_plan

from coordinator.plan.limits import (
    MemoryLimit,
    limit_violation,
    parse_limit,
    profile_with_limits,
    require_known,
    unknown_names,
)
from coordinator.serve.goal import TransformerModel, plan_request
from coordinator.serve.state import SavedDeployment, TransformerGoal
from hearth.errors import BadSetting, ModelDoesNotFit
from hearth.plan.common import MemoryUse
from hearth.plan.plan import TransformerPlan

GIB = 1 << 30
SMALL = BERT_LARGE.model_copy(update={"num_layers": 2, "name": "small"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kitchen=1.5GiB", MemoryLimit(device="kitchen", num_bytes=3 * GIB // 2)),
        ("kitchen=800M", MemoryLimit(device="kitchen", num_bytes=800_000_000)),
        (" kitchen = 50% ", MemoryLimit(device="kitchen", percent=50)),
        ("a=b=12.5%", MemoryLimit(device="a=b", percent=12.5)),
    ],
)
def test_limit_is_a_size_or_a_percentage(text: str, expected: MemoryLimit) -> None:
    assert parse_limit(text) == expected


@pytest.mark.parametrize(
    "text", ["kitchen", "=1GiB", "kitchen=", "kitchen=many", "kitchen=-1", "kitchen=0%", "kitchen=101%", "kitchen=nan%",
             "kitchen=1.5"],
)  # fmt: skip
def test_invalid_limit_error_names_the_option(text: str) -> None:
    with pytest.raises(BadSetting, match="--limit"):
        parse_limit(text)


def test_limits_are_saved_with_the_goal() -> None:
    goal = TransformerGoal(model_dir="/m", limits=(parse_limit("a=1GiB"), parse_limit("b=50%")))
    assert SavedDeployment.model_validate_json(SavedDeployment(goal=goal).model_dump_json()).goal == goal


limits = st.builds(
    MemoryLimit, device=st.sampled_from(["device0", "device1", "id1", "other"]),
    num_bytes=st.integers(1 << 20, 16 * GIB), percent=st.none(),
) | st.builds(
    MemoryLimit, device=st.sampled_from(["device0", "id0", "device2"]), num_bytes=st.none(),
    percent=st.floats(0.1, 100),
)  # fmt: skip


@given(st.lists(st.integers(0, 8 * GIB), min_size=1, max_size=4), st.lists(limits, max_size=5))
def test_budgets_are_lowered_to_every_limit_and_never_raised(budgets: list[int], wanted: list[MemoryLimit]) -> None:
    before = cluster([device_profile(index, 1.0, budget_bytes=bytes_) for index, bytes_ in enumerate(budgets)], 100)
    after = profile_with_limits(before, wanted)
    assert after.links == before.links
    for old, new in zip(before.devices, after.devices, strict=True):
        own = [limit for limit in wanted if limit.device in (old.name, old.device_id)]
        assert new.budget_bytes == min([old.budget_bytes, *(limit.applied_to(old.budget_bytes) for limit in own)])
        assert new.model_copy(update={"budget_bytes": old.budget_bytes}) == old


@given(st.floats(50, 3000), st.floats(5, 100), st.sampled_from(["auto", "hmp", "sp", "megatron-tp", "local"]))
def test_plans_respect_limits(mebibytes: float, percent: float, strategy: str) -> None:
    goal = TransformerGoal.model_validate(
        {
            "model_dir": "/m",
            "strategy": strategy,
            "limits": (parse_limit(f"device0={mebibytes}MiB"), parse_limit(f"device1={percent}%")),
        }
    )
    home = cluster([device_profile(index, 1.0 + index, SMALL, budget_bytes=2 * GIB) for index in range(3)], 1000)
    try:
        plan = plan_for(plan_request(goal, model(), home))
    except ModelDoesNotFit:
        return
    for device in plan.devices:
        most = {"device0": mebibytes * (1 << 20), "device1": 2 * GIB * percent / 100}.get(device.name, 2 * GIB)
        assert device.memory.total <= most
    assert limit_violation(plan, goal.limits, (), {f"id{index}": 2 * GIB for index in range(3)}) is None


def model() -> TransformerModel:
    return TransformerModel(Path("/m"), SMALL, 284, None)


def deployed(held: int, planned: int) -> TransformerPlan:
    plan = make_plan(SMALL, "hmp", (1, 1))
    memory = MemoryUse(weights=held, embeddings=0, activations=0, workspace=0)
    devices = tuple(d.model_copy(update={"memory": memory, "budget_bytes": planned}) for d in plan.devices)
    return plan.model_copy(update={"devices": devices})


@pytest.mark.parametrize(
    ("text", "free", "held", "planned", "expected"),
    [
        ("device0=50%", 2500, 1500, 2000, 2000),  # half of the 4000 that the device offers when nothing runs
        ("device0=50%", 500, 1500, 2000, 1000),  # other programs started
        ("device0=50%", 2000, 900, 1000, 1000),  # the agent offers 2000 regardless of what is held
        ("device0=3000M", 2500, 1500, 3000, 3000),
        ("device0=1000M", 2500, 1500, 3000, 1000),
    ],
)
def test_percentage_includes_memory_of_the_deployed_plan(
    text: str, free: int, held: int, planned: int, expected: int
) -> None:
    mega = 1_000_000
    now = cluster([device_profile(index, 1.0, budget_bytes=free * mega) for index in range(2)], 100)
    after = profile_with_limits(now, [parse_limit(text)], deployed(held * mega, planned * mega))
    assert after.devices[0].budget_bytes == expected * mega


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 100))
def test_deployed_memory_counts_as_free_up_to_the_offer(free: int, offered: int, held: int) -> None:
    now = cluster([device_profile(index, 1.0, budget_bytes=free) for index in range(3)], 100)
    used, _, other = profile_with_limits(now, [], deployed(held, offered)).devices
    assert other.budget_bytes == free
    assert free <= used.budget_bytes <= max(free, offered, free + held)
    if free + held >= offered >= free:
        assert used.budget_bytes == offered


def test_given_plan_is_checked_against_limits_and_exclusions() -> None:
    plan = deployed(GIB, 4 * GIB)
    offered = {"id0": 4 * GIB}
    assert limit_violation(plan, [parse_limit("device0=1GiB")], ["attic"], offered) is None
    assert limit_violation(plan, [parse_limit("id0=25%")], [], offered) is None
    violation = limit_violation(plan, [parse_limit("device0=24%")], [], offered)
    assert violation == "device0 would hold 1.00 GiB, above its limit of 24 %"
    assert limit_violation(plan, [parse_limit("device1=0.5GiB")], [], {}) is not None
    assert limit_violation(plan, [], ["id1"], {}) == "device1 is excluded"


def test_unknown_device_name_error_lists_known_names() -> None:
    devices = [device_profile(index, 1.0) for index in range(2)]
    require_known("--limit", ["device0", "id1"], devices)
    assert unknown_names(["attic", "id0", "attic"], devices) == ["attic"]
    with pytest.raises(BadSetting, match="called attic; there are: device0, device1"):
        require_known("--limit", ["attic"], devices)
