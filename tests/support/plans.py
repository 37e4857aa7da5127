"""Plans and profiles for tests."""

from __future__ import annotations

from collections.abc import Sequence

from hearth.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, grains_to_items, largest_remainder, num_grains
from hearth.model.spec import ModelSpec
from hearth.plan import LayerMode, MemoryUse, Plan, PlannedDevice, Prediction, Strategy, TransformerPlan, WireFormat
from hearth.profile import BlockProfile, ClusterProfile, DeviceProfile, LatencyCurve, Link

BERT_LARGE = ModelSpec(
    name="bert-large", family="bert", num_layers=24, num_heads=16, num_kv_heads=16, head_dim=64, hidden_size=1024,
    ffn_size=4096, vocab_size=30522, max_positions=512, type_vocab_size=2, norm_eps=1e-12, activation="gelu",
    dtype="float32",
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
) -> Plan:
    """A plan whose heads, columns and vocabulary follow `weights`, one per device; no planner involved."""
    group = spec.num_heads // spec.num_kv_heads
    columns = largest_remainder(weights, num_grains(spec.ffn_size, COLUMN_GRAIN))
    vocabulary = largest_remainder(weights, num_grains(spec.vocab_size, VOCABULARY_GRAIN))
    body = TransformerPlan(
        strategy=strategy,
        overlap=overlap,
        heads=tuple(share * group for share in largest_remainder(weights, spec.num_kv_heads)),
        columns=grains_to_items(columns, spec.ffn_size, COLUMN_GRAIN),
        row_weights=tuple(row_weights or weights),
        vocabulary=grains_to_items(vocabulary, spec.vocab_size, VOCABULARY_GRAIN),
        modes=tuple(modes),
    )
    memory = MemoryUse(weights=0, embeddings=0, activations=0, workspace=0)
    devices = tuple(
        PlannedDevice(device_id=f"id{r}", name=f"device{r}", memory=memory, budget_bytes=0, compute_seconds=0.0)
        for r in range(len(weights))
    )
    predicted = Prediction(total_seconds=0.1, compute_seconds=0.1, transfer_seconds=0.0)
    return Plan(
        epoch=epoch, model=spec, planner="test", seq_len=spec.max_positions, devices=devices, body=body, wire=wire,
        predicted=predicted,
    )  # fmt: skip


def device_profile(
    index: int, speed: float, spec: ModelSpec = BERT_LARGE, seq_len: int = 284, budget_bytes: int = 8 << 30
) -> DeviceProfile:
    """A device whose every block takes time in proportion to its size, divided by `speed`."""

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
        ),
    )


def cluster(devices: Sequence[DeviceProfile], mbit: float, round_trip_seconds: float = 1e-3) -> ClusterProfile:
    """These devices with the same link between every two."""
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
