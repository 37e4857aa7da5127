"""The paged KV cache of one rank: the memory, and the sequences whose rows are in it.

Rows have the shape [layers, 2, kv heads, rows, d] in the cache's format: d = head_dim in float32, else bytes (`to_format`).
Memory is taken in blocks of KV_BLOCK_TOKENS rows of all of the rank's layers and KV heads. Rank 0 allocates them
(`generation.block_pool`), and names them in step orders; they have the same numbers on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agent.worker.transformer.causal_attention import causal_attention
from hearth.errors import StepFailed, UnsupportedKvCache
from hearth.plan.geometry import Span
from hearth.plan.kept_caches import CacheBlock
from hearth.plan.model_spec import KvFormat, ModelSpec
from hearth.plan.transformer import KV_BLOCK_TOKENS
from hearth.wire.messages import NewSequence

# Average rows of a run of adjacent blocks above which attention reads the runs in place; below, one copy costs less than many
# small GEMMs: at 16 rows, 256 rows of 8 KV heads take 0.28 ms in place and 0.14 ms copied (one core of a Xeon).
_MIN_ROWS_OF_VIEW = 48


def part_of(within: CacheBlock, block: CacheBlock) -> tuple[slice, slice, slice]:
    """The index of a part of a block in a tensor of the block's rows."""
    layers, heads = (
        slice(part.start - whole.start, part.stop - whole.start) for whole, part in zip(within, block, strict=True)
    )
    return layers, slice(None), heads


def stored_row(spec: ModelSpec) -> tuple[int, torch.dtype]:
    """The number and type of elements in which the cache holds the key, or the value, of one token and head."""
    return (spec.head_dim, torch.float32) if spec.kv_cache == "float32" else (spec.kv_row_bytes, torch.uint8)


def to_format(rows: Tensor, kind: KvFormat) -> Tensor:
    """Convert keys or values [..., head_dim] in float32 to the cache's format.

    Other formats are bytes, so that rows can be copied and sent as they are: bfloat16, or int8 with a float32 scale per row.
    """
    if kind == "float32":
        return rows
    if kind == "bfloat16":
        return rows.to(torch.bfloat16).contiguous().view(torch.uint8)
    scales = rows.abs().amax(-1, keepdim=True).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
    return torch.cat([(rows / scales).round_().to(torch.int8).view(torch.uint8), scales.view(torch.uint8)], dim=-1)


def from_format(stored: Tensor, kind: KvFormat) -> Tensor:
    """Rows as numbers: int8 is converted to float32; other formats stay as they are, without a copy."""
    if kind == "float32":
        return stored
    if kind == "bfloat16":
        return stored.view(torch.bfloat16)
    values, scales = stored[..., :-4], stored[..., -4:].contiguous().view(torch.float32)
    return values.view(torch.int8) * scales


def check_format(spec: ModelSpec, device: torch.device) -> None:
    """Raise UnsupportedKvCache if the device cannot compute attention over the cache's format.

    Older GPUs have no attention in bfloat16, for example.
    """
    rows = torch.ones(1, 4, spec.head_dim, device=device)  # of one KV head

    def keys_and_values(wanted: Span) -> list[tuple[Tensor, Tensor]]:
        keys = from_format(to_format(rows, spec.kv_cache), spec.kv_cache)[:, slice(*wanted)]
        return [(keys, keys)]

    try:
        for num_queries in (1, 4):
            q = torch.ones(1, spec.group_size, num_queries, spec.head_dim, device=device)
            causal_attention(q, keys_and_values, 4 - num_queries, None).cpu()
    except (RuntimeError, NotImplementedError) as error:
        reason = (str(error).splitlines() or ["it failed"])[0]
        kind = spec.kv_cache
        raise UnsupportedKvCache(
            device="this device", kv_cache=kind, compute_device=device.type, reason=reason
        ) from None


class PagedRows:
    """The memory of a rank's KV caches: `num_blocks` blocks of rows of `part`, its layers and KV heads, in one tensor.

    On a CPU, pages become resident when they are first used.
    """

    def __init__(self, spec: ModelSpec, part: CacheBlock, num_blocks: int, device: torch.device) -> None:
        width, dtype = stored_row(spec)
        shape = (part.layers.size, 2, part.heads.size, num_blocks * KV_BLOCK_TOKENS, width)
        self.part = part
        self.format = spec.kv_cache
        self.num_blocks = num_blocks
        self.values = torch.empty(shape, dtype=dtype, device=device)
        numbers = self.values.view(torch.bfloat16) if spec.kv_cache == "bfloat16" else self.values
        # Keys and values of each layer, as numbers, except of int8: made once, since views take time in each step.
        self.keys_and_values = [(layer[0], layer[1]) for layer in numbers]


class SequenceCache:
    """The KV cache and the tokens of one sequence, of which `num_rows` rows have been computed.

    The newest `num_drafted` tokens are guesses, until the sequence's next step drops those that were rejected. Row r lies in
    block `r // KV_BLOCK_TOKENS` of the sequence's blocks. `num_copied` rows have been sent to the rank that keeps the copy.
    """

    def __init__(self, memory: PagedRows, new: NewSequence) -> None:
        self.block = memory.part
        self._memory = memory
        self._runs: list[Span] = []  # ranges of the memory's rows, adjacent blocks joined, in the order of the sequence
        self.blocks: list[int] = []
        self.sampling = new.sampling
        self.first_index = new.first_index
        self.stream = new.stream
        self.top_log_probs = new.top_log_probs
        self.is_constrained = bool(new.grammar)
        self.tokens = list(new.cached_tokens)
        self.num_rows = len(self.tokens)
        self.num_copied = 0
        self.num_drafted = 0
        self.num_prompt_tokens = new.num_prompt_tokens
        self.add_blocks(new.blocks)

    def add_blocks(self, blocks: Sequence[int]) -> None:
        """Append blocks. Raises StepFailed for one that does not exist (a scheduler bug)."""
        for block in blocks:
            if block >= self._memory.num_blocks:
                raise StepFailed(device="this device", reason=f"the KV cache has no block {block}")
            start = block * KV_BLOCK_TOKENS
            if self._runs and self._runs[-1].stop == start:
                start = self._runs.pop().start
            self._runs.append(Span(start, (block + 1) * KV_BLOCK_TOKENS))
        self.blocks += blocks

    @property
    def capacity(self) -> int:
        """Maximum number of tokens in its blocks."""
        return len(self.blocks) * KV_BLOCK_TOKENS

    @property
    def settled_tokens(self) -> list[int]:
        """The tokens but the drafted ones."""
        return self.tokens[: len(self.tokens) - self.num_drafted]

    @property
    def num_settled_rows(self) -> int:
        """Number of computed rows that no rejection of drafted tokens drops."""
        return min(self.num_rows, len(self.tokens) - self.num_drafted)

    def reject(self, count: int) -> None:
        """Drop the newest `count` drafted tokens, and their rows. Raises StepFailed if fewer were drafted (a scheduler bug)."""
        if count > self.num_drafted:
            raise StepFailed(device="this device", reason=f"{count} of {self.num_drafted} drafted tokens are rejected")
        self.truncate(len(self.tokens) - count)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first tokens and their rows only."""
        del self.tokens[num_tokens:]
        self.num_rows = len(self.tokens)

    def extend(self, token_ids: Sequence[int], num_drafted: int = 0) -> None:
        """Append tokens, the last `num_drafted` of them guesses; the next step computes their rows.

        Raises StepFailed if the capacity is exceeded (a scheduler bug).
        """
        if len(self.tokens) + len(token_ids) > self.capacity:
            num_tokens = len(self.tokens) + len(token_ids)
            raise StepFailed(device="this device", reason=f"{num_tokens} tokens in a KV cache for {self.capacity}")
        self.tokens.extend(token_ids)
        self.num_drafted = num_drafted

    def store(self, layer: int, start: int, k_skd: Tensor, v_skd: Tensor) -> None:
        """Store the keys and values [s, kv heads, d] of rows from the position `start` on; `extend` has added their tokens."""
        memory, first = self._memory, 0
        for run in self._slices(Span(start, start + k_skd.shape[0])):
            rows = slice(first, first + run.size)
            for stored, new in zip(
                memory.keys_and_values[layer - self.block.layers.start], (k_skd, v_skd), strict=True
            ):
                values = to_format(new[rows], "int8") if memory.format == "int8" else new[rows]
                stored[:, slice(*run)].copy_(values.transpose(0, 1))  # rounds to bfloat16
            first = rows.stop

    def keys_and_values(self, layer: int, rows: Span) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of the rows: pairs of [kv heads, some rows, head_dim], which follow each other.

        In bfloat16 if the cache is in it, else in float32. Except of int8, they are views, unless many blocks are scattered.
        """
        keys, values = self._memory.keys_and_values[layer - self.block.layers.start]
        runs = self._slices(rows)
        if rows.size < len(runs) * _MIN_ROWS_OF_VIEW and len(runs) > 1:
            index = torch.cat([torch.arange(*run) for run in runs]).to(keys.device)
            pairs = [(keys.index_select(1, index), values.index_select(1, index))]
        else:
            pairs = [(keys[:, slice(*run)], values[:, slice(*run)]) for run in runs]
        if self._memory.format != "int8":
            return pairs
        return [(from_format(k, "int8"), from_format(v, "int8")) for k, v in pairs]

    def rows(self, block: CacheBlock, rows: Span) -> Tensor:
        """Some rows of a part of the block, copied if they are not in adjacent blocks."""
        part = self._memory.values[part_of(self.block, block)]
        runs = [part[:, :, :, slice(*run)] for run in self._slices(rows)]
        return runs[0] if len(runs) == 1 else torch.cat(runs, dim=3)

    def fill(self, block: CacheBlock, rows: Span, values: Tensor) -> None:
        """Set some rows of a part of the block."""
        part, first = self._memory.values[part_of(self.block, block)], 0
        for run in self._slices(rows):
            part[:, :, :, slice(*run)] = values[:, :, :, first : first + run.size]
            first += run.size

    def _slices(self, rows: Span) -> list[Span]:
        """The ranges of the memory's rows in which the sequence's rows lie."""
        found, first = [], 0
        for run in self._runs:
            start, stop = max(rows.start - first, 0), min(rows.stop - first, run.size)
            if start < stop:
                found.append(Span(run.start + start, run.start + stop))
            first += run.size
        return found

    def advance(self) -> None:
        """Mark all rows as computed, at the end of a step."""
        self.num_rows = len(self.tokens)
