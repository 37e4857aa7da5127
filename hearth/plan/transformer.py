"""The body of a plan for a transformer: tensor parallelism (shares of every layer) or a pipeline of whole layers. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, get_args

from pydantic import BaseModel, Field, model_validator

from hearth.plan.common import ValueFormatName
from hearth.plan.geometry import COLUMN_GRAIN, VOCABULARY_GRAIN, Span, grains_of, rows_per_rank, spans
from hearth.plan.layer import ChunkKind
from hearth.plan.model_spec import ModelSpec

ShareStrategy = Literal["local", "megatron-tp", "sp", "hmp"]
Strategy = Literal[ShareStrategy, "pipeline"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
Placement = Literal["sharded", "replicated"]


KV_BLOCK_TOKENS = 16  # tokens of one block of a KV cache: memory is taken block by block as sequences grow


class GenerationLimits(BaseModel, frozen=True):
    """Capacity that a decoder's plan reserves, and the reference request for which planners compare plans."""

    kv_tokens: int = Field(ge=1)  # of all sequences together; every rank reserves KV cache for them
    max_sequences: int = Field(ge=1, le=4096)  # that run at once
    prefill_rows: int = Field(ge=1)  # at most, of one prefill step; a longer prompt is prefilled in chunks
    # Maximum tokens of one sequence, prompt and answer; None: kv_tokens.
    context: int | None = Field(default=None, ge=1)
    prompt_tokens: int = Field(default=0, ge=0)  # of the reference request; 0: prefill_rows
    new_tokens: int = Field(default=0, ge=0)  # of the reference request's answer
    # Each rank also keeps a copy of the previous rank's KV cache, from which sequences continue after a loss.
    kv_copies: bool = False
    draft: ModelSpec | None = None  # a small model of the same vocabulary, with which rank 0 guesses tokens

    @property
    def num_kv_blocks(self) -> int:
        """Number of blocks of the KV cache."""
        return -(-self.kv_tokens // KV_BLOCK_TOKENS)


class LayerMode(BaseModel, frozen=True):
    """Which weight groups of a layer are sharded, and which are replicated on every rank that has rows.

    Replication costs memory and saves communication; rows are always split. With `attention` by heads, an all-to-all
    follows a replicated QKV projection and precedes a replicated output projection. With attention by rows, both
    projections are replicated, and K and V of all rows are gathered instead.
    """

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


class LayerShare(NamedTuple):
    """One rank's part of one layer: heads of QKV, heads of the output projection, MLP columns, and whether it has the norms."""

    qkv: Span
    out: Span
    columns: Span
    connective: bool

    def by_kind(self) -> dict[ChunkKind, Span]:
        """The heads and columns by the kind of chunk that holds their weights."""
        return {"qkv": self.qkv, "out": self.out, "mlp": self.columns}


class StrategyTraits(NamedTuple):
    """Properties that all plans of one strategy share."""

    mode: LayerMode = SHARDED  # of layers without their own mode
    per_layer_modes: bool = False  # whether each layer may have its own mode
    replicates_rows: bool = False  # every rank has all rows; AllReduce sums partial results
    micro_batches: bool = False  # whether a decoder's prefill step may be split into micro-batches
    one_device: bool = False


_TRAITS: dict[str, StrategyTraits] = {
    "local": StrategyTraits(one_device=True),
    "megatron-tp": StrategyTraits(replicates_rows=True, micro_batches=True),
    "sp": StrategyTraits(mode=SEQUENCE),
    "hmp": StrategyTraits(per_layer_modes=True, micro_batches=True),
}


class _TransformerBody(BaseModel, ABC, frozen=True, extra="forbid"):
    """The shares of each rank. Ranks are the plan's devices in ring order; `TensorParallel` documents the interface.

    `heads` (query heads, in whole KV groups), `columns` and `vocabulary` are shares in items, on grain borders.
    `row_weights` determine the rows of a step (`geometry.rows_per_rank`). `exact_links` are pairs (sender, receiver) of ranks
    whose link carries exact values, because a lossy wire format would save no time there.
    """

    seq_len: int = Field(ge=1)  # the step length in rows that predicted times and activation memory are for
    heads: tuple[int, ...] = Field(max_length=256)
    columns: tuple[int, ...] = Field(max_length=256)
    row_weights: tuple[float, ...] = Field(max_length=256)
    vocabulary: tuple[int, ...] = Field(max_length=256)
    exact_links: tuple[tuple[int, int], ...] = Field(default=(), max_length=1 << 16)
    generation: GenerationLimits | None = None  # None: an encoder

    @property
    @abstractmethod
    def num_stages(self) -> int:
        """Number of groups of layers that different ranks compute one after the other."""

    @property
    def max_steps_in_flight(self) -> int:
        """Maximum steps of a generation in flight: one in each stage, and one between each two successive stages."""
        return 2 * self.num_stages - 1

    @abstractmethod
    def _check_shares(self, model: ModelSpec, num_ranks: int) -> None:
        """Raise ValueError unless the shares sum to the model's sizes."""

    def check(self, model: object, num_ranks: int) -> None:
        """Raise ValueError if the body does not fit the model or the number of devices."""
        if not isinstance(model, ModelSpec):
            raise ValueError("the body divides a Transformer, but the model is a graph")
        self._check_shares(model, num_ranks)
        weights = self.row_weights
        if len(weights) != num_ranks or min(weights) < 0 or sum(weights) <= 0:
            raise ValueError(f"row_weights {weights} must be non-negative, one per device, not all zero")
        if any(not 0 <= rank < num_ranks for link in self.exact_links for rank in link):
            raise ValueError(f"exact_links {self.exact_links} must name ranks below {num_ranks}")

    def duration_ratio(self, num_rows: int) -> float:
        """Ratio of the duration of a step of `num_rows` rows to the planned step's, taken as linear; at least 1."""
        return max(num_rows / self.seq_len, 1.0)

    def values_on(self, source: int, target: int, values: ValueFormatName) -> ValueFormatName:
        """The value format on one link, given the plan's value format `values`."""
        return "exact" if (source, target) in self.exact_links else values


class TensorParallel(_TransformerBody):
    """Tensor parallelism: every rank has a share of every layer.

    `modes` holds one mode per layer; if empty, all layers have the strategy's mode. With `embedding` replicated, every rank
    that needs word embeddings holds those of the whole vocabulary, so that none are exchanged; the output head stays divided by
    `vocabulary`. A decoder's prefill step is split into `micro_batches` groups of rows that run concurrently, so that one's
    communication overlaps another's compute.
    """

    kind: Literal["tensor-parallel"] = "tensor-parallel"
    strategy: ShareStrategy
    overlap: bool = True  # overlap of communication and compute by tiles (hmp only); off is for comparison
    modes: tuple[LayerMode, ...] = Field(default=(), max_length=1024)
    embedding: Placement = "sharded"
    micro_batches: int = Field(default=1, ge=1, le=4)  # number per prefill step of a decoder

    @property
    def traits(self) -> StrategyTraits:
        """Properties of the body's strategy."""
        return _TRAITS[self.strategy]

    @property
    def title(self) -> str:
        """One line for users, such as `hmp with qkv, out replicated`."""
        groups = ["embedding"] if self.embedding == "replicated" else []
        groups += [
            group if count == len(self.modes) else f"{group} ({count} of {len(self.modes)} layers)"
            for group in ("qkv", "out", "mlp")
            if (count := sum(getattr(mode, group) == "replicated" for mode in self.modes))
        ]
        by_rows = ", attention by rows" if any(mode.attention == "rows" for mode in self.modes) else ""
        replicated = f" with {', '.join(groups)} replicated{by_rows}" if groups else ""
        return self.strategy + replicated + (f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else "")

    @property
    def num_stages(self) -> int:
        """Always 1: every rank computes a share of every layer."""
        return 1

    @property
    def max_step_rows(self) -> int:
        """Maximum rows of a prefill step."""
        return self.seq_len

    @property
    def attends_by_rows(self) -> bool:
        """Whether the strategy splits attention by rows, with all heads and columns on every rank."""
        return self.traits.mode.attention == "rows"

    @property
    def can_split_prefill(self) -> bool:
        """Whether a prefill step may be split into micro-batches."""
        return self.traits.micro_batches and not any(mode.attention == "rows" for mode in self.modes)

    def mode(self, layer: int) -> LayerMode:
        """The mode of a layer: which weight groups are replicated."""
        return self.modes[layer] if self.modes else self.traits.mode

    def layers_of(self, rank: int, num_layers: int) -> Span:
        """The layers of which a rank holds weights."""
        return Span(0, num_layers)

    def layer_share(self, rank: int, layer: int) -> LayerShare:
        """A rank's part of a layer. Ranks with rows hold a replicated group whole; ranks without rows hold none of it."""
        return self._share_in_mode(rank, self.mode(layer), spans(self.heads), spans(self.columns))

    def _share_in_mode(
        self, rank: int, mode: LayerMode, heads: tuple[Span, ...], columns: tuple[Span, ...]
    ) -> LayerShare:
        rows = self.has_rows(rank)

        def held(placement: Placement, shares: tuple[Span, ...]) -> Span:
            if placement == "sharded":
                return shares[rank]
            return Span(0, shares[-1].stop if rows else 0)

        return LayerShare(held(mode.qkv, heads), held(mode.out, heads), held(mode.mlp, columns), rows)

    def decode_share(self, rank: int) -> tuple[Span, Span]:
        """The heads and columns of its layers that a rank uses for decoding."""
        return spans(self.heads)[rank], spans(self.columns)[rank]

    def step_rows(self, rank: int) -> int:
        """Number of rows, in a step of `seq_len` rows, for which the rank computes norms and residuals."""
        return self.seq_len if self.traits.replicates_rows else rows_per_rank(self.row_weights, self.seq_len)[rank]

    def has_rows(self, rank: int) -> bool:
        """Whether the rank computes norms and residuals for rows of a step."""
        return self.traits.replicates_rows or self.row_weights[rank] > 0

    def word_rows(self, rank: int) -> Span:
        """The token ids of which a rank holds the word embeddings.

        If embeddings are replicated, these are all ids: on every rank of a decoder, since all ranks decode, and on those ranks
        of an encoder that have rows of a step.
        """
        shares = spans(self.vocabulary)
        if self.embedding == "replicated" and (self.has_rows(rank) or self.generation is not None):
            return Span(0, shares[-1].stop)
        return shares[rank]

    def needs_embedding(self, rank: int) -> bool:
        """Whether the rank needs the embedding's positions, token types and norm."""
        return self.has_rows(rank)

    def allocates_embedding(self, rank: int) -> bool:
        """Whether the rank allocates memory for the embedding's positions, token types and norm."""
        return True

    def replicates_norms(self, rank: int) -> bool:
        """Whether the rank computes all norms of a decoded token: a single row cannot be split between ranks."""
        return max(self.heads[rank], self.columns[rank], self.vocabulary[rank]) > 0

    def check(self, model: object, num_ranks: int) -> None:
        """Raise ValueError if the body does not fit the model or the devices, or a rank cannot decode with its share."""
        super().check(model, num_ranks)
        if self.generation is not None:
            self._check_decoding()

    def _check_shares(self, model: ModelSpec, num_ranks: int) -> None:
        shares_of = (
            ("heads", self.heads, model.num_heads, model.num_heads // model.num_kv_heads),
            ("columns", self.columns, model.ffn_size, COLUMN_GRAIN),
            ("vocabulary", self.vocabulary, model.vocab_size, VOCABULARY_GRAIN),
        )
        for name, shares, total, grain in shares_of:
            if len(shares) != num_ranks:
                raise ValueError(f"{name} has {len(shares)} shares for {num_ranks} devices")
            if min(shares) < 0 or sum(shares) != total:
                raise ValueError(f"{name} {shares} must be non-negative and sum to {total}")
            for span in spans(shares):
                grains_of(span, total, grain)
        if self.modes and (not self.traits.per_layer_modes or len(self.modes) != model.num_layers):
            raise ValueError(f"modes are for hmp, one for each of the {model.num_layers} layers")
        if self.micro_batches > 1 and not self.can_split_prefill:
            raise ValueError("micro_batches are for hmp with attention by heads, and for megatron-tp")
        if self.traits.one_device and num_ranks != 1:
            raise ValueError(f"the strategy {self.strategy} takes exactly one device")

    def _check_decoding(self) -> None:
        """Raise ValueError unless every rank holds the heads and columns that it decodes with."""
        all_heads, all_columns = spans(self.heads), spans(self.columns)
        for mode in set(self.modes) or {self.traits.mode}:  # a peer may send many ranks and layers; modes are few
            for rank, (heads, columns) in enumerate(zip(all_heads, all_columns, strict=True)):
                share = self._share_in_mode(rank, mode, all_heads, all_columns)
                if heads.size > min(share.qkv.size, share.out.size) or columns.size > share.columns.size:
                    raise ValueError(f"rank {rank} has heads or columns to decode with, and no rows of its own")


class Pipeline(_TransformerBody):
    """Pipeline parallelism: rank r is a stage of `layers[r]` whole layers, with all their heads and columns.

    The first stage holds the vocabulary. It embeds the tokens, and a decoder's last stage sends the final rows back to it,
    so that tied weights are held once. The stage that ends with the rows has all of `row_weights`: the first stage of a
    decoder, the last of an encoder. A decoder's prompt is prefilled in chunks of `chunk_rows`.
    """

    kind: Literal["pipeline"] = "pipeline"
    strategy: ClassVar[Literal["pipeline"]] = "pipeline"
    overlap: ClassVar[bool] = True
    modes: ClassVar[tuple[LayerMode, ...]] = ()
    embedding: ClassVar[Placement] = "sharded"
    micro_batches: ClassVar[int] = 1
    layers: tuple[int, ...] = Field(max_length=256)
    chunk_rows: int = Field(default=0, ge=0)  # maximum rows of a prefill step; 0: no limit

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        layers: Sequence[int],
        seq_len: int,
        chunk_rows: int = 0,
        generation: GenerationLimits | None = None,
    ) -> Pipeline:
        """A pipeline whose stages have these numbers of layers. A decoder's prefill steps have at most `chunk_rows` rows."""
        num_ranks = len(layers)
        if generation is not None and chunk_rows:
            rows = min(generation.prefill_rows, chunk_rows)
            generation = generation.model_copy(update={"prefill_rows": rows})
        owner = 0 if spec.causal else num_ranks - 1
        return cls(
            seq_len=seq_len,
            heads=(spec.num_heads,) * num_ranks,
            columns=(spec.ffn_size,) * num_ranks,
            row_weights=tuple(float(rank == owner) for rank in range(num_ranks)),
            vocabulary=(spec.vocab_size, *[0] * (num_ranks - 1)),
            layers=tuple(layers),
            chunk_rows=chunk_rows,
            generation=generation,
        )

    @property
    def title(self) -> str:
        """One line for users: the name of the strategy."""
        return self.strategy

    @property
    def num_stages(self) -> int:
        """Number of stages, which is the number of ranks."""
        return len(self.layers)

    @property
    def max_step_rows(self) -> int:
        """Maximum rows of a prefill step."""
        return min(self.seq_len, self.chunk_rows or self.seq_len)

    @property
    def can_split_prefill(self) -> bool:
        """Always False: the stages overlap by chunks of a prompt, not by micro-batches."""
        return False

    def mode(self, layer: int) -> LayerMode:
        """The mode of a layer: always sharded, since a stage has all weights of its layers."""
        return SHARDED

    def layers_of(self, rank: int, num_layers: int) -> Span:
        """The layers of a rank's stage."""
        return spans(self.layers)[rank]

    def layer_share(self, rank: int, layer: int) -> LayerShare:
        """A stage holds all heads and columns of its own layers, and none of the others."""
        stage = spans(self.layers)[rank]
        inside = stage.start <= layer < stage.stop
        heads = Span(0, self.heads[rank] if inside else 0)
        columns = Span(0, self.columns[rank] if inside else 0)
        return LayerShare(heads, heads, columns, inside)

    def decode_share(self, rank: int) -> tuple[Span, Span]:
        """The heads and columns that a rank uses for decoding: all of them."""
        return Span(0, self.heads[rank]), Span(0, self.columns[rank])

    def step_rows(self, rank: int) -> int:
        """Number of rows, in a step of `seq_len` rows, for which the rank computes norms and residuals: all of them."""
        return self.seq_len

    def has_rows(self, rank: int) -> bool:
        """Whether the rows of a step end on this rank."""
        return self.row_weights[rank] > 0

    def word_rows(self, rank: int) -> Span:
        """The token ids of which a rank holds the word embeddings: the first stage holds all."""
        return spans(self.vocabulary)[rank]

    def needs_embedding(self, rank: int) -> bool:
        """Whether the rank needs the embedding's positions, token types and norm: the first stage does."""
        return rank == 0

    def allocates_embedding(self, rank: int) -> bool:
        """Whether the rank allocates memory for the embedding's positions, token types and norm: the first stage does."""
        return rank == 0

    def replicates_norms(self, rank: int) -> bool:
        """Always False: each norm is computed by one stage."""
        return False

    def _check_shares(self, model: ModelSpec, num_ranks: int) -> None:
        if len(self.layers) != num_ranks:
            raise ValueError(f"layers has {len(self.layers)} stages for {num_ranks} devices")
        if min(self.layers) < 1 or sum(self.layers) != model.num_layers:
            raise ValueError(f"layers {self.layers} must be positive and sum to {model.num_layers}")
        expected = Pipeline.of(model, self.layers, self.seq_len)
        for name in ("heads", "columns", "vocabulary"):
            if getattr(self, name) != getattr(expected, name):
                raise ValueError(f"{name} of a pipeline are {getattr(expected, name)}: a stage's layers are whole")
        if tuple(weight > 0 for weight in self.row_weights) != tuple(weight > 0 for weight in expected.row_weights):
            raise ValueError(
                f"row_weights of this pipeline are {expected.row_weights}: one stage has all rows in the end"
            )


TransformerBody = TensorParallel | Pipeline
