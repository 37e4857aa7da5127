"""A plan: which device holds what, and how they work together. Printed, saved as JSON, loaded again. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hearth.errors import BadPlan
from hearth.plan.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, Span, grains_of, spans
from hearth.plan.model_spec import ModelSpec
from hearth.validation import first_error

Strategy = Literal["local", "megatron-tp", "sp", "hmp", "pipeline"]
Values = Literal["exact", "bf16", "fp16", "int8"]
Placement = Literal["sharded", "replicated"]
# A wait for a peer may take this many times what the whole step or request is predicted to take ...
_WAIT_FACTOR = 20.0
# ... but never less than this: the prediction knows nothing of a busy household, and heartbeats tell of a lost device.
_MIN_WAIT_SECONDS = 5.0
STRATEGIES: tuple[Strategy, ...] = ("local", "megatron-tp", "sp", "hmp", "pipeline")


def patience_seconds(predicted_seconds: float) -> float:
    """How long a wait for a peer may last inside something that is predicted to take so long."""
    return max(_MIN_WAIT_SECONDS, _WAIT_FACTOR * predicted_seconds)


class WireFormat(BaseModel):
    """How activations travel: the value format, and whether lz4 (after a byte shuffle) is applied."""

    model_config = ConfigDict(frozen=True)

    values: Values = "exact"
    lz4: Literal["off", "on", "auto"] = "auto"


class MemoryUse(BaseModel):
    """Bytes that one device will hold, by kind."""

    model_config = ConfigDict(frozen=True)

    weights: int = Field(ge=0)
    embeddings: int = Field(ge=0)
    activations: int = Field(ge=0)
    workspace: int = Field(ge=0)  # the process itself, torch and its GEMM buffers, one chunk while loading
    kv_cache: int = Field(default=0, ge=0)  # of all sequences that the plan promises to hold at once

    @property
    def total(self) -> int:
        return self.weights + self.embeddings + self.activations + self.workspace + self.kv_cache


class PlannedDevice(BaseModel):
    model_config = ConfigDict(frozen=True)

    device_id: str
    name: str
    memory: MemoryUse
    budget_bytes: int = Field(ge=0)
    compute_seconds: float = Field(ge=0)  # busy time of this device in one step, as the simulator prices it


class LayerMode(BaseModel):
    """Which weight groups of a layer every rank with rows holds whole (ALGORITHMS.md section 5): memory for traffic.

    Rows are split throughout. With `attention` by heads, replicated QKV and output projections are followed and preceded
    by an all-to-all; by rows (which needs both replicated), K and V of all rows are gathered instead.
    """

    model_config = ConfigDict(frozen=True)

    qkv: Placement = "sharded"
    out: Placement = "sharded"
    mlp: Placement = "sharded"
    attention: Literal["heads", "rows"] = "heads"

    @model_validator(mode="after")
    def _possible(self) -> LayerMode:
        if self.attention == "rows" and "sharded" in (self.qkv, self.out):
            raise ValueError("attention by rows needs the QKV and output projections replicated")
        return self


SHARDED = LayerMode()
SEQUENCE = LayerMode(qkv="replicated", out="replicated", mlp="replicated", attention="rows")


class Holding(NamedTuple):
    """What one rank holds of one layer: heads of QKV, heads of the output projection, MLP columns, the norms."""

    qkv: Span
    out: Span
    columns: Span
    connective: bool


class TransformerPlan(BaseModel):
    """Shares of each rank; ranks are the plan's devices in ring order.

    `heads` (KV groups times query heads per group: plain heads for BERT), `columns` and `vocabulary` are counts of
    items that lie on the sharding grains. `row_weights` gives the rows of a step by `geometry.rows_for`. `modes` holds
    one mode per layer under `hmp`; empty: every layer is sharded. Under `sp` every layer is `SEQUENCE`. `exact_links` are
    pairs (sender, receiver) of ranks between which a lossy wire format would save no time: they carry exact values.
    A decoder's prefill step is cut into `micro_batches` of rows, which are in flight at once: one's communication hides
    under another's compute.

    A `pipeline` splits layers instead: rank r is the stage of `layers[r]` whole layers, with all their heads and columns.
    The first stage holds the vocabulary: it looks words up, and the last one hands a decoder's rows back to it, so that
    tied weights are held once and what travels for a token is its hidden row. Who gets the rows in the end has all of
    `row_weights`: a decoder's first stage, an encoder's last. A decoder's prompt passes in chunks of `chunk_rows`.
    """

    model_config = ConfigDict(frozen=True)

    kind: Literal["transformer"] = "transformer"
    strategy: Strategy
    overlap: bool = True  # tile overlap of the rings (hmp only); off is for comparison
    heads: tuple[int, ...]
    columns: tuple[int, ...]
    row_weights: tuple[float, ...]
    vocabulary: tuple[int, ...]
    modes: tuple[LayerMode, ...] = Field(default=(), max_length=1024)
    exact_links: tuple[tuple[int, int], ...] = Field(default=(), max_length=1 << 16)
    layers: tuple[int, ...] = Field(default=(), max_length=256)  # pipeline only: of each rank
    micro_batches: int = Field(default=1, ge=1, le=4)  # of a decoder's prefill step, in flight at once
    chunk_rows: int = Field(default=0, ge=0)  # pipeline only: of a prefill step at most; 0: as many as there may be

    @classmethod
    def pipeline(
        cls, spec: ModelSpec, layers: Sequence[int], chunk_rows: int = 0, exact_links: Sequence[tuple[int, int]] = ()
    ) -> TransformerPlan:
        """Stages of so many layers."""
        num_ranks = len(layers)
        owner = 0 if spec.causal else num_ranks - 1
        return cls(
            strategy="pipeline",
            heads=(spec.num_heads,) * num_ranks,
            columns=(spec.ffn_size,) * num_ranks,
            row_weights=tuple(float(rank == owner) for rank in range(num_ranks)),
            vocabulary=(spec.vocab_size, *[0] * (num_ranks - 1)),
            exact_links=tuple(exact_links),
            layers=tuple(layers),
            chunk_rows=chunk_rows,
        )

    def layers_of(self, rank: int, num_layers: int) -> Span:
        """The layers that a rank holds of: all but in a pipeline."""
        return spans(self.layers)[rank] if self.layers else Span(0, num_layers)

    @property
    def max_steps_in_flight(self) -> int:
        """How many steps of a generation may be under way: in a pipeline one in each stage and on each way between two."""
        return max(2 * len(self.layers) - 1, 1)

    def values_on(self, source: int, target: int, values: Values) -> Values:
        """The value format on one link, where the plan's is `values`."""
        return "exact" if (source, target) in self.exact_links else values

    def mode(self, layer: int) -> LayerMode:
        if self.strategy == "sp":
            return SEQUENCE
        return self.modes[layer] if self.modes else SHARDED

    @property
    def title(self) -> str:
        """`hmp`, or `hmp with qkv, out replicated`: what a person should know of it in a line."""
        groups = [
            group if count == len(self.modes) else f"{group} ({count} of {len(self.modes)} layers)"
            for group in ("qkv", "out", "mlp")
            if (count := sum(getattr(mode, group) == "replicated" for mode in self.modes))
        ]
        by_rows = ", attention by rows" if any(mode.attention == "rows" for mode in self.modes) else ""
        replicated = f" with {', '.join(groups)} replicated{by_rows}" if groups else ""
        return self.strategy + replicated + (f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else "")

    def has_rows(self, rank: int) -> bool:
        """Whether the rank has rows of its own to normalise; under megatron-tp everyone repeats that for all rows."""
        return self.strategy == "megatron-tp" or self.row_weights[rank] > 0

    def embeds(self, rank: int) -> bool:
        """Whether the rank needs what is beside the words: positions, types, and the norm that goes with them."""
        return rank == 0 if self.layers else self.has_rows(rank)

    def holding(self, rank: int, layer: int) -> Holding:
        """A replicated group is held whole by the ranks that have rows, and not at all by the others; a pipeline's layer
        by its stage."""
        if self.layers:
            return self._stage_holding(rank, layer)
        mode, rows = self.mode(layer), self.has_rows(rank)
        heads, columns = spans(self.heads), spans(self.columns)

        def held(placement: Placement, shares: tuple[Span, ...]) -> Span:
            if placement == "sharded":
                return shares[rank]
            return Span(0, shares[-1].stop if rows else 0)

        return Holding(held(mode.qkv, heads), held(mode.out, heads), held(mode.mlp, columns), rows)

    def _stage_holding(self, rank: int, layer: int) -> Holding:
        stage = spans(self.layers)[rank]
        inside = stage.start <= layer < stage.stop
        heads = Span(0, self.heads[rank] if inside else 0)
        columns = Span(0, self.columns[rank] if inside else 0)
        return Holding(heads, heads, columns, inside)


class Prediction(BaseModel):
    """Seconds of one step of `seq_len` rows, under the simulator."""

    model_config = ConfigDict(frozen=True)

    total_seconds: float = Field(ge=0)
    compute_seconds: float = Field(ge=0)  # the busiest device
    transfer_seconds: float = Field(ge=0)  # the busiest link


class Alternative(BaseModel):
    """A strategy that was looked at, and why it was not taken."""

    model_config = ConfigDict(frozen=True)

    strategy: str
    predicted_seconds: float | None
    reason: str


class Generation(BaseModel):
    """What a plan for a decoder promises beside its prefill of `seq_len` rows, and what it is predicted to take."""

    model_config = ConfigDict(frozen=True)

    kv_tokens: int = Field(ge=1)  # of all sequences together: what the KV cache of every rank has room for
    max_sequences: int = Field(ge=1, le=4096)  # decoded in one step
    prefill_rows: int = Field(ge=1)  # of one prefill step at most; a longer prompt comes in chunks
    context: int | None = Field(default=None, ge=1)  # of one sequence at most, prompt and answer; none: kv_tokens
    prompt_tokens: int = Field(default=0, ge=0)  # of the request that planners compare plans by; 0: prefill_rows
    new_tokens: int = Field(default=0, ge=0)  # of its answer
    decode_seconds: float = Field(default=0.0, ge=0)  # predicted: one token of one sequence


class Plan(BaseModel):
    """What runs where. `epoch` numbers deployments: messages of another epoch are dropped and counted."""

    model_config = ConfigDict(frozen=True)

    version: Literal[1] = 1
    epoch: int = Field(default=0, ge=0, lt=1 << 63)
    model: ModelSpec
    planner: str
    seq_len: int = Field(ge=1)  # the step length that times and activations are planned for
    devices: tuple[PlannedDevice, ...] = Field(min_length=1, max_length=256)
    body: TransformerPlan
    wire: WireFormat = WireFormat()
    predicted: Prediction
    generation: Generation | None = None  # for a decoder
    alternatives: tuple[Alternative, ...] = ()

    @property
    def num_ranks(self) -> int:
        return len(self.devices)

    def wire_on(self, source: int, target: int) -> WireFormat:
        """How activations travel from one rank to another."""
        return self.wire.model_copy(update={"values": self.body.values_on(source, target, self.wire.values)})

    def wait_seconds(self, num_rows: int) -> float:
        """How long a wait for a peer may last in a step of so many rows, from the plan's own prediction."""
        return patience_seconds(self.predicted.total_seconds * max(num_rows / self.seq_len, 1.0))

    def with_epoch(self, epoch: int) -> Plan:
        return self.model_copy(update={"epoch": epoch})

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        body, model = self.body, self.model
        if body.strategy == "pipeline":
            self._check_pipeline()
        elif body.layers or body.chunk_rows:
            raise ValueError("layers and chunk_rows are for the strategy pipeline")
        else:
            self._check_shares()
        if len(body.row_weights) != self.num_ranks or min(body.row_weights) < 0 or sum(body.row_weights) <= 0:
            raise ValueError(f"row_weights {body.row_weights} must be non-negative, one per device, not all zero")
        if body.modes and (body.strategy != "hmp" or len(body.modes) != model.num_layers):
            raise ValueError(f"modes are for hmp, one for each of the {model.num_layers} layers")
        if body.micro_batches > 1 and (
            body.strategy not in ("hmp", "megatron-tp") or any(mode.attention == "rows" for mode in body.modes)
        ):
            raise ValueError("micro_batches are for hmp with attention by heads, and for megatron-tp")
        if any(not 0 <= rank < self.num_ranks for link in body.exact_links for rank in link):
            raise ValueError(f"exact_links {body.exact_links} name ranks that there are not")
        if body.strategy == "local" and self.num_ranks != 1:
            raise ValueError("the strategy local takes exactly one device")
        if self.generation is not None and body.strategy != "pipeline":
            self._check_decoding()
        if len({device.device_id for device in self.devices}) != self.num_ranks:
            raise ValueError("a device stands in the plan twice")
        return self

    def _check_shares(self) -> None:
        body, model = self.body, self.model
        for name, shares, total in (
            ("heads", body.heads, model.num_heads),
            ("columns", body.columns, model.ffn_size),
            ("vocabulary", body.vocabulary, model.vocab_size),
        ):
            if len(shares) != self.num_ranks:
                raise ValueError(f"{name} has {len(shares)} shares for {self.num_ranks} devices")
            if min(shares) < 0 or sum(shares) != total:
                raise ValueError(f"{name} {shares} must be non-negative and sum to {total}")
        for shares, total, grain in (
            (body.heads, model.num_heads, model.num_heads // model.num_kv_heads),
            (body.columns, model.ffn_size, COLUMN_GRAIN),
            (body.vocabulary, model.vocab_size, VOCABULARY_GRAIN),
        ):
            for span in spans(shares):
                grains_of(span, total, grain)

    def _check_pipeline(self) -> None:
        body, model = self.body, self.model
        if len(body.layers) != self.num_ranks:
            raise ValueError(f"layers has {len(body.layers)} stages for {self.num_ranks} devices")
        if min(body.layers) < 1 or sum(body.layers) != model.num_layers:
            raise ValueError(f"layers {body.layers} must be positive and sum to {model.num_layers}")
        whole = TransformerPlan.pipeline(model, body.layers)
        for name in ("heads", "columns", "vocabulary"):
            if getattr(body, name) != getattr(whole, name):
                raise ValueError(f"{name} of a pipeline are {getattr(whole, name)}: a stage's layers are whole")
        if tuple(weight > 0 for weight in body.row_weights) != tuple(weight > 0 for weight in whole.row_weights):
            raise ValueError(f"row_weights of this pipeline are {whole.row_weights}: one stage has all rows in the end")

    def _check_decoding(self) -> None:
        """Ranks decode with their own heads and columns: replicated or not, they must hold them."""
        for rank, (heads, columns) in enumerate(zip(spans(self.body.heads), spans(self.body.columns), strict=True)):
            for layer in range(len(self.body.modes) or 1):
                held = self.body.holding(rank, layer)
                if heads.size > min(held.qkv.size, held.out.size) or columns.size > held.columns.size:
                    raise ValueError(f"rank {rank} has heads or columns to decode with, and no rows of its own")


def plan_from_json(text: str | bytes) -> Plan:
    """Read a saved plan. Raises BadPlan that says which field is wrong."""
    try:
        return Plan.model_validate_json(text)
    except ValidationError as error:
        raise BadPlan(reason=first_error(error, "the plan")) from None
