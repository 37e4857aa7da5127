"""The simulated model: functions of a request that can be checked, six chunks of weights, and plans with equal shares."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.plans import device_profile, make_plan

from coordinator.deploy.chunk_scheduler import Chunk
from coordinator.deploy.deployment import Weights
from coordinator.devices.profiling import Profiler, fully_linked_devices
from coordinator.devices.registry import Device
from coordinator.plan.transformer.request import GenerationRequest
from coordinator.serve.goal import TransformerModel
from coordinator.serve.state import TransformerGoal
from hearth.errors import NoDevices
from hearth.plan.common import Prediction
from hearth.plan.model_spec import ModelSpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile, DeviceProfile, Link
from hearth.wire.messages import ChunkRef, Sampling, ShardParts

NUM_CHUNKS = 6  # one for each KV group: with up to six devices every one holds at least one
VOCABULARY = 1000
CONTEXT = 64  # tokens of a sequence
STEP_SECONDS = 0.06  # predicted time of a step on one device

BYTES_PER_SECOND, ROUND_TRIP_SECONDS = 1e8, 1e-3  # of each link, as it is measured

_GENERATION = GenerationRequest(CONTEXT, sequences=64)


@lru_cache
def spec(causal: bool) -> ModelSpec:
    return ModelSpec(
        name="simulated", family="bert", num_layers=1, num_heads=NUM_CHUNKS, num_kv_heads=NUM_CHUNKS, head_dim=4,
        hidden_size=4, ffn_size=64 * NUM_CHUNKS, vocab_size=VOCABULARY, max_positions=CONTEXT, type_vocab_size=0,
        norm_eps=1e-5, activation="gelu", dtype="float32", causal=causal,
    )  # fmt: skip


# ---- weights ------------------------------------------------------------------------------------------------------------


def chunk_content(grain: int) -> bytes:
    return f"weights of group {grain} ".encode() * 8


HASHES = tuple(hashlib.sha256(chunk_content(grain)).hexdigest() for grain in range(NUM_CHUNKS))
_REFS = tuple(
    ChunkRef(hash=HASHES[grain], num_bytes=len(chunk_content(grain)), kind="qkv", layer=0, grain=grain)
    for grain in range(NUM_CHUNKS)
)
_CHECKSUMS = {grain: zlib.crc32(chunk_content(grain)) for grain in range(NUM_CHUNKS)}


def checksum(contents: Sequence[bytes]) -> int:
    """A number that depends on the weights of some chunks; those of all ranks are added up."""
    return sum(map(zlib.crc32, contents))


WEIGHTS_CHECKSUM = sum(_CHECKSUMS.values())


def rank_refs(plan: TransformerPlan, rank: int) -> tuple[ChunkRef, ...]:
    first = sum(plan.body.heads[:rank])
    return _REFS[first : first + plan.body.heads[rank]]


async def shard_weights(
    model_dir: Path, plan: TransformerPlan, cache_dir: Path, kernels: Mapping[str, Any], *others: Any
) -> Weights:
    """Stands for `coordinator.deploy.transformer.shard_weights`."""
    refs = [rank_refs(plan, rank) for rank in range(plan.num_ranks)]
    return Weights(
        [[Chunk(ref.hash, ref.num_bytes, lambda ref=ref: chunk_content(ref.grain)) for ref in each] for each in refs],
        [ShardParts(chunks=each) for each in refs],
    )


# ---- answers ------------------------------------------------------------------------------------------------------------


def hidden_rows(token_ids: Sequence[int], weights: int) -> np.ndarray[Any, Any]:
    """The rows [T,H] of one step."""
    rows = np.zeros((len(token_ids), 4), np.float32)
    for row, token in enumerate(token_ids):
        rows[row] = (token, row, len(token_ids), weights % 9973)
    return rows


def next_token(tokens: Sequence[int], sampling: Sampling, index: int, weights: int) -> int:
    """The token after these; `index` is its number in the answer."""
    text = f"{list(tokens)} {sampling.temperature} {sampling.seed} {index} {weights}"
    return zlib.crc32(text.encode()) % VOCABULARY


def expected_answer(prompt: Sequence[int], sampling: Sampling, num_tokens: int) -> list[int]:
    tokens: list[int] = []
    for index in range(num_tokens):
        tokens.append(next_token([*prompt, *tokens], sampling, index, WEIGHTS_CHECKSUM))
    return tokens


# ---- plans --------------------------------------------------------------------------------------------------------------


def open_transformer(goal: TransformerGoal, state_dir: Path) -> TransformerModel:
    """Stands for `coordinator.serve.opening.open_checked`; the goal's path names the kind of model."""
    causal = Path(goal.model_dir).name == "decoder"
    return TransformerModel(Path(goal.model_dir), spec(causal), CONTEXT, None, _GENERATION if causal else None)


@lru_cache
def link(source: str, target: str) -> Link:
    """A measured link between two device ids."""
    return Link(source=source, target=target, bytes_per_second=BYTES_PER_SECOND, round_trip_seconds=ROUND_TRIP_SECONDS)


@lru_cache
def profile_of(device_id: str, name: str, causal: bool) -> DeviceProfile:
    profile = device_profile(0, 1.0, spec(causal), CONTEXT)
    return profile.model_copy(update={"device_id": device_id, "name": name})


async def block_cluster(profiler: Profiler, devices: Sequence[Device], workload: Any, taken: Any) -> ClusterProfile:
    """Stands for `coordinator.devices.block_profiling.block_cluster`: measures links, but not the devices' speed."""
    links = await profiler.measure_links(devices)
    connected = fully_linked_devices([device.device_id for device in devices], links)
    if not connected:
        raise NoDevices(seconds=0)
    causal = workload.request.subject.model.causal
    return ClusterProfile(
        devices=tuple(
            profile_of(device.device_id, device.name, causal) for device in devices if device.device_id in connected
        ),
        links=tuple(link for pair, link in links.items() if connected.issuperset(pair)),
    )


@lru_cache(maxsize=4096)
def plan_for(devices: tuple[tuple[str, str], ...], causal: bool) -> TransformerPlan:
    """A plan with equal shares for these devices, given as pairs of id and name."""
    strategy: Any = "hmp" if len(devices) > 1 else "local"
    plan = make_plan(
        spec(causal), strategy, [1.0] * len(devices), generation=_GENERATION.limits(CONTEXT) if causal else None
    )
    named = tuple(
        planned.model_copy(update={"device_id": device_id, "name": name})
        for planned, (device_id, name) in zip(plan.devices, devices, strict=True)
    )
    seconds = STEP_SECONDS / len(devices)
    predicted = Prediction(
        latency_seconds=seconds, compute_seconds=seconds, transfer_seconds=0.0, bottleneck_seconds=seconds
    )
    return plan.model_copy(update={"devices": named, "predicted": predicted})


async def solve_transformer(request: Any, *_: Any) -> Any:
    """Stands for `coordinator.serve.planners.process.solve_transformer`."""
    return SimpleNamespace(plan=build_plan(request), notes=())


async def plans_or_errors(kind: str, requests: Sequence[Any]) -> list[Any]:
    """Stands for `coordinator.serve.planners.process.plans_or_errors`."""
    return [build_plan(request) for request in requests]


def build_plan(request: Any, *_: Any) -> TransformerPlan:
    """Stands for `coordinator.plan.transformer.request.build_plan`."""
    devices = tuple((device.device_id, device.name) for device in request.cluster.devices[:NUM_CHUNKS])
    return plan_for(devices, request.spec.causal)


def request_seconds(plan: TransformerPlan) -> float:
    """Stands for `coordinator.plan.transformer.cost.predict.request_seconds`."""
    return plan.predicted.latency_seconds
