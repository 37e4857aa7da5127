"""The computations (`Work`) and transfers (`Phase`) of a step, and the ring schedules of its collectives. Pure.

The simulator's tasks, tile headers on the wire and trace events all use these names, so that predicted and measured steps can
be compared part by part. The worker's collectives execute the schedules of Galaxy (section III-D) step by step, and the
simulator turns the same steps into tasks. Tile k is the block of rows that rank k owns. Rank r sends to rank r+1 and receives
from rank r-1, modulo the number of ranks.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from hearth.plan.geometry import Span

# A tile travels in chunks, so that a rank forwards one chunk while it receives the next one.
# More and smaller chunks would cost more in handling (about 0.2 ms each) than they gain.
CHUNK_BYTES = 128 << 10  # least size of a chunk, where a tile has several
MAX_CHUNKS = 2  # per tile


class Work(str, Enum):
    """A computation of a step. The values are part of traces and are shown to users."""

    EMBEDDING = "embedding"
    PRE_NORM_ATTENTION = "enter attention"  # normalisation before attention, if the model has pre-norms
    QKV = "qkv"
    ATTENTION = "attention"
    OUT = "out"
    CONNECTIVE_ATTENTION = "connective 1"  # residual addition and norm after attention
    PRE_NORM_MLP = "enter mlp"
    UP = "up"
    DOWN = "down"
    CONNECTIVE_MLP = "connective 2"
    ATTENTION_BLOCK = "attention block"  # QKV, attention and out, with no transfer between them
    MLP_BLOCK = "mlp block"  # up and down, with no transfer between them
    LAYERS = "layers"  # all layers of a stage (pipeline)
    HEAD = "head"
    WIRE = "wire"  # encryption, TCP, and conversion of value formats
    SEGMENT = "segment"  # ONNX graphs: a segment
    OPERATOR = "operator"  # ONNX graphs


class Route(Enum):
    """The path that the tiles of a phase take."""

    GATHER = "gather"  # around the ring; each rank forwards the tile unchanged
    REDUCE = "reduce"  # around the ring; each rank adds its partial sum
    DIRECT = "direct"  # in one hop, from the rank that has the tile to the rank that needs it


class Phase(IntEnum):
    """A transfer of a step: a collective and the block that it serves. The numbers are part of the protocol.

    `work` is the computation that produces or consumes the tiles, with which the transfer can overlap. `verbatim` marks data
    that are not activations: they are sent exactly, whatever the value format.
    """

    route: Route
    work: Work | None
    verbatim: bool

    def __new__(
        cls, number: int, route: Route = Route.DIRECT, work: Work | None = None, verbatim: bool = False
    ) -> Phase:
        """Create a member whose integer value is `number`."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.route, member.work, member.verbatim = route, work, verbatim
        return member

    EMBED = 0, Route.DIRECT
    GATHER_ATTENTION = 1, Route.GATHER, Work.QKV
    REDUCE_ATTENTION = 2, Route.REDUCE, Work.OUT
    GATHER_MLP = 3, Route.GATHER, Work.UP
    REDUCE_MLP = 4, Route.REDUCE, Work.DOWN
    GATHER_KEYS = 5, Route.GATHER
    GATHER_VALUES = 6, Route.GATHER
    REDUCE_GATHER_ATTENTION = 7, Route.GATHER  # second half of an AllReduce
    REDUCE_GATHER_MLP = 8, Route.GATHER
    EXCHANGE_QKV = 9, Route.DIRECT, Work.QKV  # all-to-all: Q, K and V of some rows, to the owner of their heads
    EXCHANGE_HEADS = 10, Route.DIRECT, Work.ATTENTION  # all-to-all: head outputs, to the owner of their rows
    ORDER = 11, Route.DIRECT, None, True  # rank 0 to all: the next step of a generation (a `StepOrder` as bytes)
    SUM_ATTENTION = 12, Route.DIRECT  # decoding: partial sums, to every peer in one hop
    SUM_MLP = 13, Route.DIRECT
    HEAD_ROWS = 14, Route.DIRECT  # rows whose next token is sampled, from their owner to all ranks
    CANDIDATES = 15, Route.DIRECT, None, True  # candidates for the next token, to rank 0
    STAGE_ROWS = 16, Route.DIRECT  # pipeline: hidden rows, to the next stage
    # Pipeline: last stage to rank 0, after a step that samples no token. Else: to rank 0, from a rank without heads and columns
    # that begins a step of a generation.
    STEP_DONE = 17, Route.DIRECT, None, True
    CACHE_COPY = 19, Route.DIRECT, None, True  # rows of a KV cache, to the rank that keeps the copy
    CACHE_MOVE = 20, Route.DIRECT, None, True  # rows of a KV cache of an earlier plan, to the rank that needs them
    TENSOR = 18, Route.DIRECT  # ONNX graphs: `layer` is the number of the tensor (`Routes.travelling`)


TaskKind: TypeAlias = Work | Phase


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
