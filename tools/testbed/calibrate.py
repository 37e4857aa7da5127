"""How fast one core of this machine is: CPU seconds of one BERT-Large encoder layer over 284 rows, float32, one thread.

`python -m tools.testbed.calibrate` prints them; `core_seconds` runs that in a process of its own, with the instructions
capped as on the emulated devices.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from hearth.errors import BadSetting
from tools.testbed.registry import RUN_DIR
from tools.testbed.scenario import InstructionSet, capped_environment

_HIDDEN, _HEADS, _FFN, _ROWS = 1024, 16, 4096, 284
_COPIES = 4  # of the weights, in turn: in a model of 24 layers none is still in the cache when its turn comes
_RUNS = 12
_CACHE = RUN_DIR / "core_seconds.json"
_CACHE_SECONDS = 3600.0
_TIMEOUT_SECONDS = 120.0


def core_seconds(instruction_set: InstructionSet, core: int | None = None) -> float:
    """Measured at most once an hour. Raises BadSetting where torch does not run."""
    try:
        known = json.loads(_CACHE.read_text())
        measured = known[instruction_set]
        if 0 <= time.time() - measured["unix_seconds"] < _CACHE_SECONDS:
            return float(measured["core_seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    seconds = _measured_by_child(instruction_set, core)
    if not isinstance(known, dict):
        known = {}
    known[instruction_set] = {"core_seconds": seconds, "unix_seconds": time.time()}
    try:
        RUN_DIR.mkdir(parents=True, exist_ok=True)
        _CACHE.write_text(json.dumps(known))
    except OSError:  # not root: it is measured anew each time
        pass
    return seconds


def _measured_by_child(instruction_set: InstructionSet, core: int | None) -> float:
    pinned = core if core is not None else max(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-m", "tools.testbed.calibrate", str(pinned)],
        env={**os.environ, **capped_environment(instruction_set)},
        capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS,
    )  # fmt: skip
    try:
        return float(done.stdout)
    except ValueError:
        said = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]
        raise BadSetting(setting="the calibration of this machine", reason=said) from None


def measure() -> float:
    """CPU seconds of the fastest run, so that what else the machine does counts as little as it can."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shapes = ((3 * _HIDDEN, _HIDDEN), (_HIDDEN, _HIDDEN), (_FFN, _HIDDEN), (_HIDDEN, _FFN))
    layers = [[torch.randn(shape, generator=generator) * 0.02 for shape in shapes] for _ in range(_COPIES)]
    x_TH = torch.randn(_ROWS, _HIDDEN, generator=generator)
    best = float("inf")
    with torch.inference_mode():
        for run in range(_RUNS):
            qkv, out, up, down = layers[run % _COPIES]
            began = time.process_time()
            parts = functional.linear(x_TH, qkv).view(_ROWS, 3, _HEADS, -1).permute(1, 2, 0, 3)
            attended = functional.scaled_dot_product_attention(parts[0][None], parts[1][None], parts[2][None])
            mixed = functional.linear(attended[0].transpose(0, 1).reshape(_ROWS, _HIDDEN), out)
            normed = functional.layer_norm(mixed + x_TH, (_HIDDEN,))
            expanded = functional.linear(functional.gelu(functional.linear(normed, up)), down)
            functional.layer_norm(expanded + normed, (_HIDDEN,))
            best = min(best, time.process_time() - began)
    return best


if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.sched_setaffinity(0, {int(sys.argv[1])})
    print(f"{measure():.4f}")
