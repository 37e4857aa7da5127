"""The confinement of a process: what it may read, write and signal. Each case runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_BEGIN = """
import os, sys
from pathlib import Path
from hearth.platform.confine import confine

store, scratch, key = map(Path, sys.argv[1:4])
if not confine([store], [scratch]):
    print("unsupported")
    sys.exit()
"""


def run_confined(tmp_path: Path, code: str, *arguments: str, begin: str = "") -> str:
    """What the code prints in a process that may read `store` and write `scratch`. `begin` runs before it is confined."""
    for name in ("store", "scratch", "state"):
        (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / "store" / "chunk").write_text("weights")
    (tmp_path / "state" / "key").write_text("secret")
    paths = [str(tmp_path / name) for name in ("store", "scratch", "state/key")]
    done = subprocess.run(
        [sys.executable, "-c", begin + _BEGIN + code, *paths, *arguments],
        cwd=tmp_path / "state", capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if done.stdout.strip() == "unsupported":
        pytest.skip("this kernel has no Landlock")
    return done.stdout.strip()


def test_key_is_not_readable_while_the_store_is(tmp_path: Path) -> None:
    code = """
print((store / "chunk").read_text())
(scratch / "file").write_text("x")
for forbidden in (key, key.parent / "new", store / "new"):
    try:
        forbidden.read_bytes() if forbidden == key else forbidden.write_text("x")
        print("allowed", forbidden)
    except PermissionError:
        print("denied")
"""
    assert run_confined(tmp_path, code).split() == ["weights", "denied", "denied", "denied"]


def test_packages_can_still_be_imported(tmp_path: Path) -> None:
    code = """
import numpy, onnxruntime, zmq, hearth.wire.messages
print(numpy.arange(3).sum())
"""
    pytest.importorskip("onnxruntime")
    assert run_confined(tmp_path, code) == "3"


def test_packages_in_any_folder_of_the_path_can_still_be_imported(tmp_path: Path) -> None:
    """`pip install --target` puts them there; the worker imports lz4 after it is confined, for instance."""
    for folder, distribution in (("target", "late-1.0.dist-info"), ("plain", "late-1.0")):
        (tmp_path / folder / distribution).mkdir(parents=True)
        (tmp_path / folder / "late.py").write_text(f"here = {folder!r}")
    code = """
for folder in sys.argv[4:]:
    try:
        print((Path(folder) / "late.py").read_text())
    except PermissionError:
        print("denied")
"""
    folders = [str(tmp_path / name) for name in ("target", "plain")]
    begin = "import sys\nsys.path += sys.argv[4:]\n"
    assert run_confined(tmp_path, code, *folders, begin=begin).splitlines() == ["here = 'target'", "denied"]


def test_threads_can_be_named_through_proc_as_cuda_does(tmp_path: Path) -> None:
    """libcuda fails with error 304 otherwise, so that no worker computes on a GPU. Other processes' entries stay closed."""
    code = """
import threading
found = []
def name():
    path = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
    path.write_text("cuda-thread")
    found.append(path.read_text().strip())
name()
thread = threading.Thread(target=name)
thread.start()
thread.join()
print(*found)
for other in (f"/proc/{os.getppid()}/oom_score_adj", f"/proc/{os.getppid()}/task/{os.getppid()}/comm"):
    try:
        open(other, "w").write("500")
        print("allowed")
    except PermissionError:
        print("denied")
"""
    assert run_confined(tmp_path, code).split() == ["cuda-thread", "cuda-thread", "denied", "denied"]


def test_parent_can_be_neither_traced_nor_read_nor_signalled(tmp_path: Path) -> None:
    code = """
import ctypes
print("allowed" if ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0 else "denied")  # PTRACE_ATTACH
try:
    address = int(open(f"/proc/{os.getppid()}/maps").readline().partition("-")[0], 16)
    with open(f"/proc/{os.getppid()}/mem", "rb") as file:
        file.seek(address)
        print("read", file.read(1))
except OSError:
    print("denied")
"""
    assert run_confined(tmp_path, code).split() == ["denied", "denied"]
