"""How the commands of the simulation start: with the same results in each process, and without output of the simulated ones."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable

# What the environment must hold for that. A caller that sets it spares the process a second start.
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",  # numpy's threads would wait busily for work that never comes
}


def start_reproducibly(module: str, main: Callable[[], int]) -> None:
    """Run `main` in a process of which the order of sets does not differ between runs, and exit with its status."""
    if not ENVIRONMENT.items() <= os.environ.items():
        os.environ.update(ENVIRONMENT)
        os.execv(sys.executable, [sys.executable, "-W", "ignore", "-m", module, *sys.argv[1:]])
    sys.exit(main())


def silence_process() -> None:
    """Log nothing, ignore abandoned tasks, and leave the time of garbage collection, which ends them, to the caller."""
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None  # abandoned tasks of killed processes
    gc.disable()
