"""Measures the cells of Doppler's tables, each in a process of its own, with a limit of processor time."""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

from numpy.random import default_rng

from coordinator.plan.graph.latency.baselines import solve_baseline
from coordinator.plan.graph.latency.doppler.planner import solve_doppler
from coordinator.plan.graph.latency.moirai import solve_moirai
from coordinator.plan.graph.latency.placeto import best_list_schedule, placeto
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.plan.solution import SearchOptions
from hearth.errors import InternalError, ModelDoesNotFit, NoPlacement
from tools.bench.doppler.rows import LEARNT, Cell, CellRow, Method

_MORE_SECONDS = 60  # of processor time that a child may take for what a cell does not limit
_WALL_FACTOR = 30  # of the limit of processor time: a child that takes longer waits for something
_FITTING_SECONDS = 10.0  # for list schedules that run out of memory: to find an assignment that fits, which takes less
_TRAINING = "tools.bench.doppler.training"  # needs torch, which the planners do not


def measure_in_child(cell: Cell, folder: Path, limit: int | None = None) -> CellRow:
    """Measure a cell in a child process that Linux ends after `limit` processor seconds; None: the cell's, and some more.

    `folder` keeps trained policies for other cells. Raises InternalError for a child that fails.
    """
    limit = limit or 2 * math.ceil(cell.seconds) + _MORE_SECONDS  # twice, for a policy's source
    os.environ["OMP_NUM_THREADS"] = "1"  # of the children
    processes = multiprocessing.get_context("forkserver")  # imports torch once for all children
    processes.set_forkserver_preload(["__main__", __name__, _TRAINING])
    receiver, sender = processes.Pipe(duplex=False)
    child = processes.Process(target=_measure_and_send, args=(cell, folder, limit, sender), daemon=True)
    child.start()
    sender.close()
    try:
        row = CellRow.model_validate_json(receiver.recv_bytes()) if receiver.poll(_WALL_FACTOR * limit) else None
    except EOFError:
        row = None
    finally:
        child.kill()
        child.join()
    if row is not None:
        return row
    if child.exitcode == -signal.SIGXCPU:
        return CellRow(cell=cell, processor_seconds=limit, failure=f"ended after {limit} processor seconds")
    raise InternalError(where=f"{cell.method} on {cell.graph}", reason=f"its process ended with {child.exitcode}")


def _measure_and_send(cell: Cell, folder: Path, limit: int, sender: Connection) -> None:
    """What the child does."""
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
    sender.send_bytes(measure_cell(cell, folder).model_dump_json().encode())


def measure_cell(cell: Cell, folder: Path) -> CellRow:
    """Measure a cell in this process. `folder` keeps trained policies."""
    try:
        if cell.method in LEARNT:
            row: CellRow = import_module(_TRAINING).measure_policy(cell, folder)
            return row
        return _PLANNERS[cell.method](cell, cell.problem())
    except (NoPlacement, ModelDoesNotFit):
        return CellRow(cell=cell, failure="no plan fits")


def _baseline(cell: Cell, problem: PlacementProblem) -> CellRow:
    found = solve_baseline(cell.method, problem, SearchOptions(_FITTING_SECONDS, cell.seed, time.process_time))
    return CellRow(cell=cell, makespan=found.value, processor_seconds=found.seconds)


def _best_list(cell: Cell, problem: PlacementProblem) -> CellRow:
    began = time.process_time()
    makespan = best_list_schedule(problem, _FITTING_SECONDS).makespan
    return CellRow(cell=cell, makespan=makespan, processor_seconds=time.process_time() - began)


def _placeto(cell: Cell, problem: PlacementProblem) -> CellRow:
    """Placeto from the best list schedule on; its time is that of training alone."""
    start = best_list_schedule(problem, _FITTING_SECONDS)
    began = time.process_time()
    found = placeto(problem, start, default_rng(cell.seed), time.process_time, began + cell.seconds, cell.episodes)
    return CellRow(
        cell=cell, makespan=found.best.makespan, greedy=found.greedy and found.greedy.makespan,
        num_episodes=found.num_episodes, processor_seconds=time.process_time() - began,
    )  # fmt: skip


def _search(cell: Cell, problem: PlacementProblem) -> CellRow:
    if cell.method == "moirai":
        found = solve_moirai(problem, cell.seconds, time.process_time)
    else:
        found = solve_doppler(problem, SearchOptions(cell.seconds, cell.seed, time.process_time))
    return CellRow(
        cell=cell, makespan=found.value, bound=found.bound, proven=found.proven, processor_seconds=found.seconds
    )


_PLANNERS: Mapping[Method, Callable[[Cell, PlacementProblem], CellRow]] = {
    "local": _baseline, "critical-path": _baseline, "enumerative": _baseline, "best-list": _best_list,
    "placeto": _placeto, "doppler": _search, "moirai": _search,
}  # fmt: skip
