"""The interface of a strategy for planners and the simulator: its tasks, times and memory. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, Literal, TypeVar

from coordinator.models.checkpoint.chunk_layout import num_chunk_weights
from coordinator.plan.simulator import Resource, Task
from coordinator.plan.transformer.cost import memory
from coordinator.plan.transformer.cost.layout import PlanLayout
from hearth.plan import transformer
from hearth.plan.common import MemoryUse
from hearth.plan.geometry import spans
from hearth.plan.kept_caches import reserved_bytes
from hearth.plan.model_spec import ModelSpec
from hearth.plan.transformer import GenerationLimits, Pipeline, TensorParallel

B = TypeVar("B", TensorParallel, Pipeline)


# Seconds of a whole step, and the busy seconds of each resource.
Timing = tuple[float, Mapping[Resource, float]]


@dataclass(frozen=True)
class TransformerStrategy(ABC, Generic[B]):
    """One way to divide a transformer. `search` names the planner of its shares (see `planners`)."""

    name: transformer.Strategy
    search: Literal["rows", "shares", "stages"]
    whole_prompts: bool = False  # a decoder's prompt must be prefilled in one step
    # Also tried without each device in turn: the slow link may belong to a fast device.
    leaves_one_out: bool = False
    refinements: tuple[Literal["replicate", "micro-batches"], ...] = ()
    device_limit: int = 256  # that can share a model

    def max_devices(self, spec: ModelSpec) -> int:
        """The largest number of devices that can share this model."""
        return self.device_limit

    @abstractmethod
    def tasks(self, layout: PlanLayout[B]) -> list[Task]:
        """The task graph of one step, all layers."""

    @abstractmethod
    def timing(self, layout: PlanLayout[B], first_row: int = 0) -> Timing:
        """The timing of one step; equal layers need not all be simulated.

        `first_row`: the position of its first row; the rows before it are in the KV cache.
        """

    @abstractmethod
    def decode_seconds(self, layout: PlanLayout[B], num_tokens: float) -> float:
        """Seconds from one token of one sequence to the next, when the KV cache holds `num_tokens`."""

    @abstractmethod
    def decoding_values(self, spec: ModelSpec, body: B, limits: GenerationLimits) -> int:
        """Values that a rank holds for generation steps, in addition to those of its own computation."""

    def rank_memory(self, spec: ModelSpec, body: B, rank: int) -> MemoryUse:
        """The peak memory of a rank for steps of at most `body.max_step_rows` rows (S).

        Activations: the gathered input and a partial sum, each [S,H] with a receive buffer; the rank's rows and their
        residual [s,H], counted as [S,H] each; for a decoder one more, since its pre-norm keeps the residual; and the
        larger of attention and the MLP. With `body.generation`: the KV cache of the rank's heads and the copy that it
        keeps, the logits of its share of the vocabulary, `decoding_values`, and on rank 0 the candidates of all ranks.
        """
        limits, rows = body.generation, body.max_step_rows
        vocabulary = spans(body.vocabulary)[rank]
        holdings = [(body.layer_share(rank, first), count) for first, count in _runs_of_layers(spec, body, rank)]
        words = body.word_rows(rank)
        embeddings = memory.span_weight_bytes(spec, "vocabulary", words)
        if spec.has_separate_head:
            embeddings += memory.span_weight_bytes(spec, "head", vocabulary)
        if body.allocates_embedding(rank):
            embeddings += num_chunk_weights(spec, "embedding") * memory.COMPUTE_BYTES
        heads = max(body.heads[rank], max(held.qkv.size for held, _ in holdings))
        columns = max(held.columns.size for held, _ in holdings)
        values = (7 if spec.causal else 6) * memory.step_rows(rows, limits) * spec.hidden_size
        values += max(
            memory.attention_values(spec, heads, rows, limits), memory.mlp_values(spec, columns, rows, limits)
        )
        if limits is not None:
            values += memory.logit_values(vocabulary.size, limits) + self.decoding_values(spec, body, limits)
            values += memory.VALUES_PER_CANDIDATE * spec.vocab_size if rank == 0 else 0
        takes_part = body.has_rows(rank) or heads or columns or spec.causal
        return MemoryUse(
            weights=sum(count * memory.layer_bytes(spec, held) for held, count in holdings),
            embeddings=embeddings,
            activations=values * memory.COMPUTE_BYTES if takes_part else 0,
            workspace=memory.WORKER_PROCESS_BYTES + memory.loading_bytes(spec),
            kv_cache=reserved_bytes(spec, body, rank),
        )


def _runs_of_layers(spec: ModelSpec, body: TensorParallel | Pipeline, rank: int) -> list[tuple[int, int]]:
    """Runs of consecutive layers of which a rank holds the same part: the first layer and the count."""
    if not body.modes:
        own = body.layers_of(rank, spec.num_layers)
        return [(own.start, own.size)]
    runs = (list(same) for _, same in groupby(range(spec.num_layers), key=body.mode))
    return [(run[0], len(run)) for run in runs]
