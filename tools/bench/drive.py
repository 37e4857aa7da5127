"""Drives the runners of a benchmark: loads plans, runs steps on all devices at once, and times them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from agent.store import ShardStore
from hearth.errors import DeadlineExceeded, InternalError
from hearth.messages import ChunkRef
from hearth.model.checkpoint import Checkpoint
from hearth.model.families import read_spec
from hearth.model.sharding import chunk_bytes, chunks_for_rank, manifest
from hearth.model.spec import ModelSpec
from hearth.plan import Plan
from tools.testbed import Testbed

import sys

_ANSWER_SECONDS = 180.0
_GLOO_PORT = 29511


@dataclass(frozen=True)
class Sample:
    """One step: from the first device's start to the last one's end."""

    seconds: float
    cpu_seconds: tuple[float, ...]
    sent_bytes: int
    raw_bytes: int
    sums: list[float]
    traces: tuple[list[dict[str, Any]], ...] = ()


class StoredModel:
    """A checkpoint with its chunks in one store that all runners map."""

    def __init__(self, model_dir: Path, store_dir: Path) -> None:
        self.directory = model_dir
        self.store_dir = store_dir
        self.spec: ModelSpec = read_spec(model_dir)
        store = ShardStore(store_dir, 1 << 40, "bench")
        with Checkpoint(model_dir) as checkpoint:
            self.refs: tuple[ChunkRef, ...] = manifest(checkpoint, self.spec)
            for ref in self.refs:
                if store.missing((ref.hash,)):
                    store.put(ref.hash, chunk_bytes(checkpoint, self.spec, ref.kind, ref.layer, ref.grain))


class _Group:
    """Processes that answer JSON requests, one per device."""

    def __init__(self, testbed: Testbed, devices: Sequence[str], kind: str) -> None:
        self.devices = list(devices)
        self._testbed = testbed
        self._kind = kind
        self._context: zmq.Context[Any] = zmq.Context.instance()
        self._sockets: dict[str, zmq.Socket[Any]] = {}

    def start(self, name: str, *arguments: str) -> None:
        address = f"ipc://{self._testbed.folder / f'{self._kind}-{name}'}"
        socket = self._context.socket(zmq.PAIR)
        socket.linger = 0
        socket.bind(address)
        self._sockets[name] = socket
        module = f"tools.bench.{self._kind}"
        with (self._testbed.folder / f"{self._kind}-{name}.log").open("ab") as log:
            self._testbed.popen(
                name, sys.executable, "-m", module, address, *arguments, stdout=log, stderr=log,
                memory_limited=False, environment={"GLOO_SOCKET_IFNAME": "eth0"},
            )  # fmt: skip

    def ask(self, requests: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Send to all at once, then wait for all. Raises InternalError with what a runner said."""
        for name, request in requests.items():
            self._sockets[name].send(json.dumps(request).encode())
        answers = {}
        for name in requests:
            if not self._sockets[name].poll(int(_ANSWER_SECONDS * 1000)):
                raise DeadlineExceeded(action=f"{self._kind} on {name}", seconds=_ANSWER_SECONDS)
            answers[name] = json.loads(self._sockets[name].recv())
        for name, answer in answers.items():
            if "error" in answer:
                raise InternalError(where=f"{self._kind} on {name}", reason=answer["error"])
        return answers

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close()


class EngineRunners(_Group):
    """The worker's engine on every device; any number of plans stay loaded."""

    def __init__(self, testbed: Testbed, devices: Sequence[str]) -> None:
        super().__init__(testbed, devices, "runner")
        for name in devices:
            self.start(name, testbed.address(name))
        self._plans: dict[str, Plan] = {}

    def load(self, plan_id: str, plan: Plan, model: StoredModel, encrypt: bool, link_bytes_per_second: float) -> None:
        """The plan's devices are named as the testbed's."""
        names = [device.name for device in plan.devices]
        bound = self.ask(
            {
                name: {
                    "do": "load", "plan_id": plan_id, "plan": plan.model_dump_json(), "rank": rank,
                    "chunks": [ref.model_dump() for ref in chunks_for_rank(model.refs, plan, rank)],
                    "store": str(model.store_dir), "encrypt": encrypt,
                }
                for rank, name in enumerate(names)
            }
        )  # fmt: skip
        self.ask(
            {
                name: {
                    "do": "connect",
                    "plan_id": plan_id,
                    "peers": [
                        {
                            "rank": rank, "host": self._testbed.address(other),
                            "bytes_per_second": link_bytes_per_second, **bound[other],
                        }
                        for rank, other in enumerate(names)
                        if other != name
                    ],
                }
                for name in names
            }
        )  # fmt: skip
        self._plans[plan_id] = plan

    def run(self, plan_id: str, num_rows: int, trace: bool = False) -> Sample:
        request = {"do": "run", "plan_id": plan_id, "num_rows": num_rows, "trace": trace}
        answers = self.ask({device.name: request for device in self._plans[plan_id].devices})
        parts = list(answers.values())
        return Sample(
            seconds=max(part["ended"] for part in parts) - min(part["began"] for part in parts),
            cpu_seconds=tuple(part["cpu_seconds"] for part in parts),
            sent_bytes=sum(part["wire"]["sent_bytes"] for part in parts),
            raw_bytes=sum(part["wire"]["raw_bytes"] for part in parts),
            sums=[sum(values) for values in zip(*(part["sums"] for part in parts), strict=True)],
            traces=tuple(part["trace"] for part in parts),
        )

    def unload(self, plan_id: str) -> None:
        names = [device.name for device in self._plans.pop(plan_id).devices]
        self.ask({name: {"do": "unload", "plan_id": plan_id} for name in names})


class GlooRunners(_Group):
    """torch.distributed on gloo over the given devices."""

    def __init__(self, testbed: Testbed, devices: Sequence[str]) -> None:
        super().__init__(testbed, devices, "gloo")
        host = testbed.address(devices[0])
        for rank, name in enumerate(devices):
            self.start(name, str(rank), str(len(devices)), host, str(_GLOO_PORT))

    def load(self, model: StoredModel) -> None:
        path = str(model.directory / "model.safetensors")
        spec = model.spec
        request = {"do": "load", "path": path, "num_heads": spec.num_heads, "num_layers": spec.num_layers}
        self.ask({name: request for name in self.devices})

    def run(self, num_rows: int, wire: str) -> Sample:
        answers = self.ask({name: {"do": "run", "num_rows": num_rows, "wire": wire} for name in self.devices})
        parts = list(answers.values())
        return Sample(
            seconds=max(part["ended"] for part in parts) - min(part["began"] for part in parts),
            cpu_seconds=tuple(part["cpu_seconds"] for part in parts),
            sent_bytes=0,
            raw_bytes=0,
            sums=parts[0]["sums"],
        )
