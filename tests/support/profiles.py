"""Profiles of this machine for the devices of test homes: each model is measured once in a test session.

All agents of a test home run on this machine, with the same settings, so what one measures holds for the others. A
coordinator finds the copy of the measurement in its cache, as after a restart, and profiles nothing.
"""

from __future__ import annotations

import asyncio
import fcntl
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agent.daemon.supervisor import run_child
from coordinator.devices.block_profiling import block_workload
from coordinator.devices.graph_profiling import graph_workload
from coordinator.devices.profile_cache import Workload, result_path
from coordinator.models.graph_file import read_graph_file
from coordinator.serve.goal import open_transformer
from coordinator.serve.state import TransformerGoal
from hearth.wire.messages import Profiled, StartProfile

# The settings that a result depends on: `TestHome` starts each agent with one thread, and these tests use no GPU.
_SETTINGS = (1, "cpu")


class MeasuredProfiles:
    """Profiles in `folder`, which the workers of pytest-xdist share. A model is measured when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def copy_to(self, cache_dir: Path, model: Path, device_ids: Iterable[str], *options: str) -> None:
        """Write the profile of a model into a coordinator's cache for each device, unless the cache has one.

        `options`: of `hearth serve`.
        """
        workload = _workload(model, options)
        paths = [result_path(cache_dir, workload, device_id, _SETTINGS) for device_id in device_ids]
        if all(path.exists() for path in paths):
            return
        profile = self._measured(workload)
        cache_dir.mkdir(parents=True, exist_ok=True)
        for path in paths:
            if not path.exists():
                path.write_bytes(profile)

    def _measured(self, workload: Workload[Any]) -> bytes:
        path = result_path(self._folder, workload, "this machine", _SETTINGS)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # closing the file unlocks it
            if not path.exists():
                path.write_text(asyncio.run(_measure(workload)).result.model_dump_json())
        return path.read_bytes()


def _workload(model: Path, options: tuple[str, ...]) -> Workload[Any]:
    if model.is_file():
        return graph_workload(read_graph_file(model, {}))
    given = dict(zip(options, options[1:], strict=False))
    goal = TransformerGoal.model_validate(
        {"model_dir": str(model), "seq_len": given.get("--seq-len"), "context": given.get("--context")}
    )
    opened = open_transformer(goal)
    return block_workload(opened.spec, opened.seq_len)


async def _measure(workload: Workload[Any]) -> Profiled:
    """Measure with the process that an agent starts for it."""
    module = "agent.worker.graph.profiler" if workload.cache_prefix == "graph" else "agent.worker.transformer.profiler"
    with tempfile.TemporaryDirectory(prefix="hearth-profile-") as folder:
        (Path(folder) / "graph.onnx").write_bytes(b"".join(workload.frames()))
        num_threads, compute_device = _SETTINGS
        start = StartProfile(
            profile=workload.request, device="this machine", folder=folder, num_threads=num_threads,
            compute_device=compute_device,
        )  # fmt: skip
        profiled = await run_child(module, start, workload.request.timeout_seconds, device="this machine")
    assert isinstance(profiled, Profiled)
    return profiled
