"""An app that embeds one sentence again and again: `python PATH/embed_app.py KEY ADDRESS`, with a PYTHONPATH of any checkout.

Reads a number from each line of its input, embeds as often, one after the other, and writes the seconds of each call and the
sum of the last vector. It uses the public client library only, so that it runs with old versions of it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import hearth

_READY_SECONDS = 240.0  # for the coordinator to push and load
_TEXT = "switch on the lamp in the kitchen"


def main() -> None:
    """Answer the lines of standard input until it ends."""
    key, address = sys.argv[1:]
    with hearth.connect(address, Path(key), _READY_SECONDS) as home:
        home.wait_ready(_READY_SECONDS)
        for line in sys.stdin:
            seconds, total = [], 0.0
            for _ in range(int(line)):
                began = time.perf_counter()
                vectors = home.embed([_TEXT])
                seconds.append(time.perf_counter() - began)
                total = float(vectors.sum())
            print(json.dumps({"seconds": seconds, "sum": total}), flush=True)


if __name__ == "__main__":
    main()
