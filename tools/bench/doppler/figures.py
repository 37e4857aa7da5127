"""Figures of Doppler's paper (arXiv 2505.23131 v1) as data: its tables, and times per episode of its plotting notebook. Pure.

Milliseconds on real GPUs, the mean of ten runs of the best assignment that each method found. Methods have the names of
`rows`; `doppler-sys` is Doppler with stage III.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tools.bench.tensor.graphs import GraphName

Figures = Mapping[GraphName, Mapping[str, float]]

# Four P100 with 16 GB each.
_FOUR: Figures = {
    "chain-mm": {
        "local": 439.9, "critical-path": 230.4, "placeto": 137.1, "enumerative": 139.0, "doppler-sim": 122.5,
        "doppler-sys": 123.4, "sel-only": 127.0, "plc-only": 121.6,
    },
    "ffnn": {
        "local": 148.5, "critical-path": 217.8, "placeto": 126.3, "enumerative": 50.2, "doppler-sim": 49.9,
        "doppler-sys": 47.4, "sel-only": 59.1, "plc-only": 63.2,
    },
    "llama-block": {
        "local": 462.8, "critical-path": 230.9, "placeto": 411.5, "enumerative": 172.7, "doppler-sim": 191.5,
        "doppler-sys": 160.3, "sel-only": 175.6, "plc-only": 172.9,
    },
    "llama-layer": {
        "local": 483.2, "critical-path": 292.6, "placeto": 295.1, "enumerative": 174.8, "doppler-sim": 167.0,
        "doppler-sys": 150.6, "sel-only": 161.7, "plc-only": 159.5,
    },
}  # fmt: skip
# The same with 8 GB each.
_HALVED: Figures = {
    "chain-mm": {
        "local": 439.8, "critical-path": 310.0, "placeto": 243.5, "enumerative": 133.5, "doppler-sys": 122.6
    },
    "ffnn": {"local": 148.2, "critical-path": 225.8, "placeto": 126.8, "enumerative": 49.2, "doppler-sys": 46.0},
    "llama-block": {
        "local": 465.1, "critical-path": 216.8, "placeto": 433.5, "enumerative": 233.8, "doppler-sys": 190.2
    },
    "llama-layer": {
        "local": 482.6, "critical-path": 292.5, "placeto": 302.1, "enumerative": 172.8, "doppler-sys": 154.0
    },
}  # fmt: skip
# Eight V100 with 32 GB each, in two meshes with four links between them.
_EIGHT: Figures = {
    "chain-mm": {"local": 83.5, "critical-path": 69.6, "enumerative": 33.5, "doppler-sys": 32.1},
    "ffnn": {"local": 51.4, "critical-path": 50.0, "enumerative": 20.0, "doppler-sys": 16.2},
    "llama-block": {"local": 154.4, "critical-path": 117.6, "enumerative": 109.6, "doppler-sys": 109.7},
    "llama-layer": {"local": 105.0, "critical-path": 105.4, "enumerative": 97.5, "doppler-sys": 90.6},
}

# By source and target: after no episode on the target, after 2,000 and after 4,000.
TRANSFER_MS: Mapping[tuple[GraphName, GraphName], tuple[float, float, float]] = {
    ("ffnn", "llama-block"): (251.0, 165.3, 159.4),
    ("chain-mm", "llama-block"): (242.3, 184.9, 174.0),
    ("ffnn", "llama-layer"): (206.1, 158.2, 155.8),
    ("chain-mm", "llama-layer"): (338.2, 164.4, 156.4),
}
SEEDS_MS = (123.2, 119.6, 122.7, 123.9, 121.7)  # Doppler on ChainMM with five seeds


class MessagePassing(NamedTuple):
    """Doppler on ChainMM with message passing once per step or once per episode."""

    milliseconds: float
    num_passes: int  # until the best assignment was found


PER_STEP, PER_EPISODE = MessagePassing(121.7, 107_856), MessagePassing(122.5, 3_425)


class EpisodeSeconds(NamedTuple):
    """Seconds of one episode on a graph, on the authors' machine."""

    rollout: float
    training: float
    placeto_training: float


EPISODE_SECONDS: Mapping[GraphName, EpisodeSeconds] = {
    "chain-mm": EpisodeSeconds(1.18, 1.84, 3.72),
    "ffnn": EpisodeSeconds(2.87, 4.25, 9.24),
    "llama-block": EpisodeSeconds(2.46, 3.65, 9.40),
    "llama-layer": EpisodeSeconds(3.29, 4.95, 11.9),
}


def paper_ms(graph: GraphName, devices: int, memory: float) -> Mapping[str, float]:
    """The paper's times by method; `memory` below 1 stands for the halved memory, measured on four devices only."""
    if devices == 8:
        return _EIGHT[graph] if memory >= 1 else {}
    return (_FOUR if memory >= 1 else _HALVED)[graph]
