"""A child process that has imported its modules before it gets its task: `python -m hearth.platform.spare_child MODULE ...`.

It imports all the modules that are named, writes `READY_LINE` to stderr, and waits for its stdin to end. Then it calls
`main` of the first module with the bytes of its stdin. Without any it ends: its parent has stopped or needs it no more.

The imports run with low priority, in a thread of their own: Linux has a priority for each thread, and a process without
privileges can lower it, but not raise it again for the task.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading

READY_LINE = "ready"
_IMPORT_NICENESS = 10  # of 19: the imports get about a tenth of a processor that others want, too


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


def main(names: list[str]) -> None:
    """Entry point of the child."""
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
    main(sys.argv[1:])
