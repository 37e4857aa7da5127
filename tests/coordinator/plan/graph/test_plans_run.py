"""Plans of every planner, with one session per segment, compute the same as one session of the whole file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from support.graphs import cluster_of
from support.onnx_models import random_inputs, run_segments, run_whole

from coordinator.models.onnx.reader import read_onnx
from coordinator.plan.graph.auto import plan_graph
from coordinator.plan.graph.methods import GRAPH_METHODS
from coordinator.plan.graph.request import GraphRequest
from hearth.errors import ModelDoesNotFit, NoPlacement
from hearth.plan.graph import Objective

pytest.importorskip("onnxruntime")
pytest.importorskip("transformers")

SPEEDS = (1e9, 0.6e9, 0.8e9, 0.5e9)


@pytest.mark.parametrize("name", ["resnet50", "mobilenet_v2", "efficientnet_b0", "bert", "vit", "two_branch"])
def test_plans_of_every_planner_equal_one_session(name: str, tmp_path: Path) -> None:
    from tools.graph_models import build, export

    path = export(build(name, tiny=True), tmp_path / f"{name}.onnx")
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
