"""Child processes that must not outlive the process that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl option, from <linux/prctl.h>


def die_with_parent(parent: int) -> None:
    """Have Linux send SIGKILL when the parent dies. If that is no longer the process `parent`, exit at once."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
