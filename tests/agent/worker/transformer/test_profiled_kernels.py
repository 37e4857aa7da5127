"""Workers multiply with the layouts and kernels whose times the planner has: those that the profiler measures."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.models import save_random_model, small_decoder
from support.plans import make_plan, with_generation

from coordinator.models.checkpoint.families import read_spec
from hearth.plan.kernels import KernelChoice
from hearth.plan.model_spec import WeightFormat
from hearth.plan.transformer import GenerationLimits

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytest.importorskip("transformers")

from support.engines import EngineCluster  # noqa: E402 (needs torch)

from agent.worker.transformer.kernel_times import layer_shapes  # noqa: E402
from agent.worker.transformer.kernels.base import Partition  # noqa: E402
from agent.worker.transformer.matrices import layouts_to_measure  # noqa: E402
from agent.worker.transformer.shard import filled_matrix  # noqa: E402

ROWS = (1, 40)
# A layout, and its kernels for up to 1 row and for more.
CHOICES: list[tuple[WeightFormat, str, tuple[str, str]]] = [
    ("float32", "onednn", ("onednn", "onednn")),
    ("bfloat16", "plain", ("plain", "plain")),
    ("int8", "torch", ("expand-float32", "torch")),
    ("int8", "onnxruntime", ("onnxruntime", "onnxruntime")),
    ("int4", "torch", ("expand-float32", "torch")),
    ("int4", "onnxruntime", ("onnxruntime", "onnxruntime")),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that all layouts support, also those of uneven shares."""
    config = small_decoder("llama", hidden_size=192, head_dim=32, intermediate_size=320)
    return save_random_model(tmp_path_factory.mktemp("model"), config, generates=True)


@pytest.mark.parametrize("split", [(1,), (2, 1)], ids=str)
@pytest.mark.parametrize("choice", CHOICES, ids=lambda each: f"{each[0]}-{each[1]}")
def test_worker_multiplies_as_was_profiled(
    choice: tuple[WeightFormat, str, tuple[str, str]], split: tuple[int, ...], model_dir: Path
) -> None:
    weights, layout, kernels = choice
    spec = read_spec(model_dir).model_copy(update={"weights": weights})
    whole = Partition(0, (0, layer_shapes(spec)[0][0]))
    here = layouts_to_measure(*layer_shapes(spec)[0], weights, torch.device("cpu"), whole)
    if layout not in {matrix.layout for matrix in here}:
        pytest.skip(f"the libraries here have no {layout} layout for {weights}")
    choices = [
        KernelChoice(num_outputs=outputs, num_inputs=inputs, layout=layout, rows=ROWS, kernels=kernels)
        for outputs, inputs in layer_shapes(spec)
    ]
    plan = make_plan(spec, "hmp" if len(split) > 1 else "local", split)
    plan = with_generation(plan, GenerationLimits(kv_tokens=256, max_sequences=2, prefill_rows=64))
    found = set()
    with EngineCluster(model_dir, plan, kernels=choices) as cluster:
        for shard in cluster.shards:
            for matrix in shard.layers[0].matrices.values():
                profiled = filled_matrix(*matrix.shape, torch.device("cpu"), weights, choices)
                used, priced = ((each.layout, *(each.kernel(count) for count in ROWS)) for each in (matrix, profiled))
                assert used == priced, matrix.shape
                found.add(used)
    assert (layout, *kernels) in found  # a small matrix may have another
