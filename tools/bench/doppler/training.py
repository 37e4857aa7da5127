"""Cells of Doppler as published: trains its policies with `tools.learn`, from scratch or from another graph's policy."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from numpy.random import default_rng

from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.graph.latency.schedule import best_schedule
from tools.bench.doppler.rows import Cell, CellRow, Method
from tools.bench.tensor.graphs import GraphName
from tools.learn.ablations import Ablation, make_trainer
from tools.learn.episodes import Placement, run_episodes
from tools.learn.instance import Floats, make_instance
from tools.learn.networks import graph_tensors
from tools.learn.scoring import PolicyChooser, encode
from tools.learn.simulators import work_conserving_times
from tools.learn.training import Trainer

_ABLATIONS: Mapping[Method, Ablation] = {
    "sel-only": Ablation.SEL_ONLY,
    "plc-only": Ablation.PLC_ONLY,
    "per-step": Ablation.PER_STEP,
}


class _TimeIsOver(Exception):
    """Training has used the cell's processor time."""


def measure_policy(cell: Cell, folder: Path) -> CellRow:
    """Train a policy and report the best plan of training and the greedy one; or time episodes of an untrained one.

    Training ends early when the cell's processor time is over: the row has the number of episodes that were run.
    """
    if cell.method == "rollout":
        return _time_rollouts(cell)
    problem = cell.problem()
    ablation = _ABLATIONS.get(cell.method, Ablation.NONE)
    trainer = make_trainer(make_instance(problem), ablation, cell.seed, cell.batch)
    if cell.source is not None:
        trainer.policy.load_state_dict(torch.load(_source_policy(cell, cell.source, folder), weights_only=True))
    began = time.process_time()
    if cell.source is None:
        trainer.imitate(cell.imitation)
    _reinforce(trainer, cell.episodes, problem, began + cell.seconds)
    seconds = time.process_time() - began
    greedy, best = trainer.greedy(), trainer.best
    return CellRow(
        cell=cell,
        makespan=best and _makespan(problem, best.placement),
        greedy=_makespan(problem, greedy.placements()[0]) if greedy.fits_B.all() else None,
        num_episodes=trainer.num_episodes,
        found_at=best.episode if best else 0,
        processor_seconds=seconds,
    )


def _reinforce(trainer: Trainer, num_episodes: int, problem: PlacementProblem, deadline: float = math.inf) -> None:
    """Stage II, until the processor time is `deadline`."""

    def check_time(seconds_B: Floats) -> None:
        if time.process_time() >= deadline:
            raise _TimeIsOver

    try:
        trainer.reinforce(num_episodes, partial(work_conserving_times, problem), check_time)
    except _TimeIsOver:
        pass


def _source_policy(cell: Cell, source: GraphName, folder: Path) -> Path:
    """The file of a policy that was trained on another graph; trains it if no earlier cell has."""
    path = folder / f"{source}-{cell.home}-{cell.devices}-{cell.imitation}-{cell.source_episodes}-{cell.seed}.pt"
    if not path.exists():
        problem = cell.problem(source)
        trainer = make_trainer(make_instance(problem), Ablation.NONE, cell.seed, cell.batch)
        trainer.imitate(cell.imitation)
        _reinforce(trainer, cell.source_episodes, problem)
        torch.save(trainer.policy.state_dict(), path)
    return path


def _makespan(problem: PlacementProblem, placement: Placement) -> float:
    """As of the plans of every other method: the shorter makespan of both disciplines."""
    return best_schedule(problem, placement.assignment, placement.order).makespan


def _time_rollouts(cell: Cell) -> CellRow:
    """Time sampled episodes and their prices. Each batch passes messages once; nothing is learnt."""
    problem, rng = cell.problem(), default_rng(cell.seed)
    instance = make_instance(problem)
    trainer = make_trainer(instance, Ablation.NONE, cell.seed, cell.batch)
    graph, done = graph_tensors(instance), 0
    began = time.process_time()
    while done < cell.episodes:
        with torch.no_grad():
            encoding = encode(trainer.policy, graph)
        chooser = PolicyChooser(trainer.policy, graph, encoding, rng, trainer.rules)
        placements = run_episodes(instance, chooser, cell.batch).placements()
        work_conserving_times(problem, placements)
        done += len(placements)
    return CellRow(cell=cell, num_episodes=done, processor_seconds=time.process_time() - began)
