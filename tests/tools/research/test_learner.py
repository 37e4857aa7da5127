"""Doppler as published: probabilities, gradients, the teacher, memory, and that a small graph is learnt."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch
from support.placement_problems import in_other_unit, problems

from coordinator.plan.graph.latency.list_scheduling import PartialSchedule, upward_ranks
from coordinator.plan.graph.latency.problem import Flow, PlacementProblem, SharedWeights
from coordinator.plan.graph.latency.schedule import best_schedule, schedule
from tools.research.learner import (
    DualPolicy,
    Placement,
    Rules,
    Shape,
    Trainer,
    entropy,
    log_probabilities,
    make_instance,
    reinforcement_loss,
    run_episodes,
)

SMALL = Shape(width=8, num_rounds=2)


def problem_of(
    seconds: tuple[tuple[float, ...], ...], flows: list[Flow], k: int, shared: bool = False, budget: int = 100
) -> PlacementProblem:
    n = len(seconds)
    return PlacementProblem(
        "tiny", tuple(f"op{i}" for i in range(n)), tuple(f"device{d}" for d in range(k)), seconds, (1,) * n, (budget,) * k,
        tuple(flows), ((0.0,) * k,) * k, shared=(SharedWeights(2, (0, n - 1)),) if shared else (),
    )  # fmt: skip


def trainer(problem: PlacementProblem, seed: int = 0, shape: Shape = SMALL, rules: Rules | None = None) -> Trainer:
    return Trainer(problem, seed, rules or Rules(), shape)


def forked(costs: tuple[float, ...] = (1.0,) * 5) -> PlacementProblem:
    """Two chains of unequal work and a join, with the cost of sending the result of each operator but the last."""
    works = (1.0, 2.0, 3.0, 2.0, 4.0, 1.0)
    edges = {0: (1, 2), 1: (3,), 2: (4,), 3: (5,), 4: (5,)}
    return problem_of(
        tuple((w, w) for w in works), [Flow(s, t, ((0.0, costs[s]), (costs[s], 0.0))) for s, t in edges.items()], 2
    )


@settings(max_examples=6)
@given(problems(memory=False, media=False), st.integers(0, 2**16))
def test_teacher_ties_are_those_of_critical_path_in_every_state(problem: PlacementProblem, seed: int) -> None:
    # An operator without work keeps later ones from starting before it by the paper's clock, but not in a schedule.
    problem = replace(problem, seconds=tuple(tuple(each + 1.0 for each in row) for row in problem.seconds))
    trace = trainer(problem, seed).sample(2)[0]
    ranks = upward_ranks(problem)
    for b in range(2):
        partial_schedule = PartialSchedule(problem, "critical-path")
        for t, (operator, device) in enumerate(zip(trace.operators_TB[:, b], trace.devices_TB[:, b], strict=True)):
            ready = partial_schedule.ready
            assert set(np.flatnonzero(trace.candidates_TBN[t, b])) == ready
            longest = max(ranks[i] for i in ready)
            assert set(np.flatnonzero(trace.taught_operators_TBN[t, b])) == {i for i in ready if ranks[i] == longest}
            starts = {d: partial_schedule.earliest_start(operator, d) for d in partial_schedule.candidates(operator)}
            earliest = {d for d, start in starts.items() if start == min(starts.values())}
            assert set(np.flatnonzero(trace.taught_devices_TBK[t, b])) == earliest
            partial_schedule.place(operator, device, starts[device])


def test_probabilities_sum_to_one_over_candidates_and_devices_with_room() -> None:
    found = trainer(problem_of(((1.0, 2.0, 1.0),) * 5, [Flow(0, (2, 3), ((0.0,) * 3,) * 3)], 3, budget=2))
    trace, encoding = found.sample(4)
    assert not trace.allowed_TBK.all()
    operators, devices = log_probabilities(found.policy, encoding, trace)
    for logs, allowed in ((operators, trace.candidates_TBN), (devices, trace.allowed_TBK)):
        probabilities = logs.exp().detach().numpy()
        np.testing.assert_allclose(probabilities.sum(-1), 1.0, rtol=1e-5)
        assert ((probabilities > 0) == allowed).all()


def test_greedy_episodes_take_the_most_probable_choices_of_training() -> None:
    found = trainer(forked())
    trace = found.greedy()
    operators, devices = log_probabilities(found.policy, found.policy.encode(make_instance(forked()).graph), trace)
    assert (operators.argmax(-1).numpy() == trace.operators_TB).all()
    assert (devices.argmax(-1).numpy() == trace.devices_TB).all()


def test_gradients_reach_every_parameter() -> None:
    found = trainer(forked((1.0, 2.0, 3.0, 4.0, 5.0)))
    trace, encoding = found.sample(8)
    logs = log_probabilities(found.policy, encoding, trace)
    reinforcement_loss(logs, trace, np.linspace(-1, 1, 8), 0.01, Rules()).backward()
    # A shift of all logits changes no probability.
    exempt = {"select.score.bias", "place.score.bias"}
    dead = {n for n, p in found.policy.named_parameters() if p.grad is None or not p.grad.any()} - exempt
    assert not dead


def test_messages_are_sums_over_edges_of_the_edges_matrix_times_the_sender() -> None:
    problem = forked((1.0, 2.0, 2.0, 4.0, 5.0))
    graph, encoder = make_instance(problem).graph, DualPolicy(SMALL).place.encoder
    edges = [(flow.source, target) for flow in problem.flows for target in flow.targets]
    costs = np.array([flow.seconds[0][1] for flow in problem.flows for _ in flow.targets])
    values = torch.from_numpy((costs - costs.mean()) / costs.std()).float()
    with torch.no_grad():
        hidden = torch.relu(encoder.embed(graph.static_NX))
        for _ in range(SMALL.num_rounds):
            sums = torch.zeros_like(hidden)
            for (source, target), value in zip(edges, values, strict=True):
                matrix = encoder.edge(value[None]).view(8, 8)
                sums[target] += hidden[source] @ matrix
                sums[source] += hidden[target] @ matrix
            hidden = encoder.gru(torch.relu(sums + encoder.bias), hidden)
        found = encoder(graph)
    torch.testing.assert_close(found, torch.nn.functional.leaky_relu(hidden, 0.1))


def test_paths_lead_along_the_longest_remaining_and_preceding_work() -> None:
    instance = make_instance(forked())
    assert [set(np.flatnonzero(row)) for row in instance.graph.b_paths_NN] == [
        {0, 2, 4, 5}, {1, 3, 5}, {2, 4, 5}, {3, 5}, {4, 5}, {5}
    ]  # fmt: skip
    assert [set(np.flatnonzero(row)) for row in instance.graph.t_paths_NN] == [
        {0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 2, 4}, {0, 2, 4, 5}
    ]  # fmt: skip
    assert instance.b_levels_N.tolist() == [12.0, 7.0, 10.0, 4.0, 6.0, 1.0]


@settings(max_examples=10)
@given(problems(memory=False, media=False))
def test_static_features_do_not_depend_on_the_unit_of_time(problem: PlacementProblem) -> None:
    one, other = (make_instance(each).graph for each in (problem, in_other_unit(problem, 1000.0)))
    torch.testing.assert_close(one.static_NX, other.static_NX, atol=1e-5, rtol=0)
    torch.testing.assert_close(one.values[one.edge_values], other.values[other.edge_values], atol=1e-5, rtol=0)


def test_devices_without_room_are_never_chosen() -> None:
    problem = problem_of(((1.0, 9.0),) * 6, [], 2, shared=True, budget=5)
    trace = trainer(problem).sample(32)[0]
    fits = [problem.overflow_bytes(placement.assignment) == 0 for placement in trace.placements()]
    assert fits == trace.fits_B.tolist()
    assert any(fits)
    assert not trace.allowed_TBK.all()


def test_a_placement_that_exceeds_memory_is_never_the_best() -> None:
    found = trainer(problem_of(((1.0,),) * 3, [], 1, budget=2))
    found.reinforce(4)
    assert found.best is None


def test_same_seed_gives_the_same_weights_and_plan() -> None:
    def run(seed: int) -> tuple[list[float], Placement]:
        found = trainer(forked(), seed)
        found.imitate(32)
        found.reinforce(64)
        assert found.best is not None
        return [float(p.detach().sum()) for p in found.policy.parameters()], found.best

    assert run(1) == run(1)
    assert run(1)[0] != run(2)[0]


def optimum(problem: PlacementProblem) -> float:
    n, k = problem.num_operators, problem.num_devices
    return min(schedule(problem, where, range(n)).makespan for where in itertools.product(range(k), repeat=n))


def test_a_small_graph_is_learnt_to_its_optimum() -> None:
    problem = forked()
    found = trainer(problem, shape=Shape(width=16, num_rounds=2))
    found.reinforce(800)
    (greedy,) = found.greedy().placements()
    assert best_schedule(problem, *greedy).makespan == optimum(problem)


def test_imitation_makes_the_greedy_policy_a_critical_path_schedule() -> None:
    found = trainer(forked(), shape=Shape(width=16, num_rounds=2))
    before = taught_share(found)
    found.imitate(480)
    assert before < taught_share(found) == 1.0


def taught_share(found: Trainer) -> float:
    """The share of greedy choices that are the teacher's."""
    trace = found.greedy()
    rows = np.arange(len(trace.operators_TB))
    right = trace.taught_operators_TBN[rows, 0, trace.operators_TB[:, 0]]
    return float(np.mean([right, trace.taught_devices_TBK[rows, 0, trace.devices_TB[:, 0]]]))


def test_ablations_leave_the_other_decision_to_critical_path() -> None:
    operators_only = trainer(forked(), rules=Rules(learns_devices=False)).sample(8)[0]
    devices_only = trainer(forked(), rules=Rules(learns_operators=False)).sample(8)[0]
    for trace, taught, chosen in (
        (operators_only, operators_only.taught_devices_TBK, operators_only.devices_TB),
        (devices_only, devices_only.taught_operators_TBN, devices_only.operators_TB),
    ):
        assert np.take_along_axis(taught, chosen[..., None], axis=-1).all(), trace


def test_sampled_choices_have_the_probabilities_of_the_softmax() -> None:
    instance, policy = make_instance(problem_of(((1.0, 1.0),) * 4, [], 2)), DualPolicy(SMALL)
    encoding = policy.encode(instance.graph)._replace(operator_logits_N=torch.tensor([0.0, 1.0, 2.0, -1.0]))
    trace = run_episodes(instance, policy, encoding, Rules(), 4000, np.random.default_rng(0))
    expected = torch.tensor([0.0, 1.0, 2.0, -1.0]).softmax(0).numpy()
    np.testing.assert_allclose(np.bincount(trace.operators_TB[0], minlength=4) / 4000, expected, atol=0.03)


def test_entropy_ignores_impossible_choices() -> None:
    logs = torch.tensor([0.0, 0.0, -torch.inf]).log_softmax(-1)
    assert float(entropy(logs)) == pytest.approx(np.log(2))
