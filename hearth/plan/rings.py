"""Ring schedules as data (Galaxy, section III-D): which tile is computed, sent and received in each step.

Tile k is the block of rows that rank k owns. Ranks stand in ring order: rank r sends to r+1 and receives from r-1.
The worker's collectives run these steps; the simulator turns the same steps into tasks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from hearth.plan.geometry import Span

# A ring's next hop starts when a chunk is there, not the whole tile: while one chunk is received the one before is sent.
# More and smaller chunks would cost more in handling (some 0.2 ms each) than they gain.
CHUNK_BYTES = 128 << 10
MAX_CHUNKS = 2


class RingStep(NamedTuple):
    """One step of one rank: compute with tile `compute` while `send` leaves and `receive` arrives (None: nothing moves)."""

    compute: int
    send: int | None
    receive: int | None


@lru_cache(maxsize=256)
def ring_all_gather(num_ranks: int, rank: int) -> tuple[RingStep, ...]:
    """Ring AllGather: in step t compute tile (r-t), send it on, and receive tile (r-t-1); the last step moves nothing."""
    return tuple(
        RingStep(
            compute=(rank - t) % num_ranks,
            send=(rank - t) % num_ranks if t < num_ranks - 1 else None,
            receive=(rank - t - 1) % num_ranks if t < num_ranks - 1 else None,
        )
        for t in range(num_ranks)
    )


@lru_cache(maxsize=256)
def ring_reduce_scatter(num_ranks: int, rank: int) -> tuple[RingStep, ...]:
    """Ring ReduceScatter: in step t compute tile (r+D-1-t), add the partial sum received for it, send it on.

    `receive` is the partial sum that must be there before this step's tile can be sent on (or, in the last step,
    finished): it belongs to the tile of this very step. The rank's own tile comes last.
    """
    last = num_ranks - 1
    return tuple(
        RingStep(
            compute=(rank + last - t) % num_ranks,
            send=(rank + last - t) % num_ranks if t < last else None,
            receive=(rank + last - t) % num_ranks if t > 0 else None,
        )
        for t in range(num_ranks)
    )


def forwards_to(num_ranks: int, rank: int, tile: int) -> int | None:
    """The rank to which an AllGather tile goes on from here, or None where its way ends (its owner is next)."""
    following = (rank + 1) % num_ranks
    return None if following == tile or num_ranks == 1 else following


@lru_cache(maxsize=256)
def chunks(num_rows: int, row_bytes: int) -> tuple[Span, ...]:
    """The rows of a tile as they travel: a few chunks of about CHUNK_BYTES; none for an empty tile."""
    if num_rows == 0:
        return ()
    count = max(1, min(num_rows * row_bytes // CHUNK_BYTES, MAX_CHUNKS, num_rows))
    return tuple(Span(num_rows * i // count, num_rows * (i + 1) // count) for i in range(count))
