"""Policies that have learnt: kept by graph and devices, used by the next plan, and a wrong file is one note."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ortools")

from support.graphs import chain, cluster_of
from support.policies import random_policy
from support.step_clock import StepClock

from coordinator.plan.graph.latency.doppler.policy import Policy, policy_bytes, policy_from_bytes
from coordinator.plan.graph.request import POLICIES_FOLDER, GraphRequest
from coordinator.plan.solution import PlanningResult
from coordinator.serve.planners import policies
from coordinator.serve.planners.policies import plan_with_policy, policy_path
from coordinator.serve.standby.replica import Replica, replica_files
from coordinator.serve.state import SavedState
from hearth.plan.plan import GraphPlan

SHIPPED = random_policy(np.random.default_rng(0))


def request(folder: Path, learn_seconds: float = 0.0, speeds: Sequence[float] = (1.0, 0.5)) -> GraphRequest:
    spec = chain(1, [100, 80, 60, 40])
    cluster = cluster_of(spec, list(speeds), bytes_per_second=50.0)
    return GraphRequest(
        spec, cluster, strategy="doppler", time_limit_seconds=3.0, learn_seconds=learn_seconds, policies_dir=str(folder)
    )


def planned(asked: GraphRequest) -> PlanningResult[GraphPlan]:
    return plan_with_policy(asked, StepClock(), lambda strategy: None)


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "usable_policy", lambda: SHIPPED)


def used_policy(asked: GraphRequest, monkeypatch: pytest.MonkeyPatch) -> Policy | None:
    """The policy that the planner begins with."""
    seen: list[Policy | None] = []

    class Seen(policies.HomePolicy):
        def __init__(self, policy: Policy | None, learn_seconds: float) -> None:
            seen.append(policy)
            super().__init__(policy, learn_seconds)

    with monkeypatch.context() as patch:
        patch.setattr(policies, "HomePolicy", Seen)
        planned(asked)
    return seen[0]


@pytest.mark.usefixtures("shipped")
def test_a_policy_that_has_learnt_is_used_by_the_next_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(tmp_path / "policies", 3.0)
    (note,) = planned(asked).notes
    path = policy_path(asked)
    assert path is not None
    assert note == f"learnt from 48 episodes in 3.00 s; kept in {path}"
    assert list((tmp_path / "policies").iterdir()) == [path]
    kept = policy_from_bytes(path.read_bytes(), str(path))
    assert not np.array_equal(kept.weights["place.output.weight"], SHIPPED.weights["place.output.weight"])
    used = used_policy(replace(asked, learn_seconds=0.0), monkeypatch)
    assert used is not None
    assert all(np.array_equal(used.weights[name], each) for name, each in kept.weights.items())
    other = request(tmp_path / "policies", speeds=(1.0, 0.5, 0.5))
    assert used_policy(other, monkeypatch) is None
    assert used_policy(replace(other, recovering=True), monkeypatch) is SHIPPED
    assert used_policy(replace(other, learn_seconds=1.0), monkeypatch) is SHIPPED


def test_a_standby_that_takes_over_uses_the_policy_that_has_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaders, own = (request(tmp_path / name / POLICIES_FOLDER) for name in ("leader", "standby"))
    path = policy_path(leaders)
    path.parent.mkdir(parents=True)
    path.write_bytes(policy_bytes(SHIPPED, {}))
    assert used_policy(own, monkeypatch) is None
    replica = Replica(tmp_path / "standby")
    for file in replica_files(tmp_path / "leader", SavedState(), (), {}):
        for part, data in file.parts():
            replica.receive(part, data)
    used = used_policy(own, monkeypatch)
    assert used is not None
    assert all(np.array_equal(used.weights[name], each) for name, each in SHIPPED.weights.items())


@pytest.mark.usefixtures("shipped")
def test_a_wrong_file_is_one_note_and_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(tmp_path)
    path = policy_path(asked)
    path.write_bytes(b"not a policy")
    (note,) = planned(asked).notes
    assert str(path) in note
    assert "cut short" in note
    assert used_policy(asked, monkeypatch) is None
    assert len(planned(replace(asked, learn_seconds=3.0)).notes) == 2
    assert planned(asked).notes == ()


def test_without_a_policy_there_is_nothing_to_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "usable_policy", lambda: None)
    (note,) = planned(request(tmp_path, 3.0)).notes
    assert note.startswith("--learn is ignored")
    assert list(tmp_path.iterdir()) == []
    assert planned(request(tmp_path)).notes == ()
    assert planned(replace(request(tmp_path), recovering=True)).notes == ()


def test_files_are_named_by_graph_and_devices(tmp_path: Path) -> None:
    asked = request(tmp_path)
    ids = [device.device_id for device in asked.cluster.devices]
    turned = replace(asked, cluster=asked.cluster.subset(ids[::-1]))
    others = [
        replace(asked, cluster=asked.cluster.subset(ids[:1])),
        replace(asked, spec=chain(1, [100, 80, 60])),
        replace(asked, model_hash="other"),
    ]
    assert policy_path(turned) == policy_path(asked)
    assert len({policy_path(asked), *map(policy_path, others)}) == 4
    assert policy_path(replace(asked, policies_dir="")) is None
