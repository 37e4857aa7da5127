"""Plans of every planner, and of tiles, with one session per segment, compute the same as one session of the whole file."""

from __future__ import annotations

import time
from functools import cache
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from support.cases import mostly_slow
from support.graphs import cluster_of
from support.onnx_models import random_inputs, run_segments, run_whole

from coordinator.models.graph_file import read_graph_file
from coordinator.models.onnx.reader import read_onnx
from coordinator.plan.graph.auto import plan_graph
from coordinator.plan.graph.request import GraphRequest
from coordinator.plan.methods import GRAPH_METHODS
from coordinator.serve.kinds.tiled_graphs import tiled_for
from hearth.errors import ModelDoesNotFit, NoPlacement
from hearth.plan.graph import Objective

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

SPEEDS = (1e9, 0.6e9, 0.8e9, 0.5e9)


NETWORKS = ("resnet50", "mobilenet_v2", "efficientnet_b0", "bert", "vit", "two_branch")


@cache
def exported(name: str, folder: Path) -> Path:
    from tools.graph_models import build, export

    return export(build(name, tiny=True), folder / f"{name}-to-plan.onnx")


@pytest.mark.parametrize("name", mostly_slow(NETWORKS, lambda name: name == "mobilenet_v2"))
def test_plans_of_every_planner_equal_one_session(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = exported(name, tmp_path_factory.getbasetemp())
    model = read_onnx(path)
    spec = model.spec
    inputs = random_inputs(spec)
    expected = run_whole(path, inputs)
    weights = spec.parameter_bytes(range(spec.num_operators))
    most_devices = 0
    for num_devices in (2, 3, 4):
        # No device can hold the model alone, and links are fast, so that operators are distributed.
        budget = int(weights / num_devices * 1.8)
        cluster = cluster_of(spec, SPEEDS[:num_devices], bytes_per_second=1e9, budget_bytes=budget)
        for objective in get_args(Objective):
            for strategy in GRAPH_METHODS.names(objective):
                request = GraphRequest(spec, cluster, objective, strategy=strategy, time_limit_seconds=0.3)
                try:
                    plan = plan_graph(request, time.monotonic).chosen.plan
                except (ModelDoesNotFit, NoPlacement):
                    continue
                assert plan is not None
                found = run_segments(model, plan.body.segments, inputs)
                for output, array in expected.items():
                    assert np.abs(found[output] - array).max() <= 1e-4, (strategy, num_devices, output)
                most_devices = max(most_devices, len(plan.devices))
    assert most_devices >= 3


@pytest.mark.parametrize(
    ("name", "num_devices"),
    mostly_slow(product(NETWORKS, (2, 3, 4)), lambda *case: case in (("resnet50", 3), ("bert", 2))),
)
def test_tiles_on_several_devices_equal_one_session(
    name: str, num_devices: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No device can hold the model alone."""
    graph = read_graph_file(exported(name, tmp_path_factory.getbasetemp()), {})
    inputs = random_inputs(graph.spec)
    weights = graph.spec.parameter_bytes(range(graph.spec.num_operators))
    speeds, rate, budget = SPEEDS[:num_devices], 1e9, int(weights * 0.9)
    tiled = tiled_for(graph, cluster_of(graph.spec, speeds, rate, budget), num_devices)
    assert tiled.model is not None
    assert tiled.spec.num_operators > graph.spec.num_operators
    request = GraphRequest(tiled.spec, cluster_of(tiled.spec, speeds, rate, budget), strategy="enumerative")
    plan = plan_graph(request, time.monotonic).plan
    assert len(plan.devices) > 1
    found = run_segments(tiled.model, plan.body.segments, inputs)
    for output, array in run_whole(graph.path, inputs).items():
        assert np.abs(found[output] - array).max() <= 1e-4, output
