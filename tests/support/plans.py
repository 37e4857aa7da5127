"""Plans and profiles for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hearth.plan.common import MemoryUse, PlannedDevice, Prediction, WireFormat
from hearth.plan.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, grains_to_items, largest_remainder, num_grains
from hearth.plan.model_spec import ModelSpec, RotarySpec
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import BlockProfile, ClusterProfile, DeviceProfile, LatencyCurve, Link
from hearth.plan.transformer import (
    GenerationLimits,
    LayerMode,
    Pipeline,
    Placement,
    Strategy,
    TensorParallel,
    TransformerBody,
)

BERT_LARGE = ModelSpec(
    name="bert-large", family="bert", num_layers=24, num_heads=16, num_kv_heads=16, head_dim=64, hidden_size=1024,
    ffn_size=4096, vocab_size=30522, max_positions=512, type_vocab_size=2, norm_eps=1e-12, activation="gelu",
    dtype="float32",
)  # fmt: skip

# Grouped queries, a gated MLP, RMS norms, rotary positions and a separate head.
LLAMA_1B = ModelSpec(
    name="llama-1b", family="llama", num_layers=16, num_heads=32, num_kv_heads=8, head_dim=64, hidden_size=2048,
    ffn_size=8192, vocab_size=32000, max_positions=8192, type_vocab_size=0, norm_eps=1e-5, activation="silu",
    dtype="bfloat16", causal=True, norm="rms", norm_place="pre", gated=True, qkv_bias=False, out_bias=False,
    mlp_bias=False, rotary=RotarySpec(), tied_head=False,
)  # fmt: skip


PLAIN_WIRE = WireFormat(lz4="off")


def make_plan(
    spec: ModelSpec,
    strategy: Strategy,
    weights: Sequence[float],
    row_weights: Sequence[float] | None = None,
    wire: WireFormat = PLAIN_WIRE,
    overlap: bool = True,
    epoch: int = 1,
    modes: Sequence[LayerMode] = (),
    generation: GenerationLimits | None = None,
    embedding: Placement = "sharded",
) -> TransformerPlan:
    """A plan whose heads, columns and vocabulary follow `weights`, one per device, without a planner.

    By default a decoder's plan has memory for four sequences of the model's full length.
    """
    if generation is None and spec.causal:
        length = spec.max_positions
        generation = GenerationLimits(kv_tokens=4 * length, max_sequences=8, prefill_rows=length, context=length)
    memory = MemoryUse(weights=0, embeddings=0, activations=0, workspace=0)
    devices = tuple(
        PlannedDevice(device_id=f"id{r}", name=f"device{r}", memory=memory, budget_bytes=0, compute_seconds=0.0)
        for r in range(len(weights))
    )
    predicted = Prediction(  # gives timeouts of a minute
        latency_seconds=3.0, compute_seconds=3.0, transfer_seconds=0.0, bottleneck_seconds=3.0
    )
    return TransformerPlan(
        epoch=epoch, model=spec, planner="test", devices=devices, wire=wire, predicted=predicted,
        body=_body(spec, strategy, weights, row_weights, overlap, modes, generation, embedding),
    )  # fmt: skip


def on_devices(plan: TransformerPlan, names: Sequence[str]) -> TransformerPlan:
    """The plan with these names and ids of its devices."""
    devices = (
        each.model_copy(update={"device_id": name, "name": name})
        for each, name in zip(plan.devices, names, strict=True)
    )
    return plan.model_copy(update={"devices": tuple(devices)})


def with_generation(plan: TransformerPlan, limits: GenerationLimits | None) -> TransformerPlan:
    """The plan with these limits for generation."""
    return plan.model_copy(update={"body": plan.body.model_copy(update={"generation": limits})})


def with_seq_len(body: TransformerBody, seq_len: int, limits: GenerationLimits | None = None) -> TransformerBody:
    """The body for steps of this length, and with these limits for generation or none."""
    return body.model_copy(update={"seq_len": seq_len, "generation": limits})


def _body(
    spec: ModelSpec,
    strategy: Strategy,
    weights: Sequence[float],
    row_weights: Sequence[float] | None,
    overlap: bool,
    modes: Sequence[LayerMode],
    generation: GenerationLimits | None,
    embedding: Placement,
) -> TransformerBody:
    if strategy == "pipeline":
        stages = Pipeline.of(spec, largest_remainder(weights, spec.num_layers), spec.max_positions)
        return stages.model_copy(update={"generation": generation})
    columns = largest_remainder(weights, num_grains(spec.ffn_size, COLUMN_GRAIN))
    vocabulary = largest_remainder(weights, num_grains(spec.vocab_size, VOCABULARY_GRAIN))
    return TensorParallel(
        strategy=strategy,
        seq_len=spec.max_positions,
        generation=generation,
        overlap=overlap,
        heads=tuple(share * spec.group_size for share in largest_remainder(weights, spec.num_kv_heads)),
        columns=grains_to_items(columns, spec.ffn_size, COLUMN_GRAIN),
        row_weights=tuple(row_weights or weights),
        vocabulary=grains_to_items(vocabulary, spec.vocab_size, VOCABULARY_GRAIN),
        modes=tuple(modes),
        embedding=embedding,
    )


def device_profile(
    index: int, speed: float, spec: ModelSpec = BERT_LARGE, seq_len: int = 284, budget_bytes: int = 8 << 30
) -> DeviceProfile:
    """A device whose block times are proportional to size, divided by `speed`; it decodes at 10 GB/s."""

    def curve(total: int, seconds: float) -> LatencyCurve:
        return LatencyCurve(sizes=(total,), seconds=(seconds / speed,))

    return DeviceProfile(
        device_id=f"id{index}",
        name=f"device{index}",
        budget_bytes=budget_bytes,
        blocks=BlockProfile(
            seq_len=seq_len,
            qkv=curve(spec.num_heads, 0.05),
            core=curve(spec.num_heads, 0.014),
            out=curve(spec.num_heads, 0.016),
            up=curve(spec.ffn_size, 0.07),
            down=curve(spec.ffn_size, 0.07),
            connective=curve(seq_len, 0.002),
            embedding=curve(seq_len, 0.002),
            mlp_rows=curve(seq_len, 0.14),
            decode_seconds_per_byte=1e-10 / speed if spec.causal else 0.0,
            decode_layer_seconds=5e-5 / speed if spec.causal else 0.0,
        ),
    )


def cluster(devices: Sequence[DeviceProfile], mbit: float, round_trip_seconds: float = 1e-3) -> ClusterProfile:
    """These devices with equal links between all pairs."""
    links = tuple(
        Link(
            source=a.device_id,
            target=b.device_id,
            bytes_per_second=mbit * 1e6 / 8,
            round_trip_seconds=round_trip_seconds,
        )
        for a in devices
        for b in devices
        if a.device_id != b.device_id
    )
    return ClusterProfile(devices=tuple(devices), links=links)


def with_rates(home: ClusterProfile, rate: Callable[[Link], float]) -> ClusterProfile:
    """The cluster with these rates of its links, in bytes/s."""
    links = tuple(link.model_copy(update={"bytes_per_second": rate(link)}) for link in home.links)
    return home.model_copy(update={"links": links})


def with_blocks(device: DeviceProfile, **changes: Any) -> DeviceProfile:
    """The device with these changes of its blocks' profile."""
    return device.model_copy(update={"blocks": device.blocks.model_copy(update=changes)})
