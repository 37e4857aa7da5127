"""Generation keeps host and device tensors apart, as CUDA requires; tested on the CPU with a marked device.

`MARKED` is the CPU with an index. Under `MarkedTensors`, tensors created on it or computed from such tensors are
`OnDevice`; all others are host tensors, from which a CUDA stream could not copy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.models import save_random_model, small_decoder
from support.plans import make_plan, with_generation

from coordinator.models.checkpoint.families import read_spec
from hearth.plan.transformer import GenerationLimits, Strategy

torch = pytest.importorskip("torch", reason="torch has no wheel for this Python here")
pytest.importorskip("transformers")

from support.engines import EngineCluster, GenerationCluster  # noqa: E402 (needs torch)
from support.reference import greedy  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from agent.worker.transformer.comm.staging import CpuStaging, WireTile  # noqa: E402

MARKED = torch.device("cpu", 0)


class OnDevice(torch.Tensor):
    """A tensor on the marked device. Results of operations on it are `OnDevice` too (torch's rule for subclasses)."""


class MarkedTensors(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        on_marked = any(isinstance(each, torch.device) and each == MARKED for each in (*args, *kwargs.values()))
        return result.as_subclass(OnDevice) if on_marked and isinstance(result, torch.Tensor) else result


class MarkedStaging(CpuStaging):
    device = MARKED

    def to_wire(self, tensor: torch.Tensor) -> WireTile:
        if not isinstance(tensor, OnDevice):  # torch rejects `record_stream` of a host tensor
            raise NotImplementedError(f"a host tensor of {tensor.dtype} was given to the device's copy stream")
        return super().to_wire(tensor)


@pytest.mark.parametrize("strategy", ["hmp", "megatron-tp", "sp", "pipeline"])
def test_leader_passes_only_device_tensors_to_staging(
    strategy: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir = save_random_model(tmp_path, small_decoder("llama"), generates=True)
    stagings = iter([MarkedStaging(), CpuStaging()])
    monkeypatch.setattr("support.engines.make_staging", lambda compute_device: next(stagings))
    plan = make_plan(read_spec(model_dir), strategy, (1, 1))
    plan = with_generation(plan, GenerationLimits(kv_tokens=512, max_sequences=4, prefill_rows=64))
    prompt = [5, 6, 7, 8, 9]
    with MarkedTensors(), EngineCluster(model_dir, plan) as cluster:
        home = GenerationCluster(cluster)
        request = home.submit(prompt, 6)
        home.run()
    assert home.answers[request] == greedy(model_dir, prompt, 6)
