"""The strategies to measure, and the plan that the real planner makes for each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from coordinator.plan.transformer.make import plan_transformer
from coordinator.plan.transformer.request import PlanRequest, on_subset, price
from hearth.errors import BadSetting, ModelDoesNotFit
from hearth.plan.model_spec import ModelSpec
from hearth.plan.parts import WireFormat
from hearth.plan.plan import TransformerPlan
from hearth.plan.profile import ClusterProfile
from hearth.plan.value_formats import Values
from hearth.platform.units import format_bytes

Name = Literal["local", "gloo-tp", "megatron-tp", "sp", "hmp-no-overlap", "hmp", "auto"]
Lz4 = Literal["auto", "on", "off"]
NAMES: tuple[Name, ...] = get_args(Name)
WIRES: tuple[Values, ...] = ("exact", "fp16", "bf16", "int8")  # in the order of the tables
_PLENTY_BYTES = 1 << 40  # memory budget of a device without a limit
_OF_PLANNER: dict[Name, Literal["auto", "local", "megatron-tp", "sp", "hmp"]] = {
    "local": "local", "megatron-tp": "megatron-tp", "sp": "sp", "hmp-no-overlap": "hmp", "hmp": "hmp", "auto": "auto",
}  # fmt: skip
GLOO_WIRES = ("exact", "fp16")


@dataclass(frozen=True)
class Entry:
    """One strategy with its wire settings, to be measured."""

    strategy: Name
    wire: Values = "exact"
    lz4: Lz4 = "auto"
    encrypt: bool = True

    @property
    def key(self) -> str:
        return f"{self.strategy}-{self.wire}-{self.lz4}-{'encrypted' if self.encrypt else 'plain'}"


REFERENCE = Entry("local", encrypt=False)


def entries(strategies: Iterable[Name], wires: Iterable[Values], plain: bool = False) -> tuple[Entry, ...]:
    """Every strategy in every wire format that it supports. `plain`: also hmp without encryption."""
    wires = tuple(wires)
    found = []
    for strategy in strategies:
        for wire in wires if strategy != "local" else ("exact",):
            if strategy != "gloo-tp" or wire in GLOO_WIRES:
                found.append(Entry(strategy, wire, encrypt=strategy not in ("local", "gloo-tp")))
            if plain and strategy == "hmp":
                found.append(Entry(strategy, wire, encrypt=False))
    return tuple(found)


def baseline_of(entry: Entry, measured: Sequence[Entry], strategy: str) -> Entry | None:
    """The entry to compare with: the baseline in the same wire format if it supports that, else in exact."""
    candidates = [other for other in measured if other.strategy == strategy and (other.encrypt or strategy != "hmp")]
    for wire in (entry.wire, "exact"):
        for candidate in candidates:
            if candidate.wire == wire and candidate.lz4 in (entry.lz4, "auto"):
                return candidate
    return None


def codec_baseline(entry: Entry, measured: Sequence[Entry]) -> Entry | None:
    """The same entry without lz4, if it is measured."""
    off = Entry(entry.strategy, entry.wire, "off", entry.encrypt)
    return off if off in measured else None


def plan_for(entry: Entry, spec: ModelSpec, cluster: ClusterProfile, seq_len: int) -> TransformerPlan:
    """The plan that the coordinator would make. Raises ModelDoesNotFit."""
    request = PlanRequest(
        spec=spec,
        cluster=cluster,
        seq_len=seq_len,
        wire=WireFormat(values=entry.wire, lz4=entry.lz4),
        strategy=_OF_PLANNER[entry.strategy],
    )
    plan = plan_transformer(request).plan
    if entry.strategy != "hmp-no-overlap":
        return plan
    names = tuple(device.device_id for device in plan.devices)
    body = plan.body.model_copy(update={"overlap": False})
    return price(on_subset(request, names), body, plan.planner)


def reference_plan(spec: ModelSpec, cluster: ClusterProfile, seq_len: int) -> TransformerPlan:
    """The plan on one device without memory limits, whose output is the reference."""
    return plan_for(REFERENCE, spec, without_limits(cluster), seq_len)


def without_limits(cluster: ClusterProfile) -> ClusterProfile:
    """The same cluster with practically unlimited memory."""
    devices = tuple(device.model_copy(update={"budget_bytes": _PLENTY_BYTES}) for device in cluster.devices)
    return cluster.model_copy(update={"devices": devices})


def depth_note(entry: Entry, spec: ModelSpec, num_layers: int, cluster: ClusterProfile, seq_len: int) -> str:
    """A note if the full-depth model would not fit; empty if it would, or if all layers are run."""
    if num_layers <= spec.num_layers or entry.strategy == "gloo-tp":
        return ""
    try:
        plan_for(entry, spec.model_copy(update={"num_layers": num_layers}), cluster, seq_len)
    except ModelDoesNotFit as error:
        return f"all {num_layers} layers would not fit: {format_bytes(error.missing_bytes)} are missing"
    return ""


def describe(plan: TransformerPlan) -> str:
    names = ", ".join(device.name for device in plan.devices)
    modes = sorted({mode.model_dump_json() for mode in plan.body.modes})
    kinds = f" ({len(modes)} kinds of layers)" if len(modes) > 1 else ""
    return f"{plan.body.strategy} on {names}{kinds}"


def parse_names(text: str) -> tuple[Name, ...]:
    """Parse a list of strategies. Raises BadSetting."""
    return tuple(name for name in NAMES if name in _listed("--strategies", text, NAMES))


def parse_wires(text: str) -> tuple[Values, ...]:
    """Parse a list of wire formats. Raises BadSetting."""
    return tuple(wire for wire in WIRES if wire in _listed("--wires", text, WIRES))


def _listed(setting: str, text: str, known: Sequence[str]) -> set[str]:
    found = {part.strip() for part in text.split(",") if part.strip()}
    for part in sorted(found):
        if part not in known:
            raise BadSetting(setting=setting, reason=f"'{part}' is none of {', '.join(known)}")
    if not found:
        raise BadSetting(setting=setting, reason=f"it is empty; name some of {', '.join(known)}")
    return found
