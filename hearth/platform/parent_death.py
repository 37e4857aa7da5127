"""Child processes that must not outlive the process that started them.

`python -m hearth.platform.parent_death PID MODULE ...` runs a module as `python -m MODULE ...` does, in a process that ends
with its parent PID, also while it imports.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl option, from <linux/prctl.h>


def die_with_parent(parent: int) -> None:
    """Have Linux send SIGKILL when the parent dies. If that is no longer the process `parent`, exit at once."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
