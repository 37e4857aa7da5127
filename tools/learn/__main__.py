"""`python -m tools.learn`: trains Doppler's dual policy on one of the paper's graphs, or the policy for a home."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, cast

import numpy as np
import torch
import typer

from coordinator.cli.output import handles_errors, out
from coordinator.plan.graph.latency.doppler.policy import heft_policy
from coordinator.plan.graph.latency.doppler.weights import policy_bytes
from coordinator.plan.graph.latency.problem import PlacementProblem
from coordinator.serve.planners.policies import SHIPPED_POLICY
from hearth.errors import BadSetting
from tools.bench.tensor.graphs import GRAPHS, tensor_graph
from tools.bench.tensor.homes import HOMES
from tools.learn.ablations import Ablation, make_trainer
from tools.learn.home.training import BATCH, make_lessons
from tools.learn.home.training import Trainer as HomeTrainer
from tools.learn.instance import Floats, make_instance
from tools.learn.published import published_problem
from tools.learn.simulators import published_times, work_conserving_times
from tools.learn.training import Price, Trainer

_REPORTS = 10  # lines of progress
_REPORT_STEPS = 500

app = typer.Typer(name="python -m tools.learn", add_completion=False, pretty_exceptions_enable=False)


@app.command("published")
@handles_errors
def train_published(
    graph: Annotated[str, typer.Argument(help=f"One of: {', '.join(GRAPHS)}.")],
    home: Annotated[
        str, typer.Option(help=f"Four devices and their links: {', '.join(HOMES)}; or `published`: the authors' costs.")
    ] = "gigabit",
    shards: Annotated[int, typer.Option(help="Cut the graph for 4 devices, or for 8 as on the paper's V100s.")] = 4,
    memory: Annotated[float, typer.Option(min=0.0, help="Memory of each device, as a share of all weights.")] = 1.0,
    imitation: Annotated[int, typer.Option(min=0, help="Episodes of stage I: imitate Critical Path.")] = 400,
    episodes: Annotated[
        int, typer.Option(min=0, help="Episodes of stage II: policy gradient on the simulator.")
    ] = 4000,
    batch: Annotated[int, typer.Option(min=1, help="Episodes of one message passing and one gradient step.")] = 16,
    ablation: Annotated[
        Ablation, typer.Option(help="Learn only operators or only devices, or pass messages at every step.")
    ] = Ablation.NONE,
    seed: Annotated[int, typer.Option(help="Of weights and samples.")] = 0,
) -> None:
    """Train Doppler's dual policy on one graph (arXiv 2505.23131); print the best plan of training and the greedy one.

    Times are simulated: with contention of transfers on a home, and with the authors' simulator on `published` costs.
    """
    unit = "" if home == "published" else " s"
    problem, price = _problem(graph, home, shards, memory)
    trainer = make_trainer(make_instance(problem), ablation, seed, batch)
    began = time.process_time()
    trainer.imitate(imitation)
    out.print(f"imitation: {imitation} episodes; greedy policy {_greedy_seconds(trainer, price):.4f}{unit}")
    every = -(-episodes // _REPORTS)

    def report(seconds_B: Floats) -> None:
        done = trainer.num_episodes - imitation
        if done // every > (done - len(seconds_B)) // every and trainer.best is not None:
            out.print(
                f"{done:6} episodes: mean of a batch {seconds_B.mean():.4f}{unit}, best {trainer.best.seconds:.4f}{unit}"
            )

    trainer.reinforce(episodes, price, report)
    spent, total = time.process_time() - began, imitation + episodes
    if trainer.best is not None:
        out.print(f"best of training {trainer.best.seconds:.4f}{unit}, found at episode {trainer.best.episode}")
    out.print(f"final greedy policy {_greedy_seconds(trainer, price):.4f}{unit}")
    out.print(f"{total} episodes in {spent:.0f} processor seconds: {total / spent:.1f} episodes/s")


@app.command("home")
@handles_errors
def train_home(
    out_path: Annotated[Path, typer.Option("--out", help="The file to write.", dir_okay=False)] = SHIPPED_POLICY,
    instances: Annotated[int, typer.Option(min=1, help="Random graphs on random homes to learn from.")] = 360,
    moves: Annotated[int, typer.Option(min=0, help="Annealing moves of each teacher.")] = 0,
    imitation: Annotated[int, typer.Option(min=0, help="Gradient steps of stage I: imitate the teachers.")] = 0,
    steps: Annotated[int, typer.Option(min=0, help="Steps of stage II: policy gradient, 16 episodes each.")] = 6000,
    seed: Annotated[int, typer.Option(help="Of instances; of weights and samples, the next one.")] = 1,
) -> None:
    """Train one policy for any graph on any home, and write the file that the planner `doppler` reads."""
    torch.set_num_threads(1)
    began = time.process_time()
    lessons = make_lessons(np.random.default_rng(seed), instances, moves)
    out.print(f"{instances} instances and their teachers: {time.process_time() - began:.0f} processor seconds")
    rng = np.random.default_rng(seed + 1)
    trainer = HomeTrainer(heft_policy(rng), lessons, rng)
    if imitation:
        _report("imitation: loss per operator", trainer.imitate(imitation))
        trainer.sharpen()
    makespans = _report("policy gradient: makespans over the best known", trainer.reinforce(steps))
    figures = {
        "seed": str(seed),
        "instances": str(instances),
        "steps": f"{imitation} of imitation, {steps} of policy gradient in batches of {BATCH}",
        "processor_seconds": f"{time.process_time() - began:.0f}",
        "last_makespans_over_best_known": f"{np.mean(makespans[-instances:]):.3f}",
    }
    out_path.write_bytes(policy_bytes(trainer.network.policy, figures))
    for name, figure in figures.items():
        out.print(f"{name.replace('_', ' ')}: {figure}")


def _report(label: str, figures: Iterator[float]) -> list[float]:
    """All figures; prints the mean of every so many steps."""
    found: list[float] = []
    for figure in figures:
        found.append(figure)
        if len(found) % _REPORT_STEPS == 0:
            out.print(f"{label}, {len(found)} steps: {np.mean(found[-_REPORT_STEPS:]):.4f}")
    return found


def _problem(graph: str, home: str, shards: int, memory: float) -> tuple[PlacementProblem, Price]:
    if graph not in GRAPHS:
        raise BadSetting(setting="graph", reason=f"'{graph}' is none of: {', '.join(GRAPHS)}")
    if shards not in (4, 8):
        raise BadSetting(setting="shards", reason="graphs are cut for 4 or 8 devices")
    cut = cast(Literal[4, 8], shards)
    if home == "published":
        problem = published_problem(graph, cut)
        return problem, partial(published_times, problem)
    if home not in HOMES:
        raise BadSetting(setting="home", reason=f"'{home}' is none of: {', '.join(HOMES)}, published")
    problem = HOMES[home].problem(tensor_graph(graph, devices=cut), memory)
    return problem, partial(work_conserving_times, problem)


def _greedy_seconds(trainer: Trainer, price: Price) -> float:
    return price(trainer.greedy().placements())[0]


if __name__ == "__main__":
    app()
