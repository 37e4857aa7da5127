"""The KV caches of an earlier plan with which streams continue on a new one, without computing all rows again. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from hearth.plan.kept_caches import CacheTransfer, HeldBlock, covered_rows, plan_transfers, reserved_bytes
from hearth.plan.plan import TransformerPlan
from hearth.plan.transformer import KV_BLOCK_TOKENS
from hearth.wire.messages import HeldCache, HeldPrefixes, KeptCache, KeptPrefixes, split_keys

_TOKEN_BYTES = 4  # of a token id in `HeldCache.token_ids`
_MAX_PREFIX_SECONDS = 0.5  # of transfers for the prefix cache, before the first step: nobody may need it


def kept_caches(
    plan: TransformerPlan, reports: Sequence[Sequence[HeldCache] | None], bytes_per_second: Callable[[int, int], float]
) -> tuple[KeptCache, ...]:
    """The streams whose caches the ranks together hold, have room for, and can move sooner than compute.

    `reports` are what each rank holds; `bytes_per_second` is the rate of the link from one rank to another.
    """
    if plan.body.generation is None or any(report is None for report in reports) or _prefills_whole_prompts(plan):
        return ()
    held: dict[str, list[tuple[int, HeldCache]]] = defaultdict(list)
    for rank, report in enumerate(reports):
        for cache in report or ():
            held[cache.stream].append((rank, cache))
    kept = (_kept_cache(plan, stream, parts, bytes_per_second) for stream, parts in held.items())
    return tuple(cache for cache in kept if cache is not None)


def kept_prefixes(
    plan: TransformerPlan, reports: Sequence[HeldPrefixes | None], bytes_per_second: Callable[[int, int], float]
) -> KeptPrefixes | None:
    """The blocks of the prefix cache that all ranks together hold: those on their device already, and some that must be moved.

    `reports` are what each rank holds. All have the same blocks but for the newest and the oldest ones.
    """
    held = {rank: report for rank, report in enumerate(reports) if report is not None}
    if plan.body.generation is None or not held or _prefills_whole_prompts(plan):
        return None
    everywhere = set.intersection(*(set(split_keys(report.keys)) for report in held.values()))
    keys = [key for key in split_keys(held[min(held)].keys) if key in everywhere]
    blocks = [HeldBlock(rank, report.block, KV_BLOCK_TOKENS) for rank, report in held.items()]
    if not keys or not covered_rows(plan.model, blocks):
        return None
    transfers = plan_transfers(plan, blocks, KV_BLOCK_TOKENS)
    seconds = _seconds(plan, transfers, KV_BLOCK_TOKENS, bytes_per_second)
    if seconds:
        keys = keys[-int(_MAX_PREFIX_SECONDS / seconds) :] if seconds <= _MAX_PREFIX_SECONDS else []
    if not keys:
        return None
    return KeptPrefixes(keys=b"".join(keys), transfers=transfers, transfer_seconds=seconds * len(keys))


def _kept_cache(
    plan: TransformerPlan,
    stream: str,
    held: Sequence[tuple[int, HeldCache]],
    bytes_per_second: Callable[[int, int], float],
) -> KeptCache | None:
    tokens = max((cache.token_ids for _, cache in held), key=len)
    if any(not tokens.startswith(cache.token_ids) for _, cache in held):
        return None  # of different attempts
    blocks = [
        HeldBlock(rank, part.block, min(part.num_rows, len(cache.token_ids) // _TOKEN_BYTES))
        for rank, cache in held
        for part in cache.parts
    ]
    num_rows = covered_rows(plan.model, blocks)
    reserved_tokens = _reserved_tokens(plan, blocks)
    if not num_rows or reserved_tokens is None:
        return None
    transfers = plan_transfers(plan, blocks, num_rows)
    seconds = _seconds(plan, transfers, num_rows, bytes_per_second)
    if seconds > plan.predicted.latency_seconds * num_rows / plan.body.seq_len:
        return None
    return KeptCache(
        stream=stream,
        token_ids=tokens,
        num_rows=num_rows,
        transfers=transfers,
        transfer_seconds=seconds,
        reserved_tokens=reserved_tokens,
    )


def _reserved_tokens(plan: TransformerPlan, held: Sequence[HeldBlock]) -> int | None:
    """The number of tokens whose KV cache in this plan takes as much memory as what is held, on the rank with most of them.

    None if a rank that holds something reserves no memory for a KV cache.
    """
    assert plan.body.generation is not None
    most = 0
    for rank in range(plan.num_ranks):
        num_bytes = sum(each.block.num_bytes(plan.model, each.num_rows) for each in held if each.rank == rank)
        of_token = reserved_bytes(plan.model, plan.body, rank) // (plan.body.generation.num_kv_blocks * KV_BLOCK_TOKENS)
        if num_bytes and not of_token:
            return None
        most = max(most, -(-num_bytes // max(of_token, 1)))
    return most


def _seconds(
    plan: TransformerPlan,
    transfers: Sequence[CacheTransfer],
    num_rows: int,
    bytes_per_second: Callable[[int, int], float],
) -> float:
    """Predicted duration of the transfers: each rank sends, and receives, one after the other."""
    sending, receiving = [0.0] * plan.num_ranks, [0.0] * plan.num_ranks
    for source, target, block in transfers:
        if source != target:
            seconds = block.num_bytes(plan.model, num_rows) / bytes_per_second(source, target)
            sending[source] += seconds
            receiving[target] += seconds
    return max(*sending, *receiving)


def _prefills_whole_prompts(plan: TransformerPlan) -> bool:
    """Whether a layer splits attention by rows: such a plan cannot continue from cached tokens."""
    return any(plan.body.mode(layer).attention == "rows" for layer in range(plan.model.num_layers))
