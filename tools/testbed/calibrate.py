"""Speed of an emulated device: seconds of one BERT-Large encoder layer over 284 rows, float32, one thread.

`python -m tools.testbed.calibrate` prints them. The testbed runs it on all devices at once, under their own limits,
because a quota and other processes on the core cost more than their share of the time (caches go cold).
"""

from __future__ import annotations

import statistics
import time

import torch
from torch.nn import functional

_HIDDEN, _HEADS, _FFN, _ROWS = 1024, 16, 4096, 284  # BERT-Large's widths, and the rows of a step
_COPIES = 4  # sets of weights used in turn, so that none stays in the cache: in a model of 24 layers none does
_RUNS = 9  # timed runs, of which the median counts


class Layers:
    """Encoder layers of random weights, run in rotation."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(0)
        shapes = ((3 * _HIDDEN, _HIDDEN), (_HIDDEN, _HIDDEN), (_FFN, _HIDDEN), (_HIDDEN, _FFN))
        self._layers = [[torch.randn(shape, generator=generator) * 0.02 for shape in shapes] for _ in range(_COPIES)]
        self._x_TH = torch.randn(_ROWS, _HIDDEN, generator=generator)
        self.num_runs = 0

    def run(self) -> None:
        """Run the next layer once."""
        qkv, out, up, down = self._layers[self.num_runs % _COPIES]
        self.num_runs += 1
        with torch.inference_mode():
            parts = functional.linear(self._x_TH, qkv).view(_ROWS, 3, _HEADS, -1).permute(1, 2, 0, 3)
            attended = functional.scaled_dot_product_attention(parts[0][None], parts[1][None], parts[2][None])
            mixed = functional.linear(attended[0].transpose(0, 1).reshape(_ROWS, _HIDDEN), out)
            normed = functional.layer_norm(mixed + self._x_TH, (_HIDDEN,))
            expanded = functional.linear(functional.gelu(functional.linear(normed, up)), down)
            functional.layer_norm(expanded + normed, (_HIDDEN,))


def measure() -> float:
    """Elapsed seconds of the median run."""
    layers, seconds = Layers(), []
    layers.run()  # warm-up
    for _ in range(_RUNS):
        began = time.perf_counter()
        layers.run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    print(f"{measure():.4f}")
