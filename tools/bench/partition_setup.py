"""Set-up of Parthasarathy and Krishnamachari (section IV): models, memory, random clusters. Pure except for file reading.

Where the paper does not say how it counts memory and transfers, or its authors' notebooks differ, an accounting chooses:

- `paper`: a partition holds its float32 weights and the outputs of its layers; a transfer is the boundary tensor divided by
  lambda = 1.44 * 2.1; a node's rate depends on its distance to the router, and a link is as fast as its slower end. (Outputs
  must count, given the paper's figures: there MobileNetV2, with 14 MB of weights, does not fit into 64 MB, and
  InceptionResNetV2, with 223 MB, not into five times 64 MB.)
- `weights`: the same, but a partition holds only weights.
- `notebooks`: 1 byte is held per weight and 8 are sent per float; lambda = 1.44; a tensor is sent once per consumer; the
  first block of a partition does not count in its memory; rates depend on the distance between two nodes, all of which
  lie in one quadrant around the router.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from coordinator.models.onnx.json_reader import read_graph_json
from coordinator.models.onnx.reader import read_onnx
from coordinator.plan.graph.throughput.points import Chain, candidate_chain
from coordinator.plan.graph.throughput.problem import PipelineProblem, pipeline_problem
from hearth.errors import BadSetting
from hearth.plan.graph_spec import GraphSpec

# Equation 12: the rate is log2(1 + A / distance^2) Mbit/s, with the distance in metres; 5.5 Mbit/s at 80 m.
_A = 283_230.0
_RANGE_METRES, _NEAREST_METRES = 150.0, 1.0  # largest and smallest coordinate of a node, from the router
_ZFP, _LZ4 = 1.44, 2.1  # average compression ratios, equation 4


@dataclass(frozen=True)
class Accounting:
    name: str
    weight_share: float = 1.0  # of a float32 weight's bytes
    output_share: float = 1.0  # of a float32 output's bytes, held by the partition that computes it
    transfer_share: float = 1.0  # of the boundary tensor's bytes
    compression: float = _ZFP * _LZ4
    for_each_consumer: bool = False
    leaves_out_first: bool = False
    between_nodes: bool = False
    one_quadrant: bool = False


ACCOUNTINGS = {
    each.name: each
    for each in (
        Accounting("paper"),
        Accounting("weights", output_share=0.0),
        Accounting(
            "notebooks",
            weight_share=0.25,
            transfer_share=2.0,
            compression=_ZFP,
            for_each_consumer=True,
            leaves_out_first=True,
            between_nodes=True,
            one_quadrant=True,
        ),
    )
}


def read_graphs(folder: Path, names: Sequence[str]) -> list[GraphSpec]:
    """Read all graphs of a folder (JSON or ONNX), or those named, sorted by name. Raises BadSetting, BadModelFile."""
    if not folder.is_dir():
        raise BadSetting(setting="--graphs", reason=f"{folder} is not a folder")
    files = {path.stem: path for path in sorted(folder.iterdir()) if path.suffix in (".json", ".onnx")}
    if unknown := [name for name in names if name not in files]:
        raise BadSetting(setting="--model", reason=f"there is no {unknown[0]}.json or .onnx in {folder}")
    chosen = {name: files[name] for name in names or sorted(files)}
    if not chosen:
        raise BadSetting(setting="--graphs", reason=f"there is no .json or .onnx file in {folder}")
    return [read_graph_json(path) if path.suffix == ".json" else read_onnx(path).spec for path in chosen.values()]


def problem_of(spec: GraphSpec, accounting: Accounting, memory_bytes: int, num_nodes: int) -> PipelineProblem:
    """The problem without compute times, with equal memory on all nodes, and links still to be drawn."""
    chain = candidate_chain(spec)
    held = [round(accounting.output_share * sum(tensor.num_bytes for tensor in tensors)) for tensors in spec.produced]
    weights = tuple(
        parameter._replace(num_bytes=round(accounting.weight_share * parameter.num_bytes))
        for parameter in spec.parameters
    )
    problem = pipeline_problem(
        replace(spec, parameters=weights),
        np.zeros((spec.num_operators, num_nodes)).tolist(),
        [memory_bytes] * num_nodes,
        np.ones((num_nodes, num_nodes)).tolist(),
        chain,
    )
    compression = accounting.compression / accounting.transfer_share
    ends = np.cumsum([0, *(sum(held[operator] for operator in block) for block in chain.blocks)])
    problem = replace(
        problem,
        boundary_bytes=tuple(size / compression for size in problem.boundary_bytes),
        stage_bytes=problem.stage_bytes + np.triu(ends[None, 1:] - ends[:-1, None]),
    )
    if accounting.for_each_consumer:
        times = [_num_consumers(spec, chain, cut) for cut in range(len(chain.crossing))]
        sizes = tuple(size * count for size, count in zip(problem.boundary_bytes, times, strict=True))
        problem = replace(problem, boundary_bytes=sizes)
    if accounting.leaves_out_first:
        without = np.zeros_like(problem.stage_bytes)
        without[:-1] = problem.stage_bytes[1:]
        problem = replace(problem, stage_bytes=without)
    return problem


def draw_links(problem: PipelineProblem, accounting: Accounting, chance: Random) -> PipelineProblem:
    """The same problem in a random communication graph."""
    places = positions(problem.num_devices, chance)
    return replace(problem, rate=rates(np.abs(places) if accounting.one_quadrant else places, accounting.between_nodes))


def positions(num_nodes: int, chance: Random) -> NDArray[np.float64]:
    """[n, 2] metres from the router, each coordinate uniform in (-150, -1) and (1, 150)."""
    sides = [[chance.choice((-1, 1)) for _ in "xy"] for _ in range(num_nodes)]
    span = _RANGE_METRES - _NEAREST_METRES
    return np.array([[side * (_NEAREST_METRES + span * chance.random()) for side in node] for node in sides])


def rates(places: NDArray[np.float64], between_nodes: bool) -> NDArray[np.float64]:
    """[n, n] bytes per second; infinite on the diagonal."""
    if between_nodes:
        squares = ((places[:, None] - places[None]) ** 2).sum(axis=2)
    else:
        ways = (places**2).sum(axis=1)
        squares = np.maximum(ways[:, None], ways[None])
    np.fill_diagonal(squares, math.inf)
    # Distances below 1 m count as 1 m, as to the router; otherwise nodes at the same place would have an infinite rate.
    found: NDArray[np.float64] = np.log2(1 + _A / np.maximum(squares, _NEAREST_METRES**2)) * 1e6 / 8
    np.fill_diagonal(found, math.inf)
    return found


def _num_consumers(spec: GraphSpec, chain: Chain, cut: int) -> int:
    return max(len(spec.successors[chain.points[cut]]), 1)
