"""Processes that are forked from one that has imported the worker's libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch has no wheel for this Python here")

_FORK = """
import os, signal, threading
from agent.worker.fork_server import _import_library

_import_library("torch")
print(len(os.listdir("/proc/self/task")), flush=True)
if (pid := os.fork()) == 0:
    import torch
    torch.set_num_threads(2)
    x = torch.randn(1000, 1000)
    print(bool(torch.allclose((x @ x.t()).diagonal(), x.square().sum(1), rtol=1e-3)), flush=True)
    os._exit(0)
killer = threading.Timer(30, os.kill, (pid, signal.SIGKILL))
killer.start()
os.waitpid(pid, 0)
killer.cancel()
"""


def test_forked_process_computes_with_several_threads() -> None:
    """Threads that an import has started before the fork would be missing, and the first computation would never end."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OPENBLAS_NUM_THREADS": "1"}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        environ.pop(name, None)
    done = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=120, env=environ)
    assert done.stdout.split() == ["1", "True"], done.stderr
