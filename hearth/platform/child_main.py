"""The first code of a child process: it must not outlive its parent, and may import its modules before it gets its task.

`python -m hearth.platform.child_main PID MODULE ...` runs a module as `python -m MODULE ...` does, in a process that ends with
its parent PID, also while it imports.

`python -m hearth.platform.child_main PID --spare MODULE ...` imports all the modules, writes `READY_LINE` to stderr, and waits
for its stdin to end. Then it calls `main` of the first module with the bytes of its stdin. Without any it ends: its parent has
stopped or needs it no more. The imports run with low priority, in a thread of their own: Linux has a priority for each thread,
and a process without privileges can lower it, but not raise it again for the task.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import runpy
import signal
import sys
import threading

SPARE = "--spare"
READY_LINE = "ready"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl options, from <linux/prctl.h>
_IMPORT_NICENESS = 10  # of 19: the imports get about a tenth of a processor that others want, too


def die_with_parent(parent: int) -> None:
    """Have Linux send SIGKILL when the parent dies. If that is no longer the process `parent`, exit at once."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def adopt_orphans(adopt: bool) -> None:
    """Whether descendants of this process become its children when their parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def _import_all(names: list[str]) -> None:
    try:
        if sys.platform == "linux":  # elsewhere, the priority is that of the whole process
            os.setpriority(os.PRIO_PROCESS, 0, max(_IMPORT_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
        for name in names:
            importlib.import_module(name)
        print(READY_LINE, file=sys.stderr, flush=True)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)


def _run_spare(names: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its children itself
    importing = threading.Thread(target=_import_all, args=(names,), name="imports", daemon=True)
    importing.start()
    task = sys.stdin.buffer.read()
    if not task:
        os._exit(0)  # without waiting for the imports
    importing.join()
    importlib.import_module(names[0]).main(task)
    sys.stdout.flush()
    os._exit(0)  # the parent waits for the end, and freeing the libraries' memory takes time


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    if sys.argv[2] == SPARE:
        _run_spare(sys.argv[3:])
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
