"""The coordinator's part of a push, one step per request: `python -m tools.bench.pusher ipc://PATH KEY ADDRESS`.

Uses the product's code (`Fleet`, `Deployment`) and imports what `hearth serve` imports, so that its memory use is that of a
coordinator.
"""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import permutations
from pathlib import Path
from typing import Any

import coordinator.serve.service  # noqa: F401 (imported for its memory use)
from coordinator.deploy.transformer import TransformerDeployment, shard_weights
from coordinator.devices.fleet import Fleet
from coordinator.models.checkpoint.checkpoint import Checkpoint
from coordinator.models.checkpoint.families import read_spec
from coordinator.models.checkpoint.sharding import cached_manifest
from hearth.errors import BadKey, DeadlineExceeded
from hearth.plan.plan import TransformerPlan, plan_from_json
from hearth.plan.profile import Link
from hearth.platform.security import HomeKey, agent_access, load_credential
from tools.bench.child import AsyncTarget, serve

_SETTLE_SECONDS = 60.0  # timeout of waiting for devices: longer than a killed coordinator's leases last
_POLL_SECONDS = 0.05  # between two looks at the fleet


class Pusher(AsyncTarget):
    """A fleet, whose heartbeats run between calls too, and the deployment made on it."""

    def __init__(self, key: Path, address: str) -> None:
        super().__init__()
        home = load_credential(key)
        if not isinstance(home, HomeKey):
            raise BadKey(source=str(key), reason="a coordinator needs the home key")
        self._fleet = Fleet(agent_access(home), lease_name="bench", interfaces=[address])
        self.run(self._fleet.__aenter__())
        self._deployment: TransformerDeployment | None = None
        self._epoch = 0

    async def devices(self, names: list[str]) -> dict[str, Any]:
        """Wait until exactly these devices are usable; returns their ids by name. Raises DeadlineExceeded."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (ids := {device.name: device.device_id for device in self._fleet.usable()}).keys() != set(names):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(action="the devices", seconds=_SETTLE_SECONDS)
            await asyncio.sleep(_POLL_SECONDS)
        return {"ids": ids}

    def read(self, model_dir: str, cache_dir: str, weights: str) -> dict[str, Any]:
        """Hash a checkpoint; the manifest is cached."""
        spec = read_spec(Path(model_dir)).model_copy(update={"weights": weights})
        began = time.perf_counter()
        with Checkpoint(Path(model_dir)) as checkpoint:
            refs = cached_manifest(checkpoint, spec, Path(cache_dir))
        return {"seconds": time.perf_counter() - began, "num_bytes": sum(ref.num_bytes for ref in refs)}

    async def push(self, plan: str, model_dir: str, cache_dir: str) -> dict[str, Any]:
        """Push a plan's missing chunks; returns seconds, and bytes as counted by `Distribution`."""
        parsed = plan_from_json(plan, TransformerPlan)
        began = time.perf_counter()
        done = await self._pushed(parsed, model_dir, cache_dir)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "sent_bytes": done.sent_bytes, "passed_bytes": done.forwarded_bytes}

    async def load(self, plan: str, model_dir: str, cache_dir: str) -> None:
        """Push a plan, start and connect the workers."""
        self._epoch = max(self._epoch, self._fleet.last_epoch) + 1
        parsed = plan_from_json(plan, TransformerPlan).with_epoch(self._epoch)
        self._deployment = await self._pushed(parsed, model_dir, cache_dir)
        ids = [device.device_id for device in parsed.devices]
        links = {
            (a, b): Link(source=a, target=b, bytes_per_second=1e7, round_trip_seconds=1e-3)
            for a, b in permutations(ids, 2)
        }
        await self._deployment.load(links, encrypt=True)

    async def unload(self) -> None:
        if self._deployment is not None:
            await self._deployment.close()

    async def _pushed(self, plan: TransformerPlan, model_dir: str, cache_dir: str) -> TransformerDeployment:
        deployment = TransformerDeployment(self._fleet, plan)
        weights = shard_weights(Path(model_dir), plan, Path(cache_dir))
        await deployment.push(weights, lambda device, done, total: None)
        return deployment


if __name__ == "__main__":
    serve(sys.argv[1], Pusher(Path(sys.argv[2]), sys.argv[3]))
