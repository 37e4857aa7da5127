"""The vocabulary of a step: its computations (`Work`) and its transfers (`Phase`). Pure.

The simulator's tasks, the headers of tiles on the wire and the events of a trace use the same names, so that a predicted
step, a running one and a measured one can be compared part by part.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import TypeAlias


class Work(str, Enum):
    """A computation of a step. The values travel in traces and are shown to people."""

    EMBEDDING = "embedding"
    ENTER_ATTENTION = "enter attention"  # the norm before attention, where the model has one there
    QKV = "qkv"
    ATTENTION = "attention"
    OUT = "out"
    CONNECTIVE_ATTENTION = "connective 1"  # residual addition and norm after attention
    ENTER_MLP = "enter mlp"
    UP = "up"
    DOWN = "down"
    CONNECTIVE_MLP = "connective 2"
    ATTENTION_BLOCK = "attention block"  # QKV, attention and out, with no transfer between them
    MLP_BLOCK = "mlp block"  # up and down, with no transfer between them
    LAYERS = "layers"  # all layers of a stage (pipeline)
    HEAD = "head"
    WIRE = "wire"  # encryption, TCP and conversion of the formats of values
    SEGMENT = "segment"  # graphs: the operators of one device between two transfers
    OPERATOR = "operator"  # graphs


class Route(Enum):
    """How a tile of a phase travels."""

    GATHER = "gather"  # around the ring, each rank forwards it unread
    REDUCE = "reduce"  # around the ring, each rank adds its partial sum
    DIRECT = "direct"  # in one hop, from the rank that has it to the one that needs it


class Phase(IntEnum):
    """A transfer of a step: the collective, and the block that it serves. The numbers are part of the protocol.

    `work`: the computation that its tiles come from or go to, behind which it can hide. `verbatim`: not activations; no
    value format may change them.
    """

    route: Route
    work: Work | None
    verbatim: bool

    def __new__(
        cls, number: int, route: Route = Route.DIRECT, work: Work | None = None, verbatim: bool = False
    ) -> Phase:
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
    ORDER = 11, Route.DIRECT, None, True  # rank 0 to all: what a step of a generation does (a message, as bytes)
    SUM_ATTENTION = 12, Route.DIRECT  # decoding: partial sums, to every peer in one hop
    SUM_MLP = 13, Route.DIRECT
    HEAD_ROWS = 14, Route.DIRECT  # rows whose next token is wanted, from their owner to everyone
    CANDIDATES = 15, Route.DIRECT, None, True  # for the next token, to rank 0
    STAGE_ROWS = 16, Route.DIRECT  # pipeline: hidden rows, to the next stage
    STEP_DONE = 17, Route.DIRECT, None, True  # pipeline: the last stage to rank 0, after a step whose rows nobody wants
    TENSOR = 18, Route.DIRECT  # graphs: `layer` numbers the tensors that leave their rank


TaskKind: TypeAlias = Work | Phase
