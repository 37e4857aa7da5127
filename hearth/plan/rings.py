"""Ring schedules as data (Galaxy, section III-D): the tile that a rank computes, sends and receives in each step.

Tile k is the block of rows that rank k owns. Rank r sends to rank r+1 and receives from rank r-1, modulo the number of
ranks. The worker's collectives execute these steps; the simulator turns the same steps into tasks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from hearth.plan.geometry import Span

# A tile travels in chunks, so that a rank forwards one chunk while it receives the next one.
# More and smaller chunks would cost more in handling (about 0.2 ms each) than they gain.
CHUNK_BYTES = 128 << 10  # least size of a chunk, where a tile has several
MAX_CHUNKS = 2  # per tile


class RingStep(NamedTuple):
    """One step of one rank: compute with tile `compute` while sending `send` and receiving `receive` (None: no transfer)."""

    compute: int
    send: int | None
    receive: int | None


@lru_cache(maxsize=256)
def ring_all_gather(num_ranks: int, rank: int) -> tuple[RingStep, ...]:
    """Ring AllGather: in step t compute and forward tile r-t, and receive tile r-t-1; the last step has no transfers."""
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
    """Ring ReduceScatter over D ranks: in step t compute tile r+D-1-t, add the partial sum received for it, and send the sum.

    `receive` is the partial sum of the tile of the same step; it must have arrived before that tile can be sent or, in the
    last step, finished. The rank's own tile comes last.
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


def forward_target(num_ranks: int, rank: int, tile: int) -> int | None:
    """The rank to which this rank forwards an AllGather tile, or None if the next rank is the tile's owner."""
    following = (rank + 1) % num_ranks
    return None if following == tile or num_ranks == 1 else following


@lru_cache(maxsize=256)
def tile_chunks(num_rows: int, row_bytes: int) -> tuple[Span, ...]:
    """Split the rows of a tile into at most MAX_CHUNKS chunks of about CHUNK_BYTES or more; an empty tile has none."""
    if num_rows == 0:
        return ()
    count = max(1, min(num_rows * row_bytes // CHUNK_BYTES, MAX_CHUNKS, num_rows))
    return tuple(Span(num_rows * i // count, num_rows * (i + 1) // count) for i in range(count))
