"""The engines on a CUDA device: pinned staging, copies on a separate stream. Skipped without a CUDA device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.models import save_random_model, small_bert
from support.plans import make_plan

from coordinator.models.checkpoint.families import read_spec

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
if not torch.cuda.is_available():
    pytest.skip("there is no CUDA device here", allow_module_level=True)

from support.engines import EngineCluster  # noqa: E402
from support.reference import hidden_states  # noqa: E402
from transformers import BertConfig  # noqa: E402

TOLERANCE = 1e-4


@pytest.mark.parametrize("split", [(1,), (2, 1), (3, 1, 2), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("strategy", ["hmp", "sp", "megatron-tp"])
def test_every_strategy_equals_transformers_on_cuda(strategy: str, split: tuple[int, ...], tmp_path: Path) -> None:
    model_dir = save_random_model(tmp_path / "model", small_bert())
    spec = read_spec(model_dir)
    with EngineCluster(model_dir, make_plan(spec, strategy, split), compute_device="cuda") as cluster:
        for length in (1, 7, 33, 64):
            token_ids = np.random.default_rng(length).integers(0, spec.vocab_size, length).tolist()
            rows, _ = cluster.run([token_ids])
            assert np.abs(rows - hidden_states(model_dir, [token_ids])).max() < TOLERANCE
            assert np.array_equal(cluster.run([token_ids])[0], rows)


def test_bert_base_shape_on_cuda_is_exact_and_repeatable(tmp_path: Path) -> None:
    model_dir = save_random_model(tmp_path / "model", BertConfig())
    spec = read_spec(model_dir)
    token_ids = np.random.default_rng(0).integers(0, spec.vocab_size, 301).tolist()
    plan = make_plan(spec, "hmp", (5, 4, 3))
    with EngineCluster(model_dir, plan, bytes_per_second=1e9, compute_device="cuda") as cluster:
        rows, _ = cluster.run([token_ids])
        for _ in range(5):
            assert np.array_equal(cluster.run([token_ids])[0], rows)
    assert np.abs(rows - hidden_states(model_dir, [token_ids])).max() < TOLERANCE


def test_staged_tensors_round_trip_on_cuda() -> None:
    from agent.worker.transformer.comm.staging import CudaStaging

    staging = CudaStaging()
    tensor = torch.randn(300, 700, device="cuda")
    for _ in range(20):  # buffers are reused many times and must never be read half copied
        waited = staging.to_wire(tensor)
        tile = waited()
        into = torch.empty_like(tensor)
        staging.from_wire(tile, into)
        doubled = into * 2
        assert torch.equal(doubled, tensor * 2)
        tensor = torch.randn(300, 700, device="cuda")
