"""How fast an emulated device is: seconds of one BERT-Large encoder layer over 284 rows, float32, one thread.

`python -m tools.testbed.calibrate` prints them. The testbed runs it on all devices at once, under their own limits: a
quota, and neighbours on the same core, cost more than their share of the time (caches go cold).
"""

from __future__ import annotations

import statistics
import time

_HIDDEN, _HEADS, _FFN, _ROWS = 1024, 16, 4096, 284
_COPIES = 4  # of the weights, in turn: in a model of 24 layers none is still in the cache when its turn comes
_RUNS = 9


def measure() -> float:
    """Elapsed seconds of the median run."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shapes = ((3 * _HIDDEN, _HIDDEN), (_HIDDEN, _HIDDEN), (_FFN, _HIDDEN), (_HIDDEN, _FFN))
    layers = [[torch.randn(shape, generator=generator) * 0.02 for shape in shapes] for _ in range(_COPIES)]
    x_TH = torch.randn(_ROWS, _HIDDEN, generator=generator)
    seconds = []
    with torch.inference_mode():
        for run in range(-1, _RUNS):
            qkv, out, up, down = layers[run % _COPIES]
            began = time.perf_counter()
            parts = functional.linear(x_TH, qkv).view(_ROWS, 3, _HEADS, -1).permute(1, 2, 0, 3)
            attended = functional.scaled_dot_product_attention(parts[0][None], parts[1][None], parts[2][None])
            mixed = functional.linear(attended[0].transpose(0, 1).reshape(_ROWS, _HIDDEN), out)
            normed = functional.layer_norm(mixed + x_TH, (_HIDDEN,))
            expanded = functional.linear(functional.gelu(functional.linear(normed, up)), down)
            functional.layer_norm(expanded + normed, (_HIDDEN,))
            if run >= 0:  # the first one warms up
                seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    print(f"{measure():.4f}")
