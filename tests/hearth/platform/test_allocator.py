"""Settings of glibc's allocator, in processes of their own."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="mallinfo2 came with glibc 2.33")

# Prints how much of a large buffer is mapped on its own, after a buffer of this size was freed.
_SCRIPT = """
import ctypes, sys
from hearth.platform import machine

class Info(ctypes.Structure):
    _fields_ = [(f"field{number}", ctypes.c_size_t) for number in range(10)]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Info
if sys.argv[1]:
    getattr(machine, sys.argv[1])()
first = bytearray(200 << 10)
del first
before = mallinfo2().field4
second = bytearray(200 << 10)
print(mallinfo2().field4 - before)
"""


@pytest.mark.parametrize(
    ("setting", "is_mapped"), [("", False), ("unmap_freed_buffers", True), ("keep_freed_buffers", False)]
)
def test_large_buffers_are_mapped_one_by_one_only_if_freed_ones_are_not_to_stay(setting: str, is_mapped: bool) -> None:
    command = [sys.executable, "-c", _SCRIPT, setting]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (int(output.stdout) >= 200 << 10) is is_mapped
