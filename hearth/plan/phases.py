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


class Phase(IntEnum):
    """A transfer of a step: the collective, and the block that it serves. The numbers are part of the protocol."""

    EMBED = 0
    GATHER_ATTENTION = 1
    REDUCE_ATTENTION = 2
    GATHER_MLP = 3
    REDUCE_MLP = 4
    GATHER_KEYS = 5
    GATHER_VALUES = 6
    REDUCE_GATHER_ATTENTION = 7  # second half of an AllReduce
    REDUCE_GATHER_MLP = 8
    EXCHANGE_QKV = 9  # all-to-all: Q, K and V of some rows, to the owner of their heads
    EXCHANGE_HEADS = 10  # all-to-all: head outputs, to the owner of their rows
    ORDER = 11  # rank 0 to all: what a step of a generation does (a message, as bytes)
    SUM_ATTENTION = 12  # decoding: partial sums, to every peer in one hop
    SUM_MLP = 13
    HEAD_ROWS = 14  # rows whose next token is wanted, from their owner to everyone
    CANDIDATES = 15  # for the next token, to rank 0
    STAGE_ROWS = 16  # pipeline: hidden rows, to the next stage
    STEP_DONE = 17  # pipeline: the last stage to rank 0, after a step whose rows nobody wants
    TENSOR = 18  # graphs: `layer` numbers the tensors that leave their rank


TaskKind: TypeAlias = Work | Phase
