"""The filter of system calls on both machines. What it does to a process here, the red team of workers tries."""

from __future__ import annotations

import errno
import platform
import re
import socket
import struct
from pathlib import Path

import pytest

from hearth.platform import system_calls

ALLOWED, REFUSED, MISSING = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
PID, OTHER_PID = 42, 43
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
HEADERS = {"x86_64": "x86_64-linux-gnu/asm/unistd_64.h", "aarch64": "asm-generic/unistd.h"}


def answer(program: bytes, machine: int, number: int, *arguments: int) -> int:
    """Run the program of BPF for one call."""
    data = struct.pack("<IIQ6Q", number, machine, 0, *arguments, *[0] * (6 - len(arguments)))
    instructions, position, value = list(struct.iter_unpack("HBBI", program)), 0, 0
    while True:
        code, if_true, if_false, constant = instructions[position]
        position += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, constant)
        elif code == 0x54:
            value &= constant
        elif code == 0x15:
            position += if_true if value == constant else if_false
        elif code == 0x35:
            position += if_true if value >= constant else if_false
        else:
            assert code == 0x06
            return constant


@pytest.mark.parametrize("name", MACHINES)
def test_calls_are_answered_by_their_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: name)
    machine, column = MACHINES[name], list(MACHINES).index(name)
    on_cpu, on_gpu = (system_calls._filter(system_calls._rules(PID, unix)) for unix in (False, True))
    stream, nonblocking, datagram = socket.SOCK_STREAM, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, socket.SOCK_DGRAM
    cases = [
        ((0, 63), (), ALLOWED),  # read
        ((41, 198), (socket.AF_INET, nonblocking, socket.IPPROTO_TCP), ALLOWED),  # socket
        ((41, 198), (socket.AF_INET6, stream, 0), ALLOWED),
        ((41, 198), (socket.AF_INET, stream, 262), REFUSED),  # MPTCP
        ((41, 198), (socket.AF_INET, datagram, 0), REFUSED),
        ((41, 198), (socket.AF_UNIX, stream, 0), REFUSED),
        ((41, 198), (socket.AF_NETLINK, socket.SOCK_RAW, 0), ALLOWED),
        ((41, 198), (socket.AF_NETLINK, socket.SOCK_RAW, 12), REFUSED),
        ((53, 199), (socket.AF_UNIX, stream), ALLOWED),  # socketpair
        ((53, 199), (socket.AF_UNIX, datagram), REFUSED),
        ((56, 220), (0x3D0F00,), ALLOWED),  # clone: a thread
        ((56, 220), (17,), REFUSED),
        ((435, 435), (), MISSING),  # clone3
        ((62, 129), (PID, 15), ALLOWED),  # kill
        ((62, 129), (OTHER_PID, 15), REFUSED),
        ((62, 129), (1 << 32 | OTHER_PID, 15), REFUSED),  # the kernel takes the lower half
        ((302, 261), (0, 7), ALLOWED),  # prlimit64
        ((302, 261), (OTHER_PID, 7), REFUSED),
        ((44, 206), (3, 0, 0, 0x4000), ALLOWED),  # sendto
        ((44, 206), (3, 0, 0, 0x20004000), REFUSED),
        ((257, 56), (0, 0, 0o1000), REFUSED),  # openat: truncated, to be read
        ((257, 56), (0, 0, 0o1101), ALLOWED),
        ((16, 29), (0, 0x5412), REFUSED),  # ioctl
        ((16, 29), (0, 0x5413), ALLOWED),
        *((numbers, (), REFUSED) for numbers in system_calls._REFUSED.values() if numbers[column] >= 0),
    ]
    for numbers, arguments, expected in cases:
        assert answer(on_cpu, machine, numbers[column], *arguments) == expected, (numbers, arguments)
        assert answer(on_cpu, machine ^ 1, numbers[column], *arguments) == REFUSED
        assert answer(on_cpu, machine, numbers[column] | 0x40000000, *arguments) == REFUSED
    assert answer(on_gpu, machine, (41, 198)[column], socket.AF_UNIX, stream, 0) == ALLOWED


@pytest.mark.parametrize("name", MACHINES)
def test_numbers_are_those_of_the_kernels_headers(name: str) -> None:
    header = Path("/usr/include") / HEADERS[name]
    if not header.exists():
        pytest.skip(f"{header} is not installed here")
    found = dict(re.findall(r"^#define __NR(?:3264)?_(\w+) (\d+)$", header.read_text(), re.MULTILINE))
    column = list(MACHINES).index(name)
    for call, numbers in system_calls._REFUSED.items():
        if numbers[column] >= 0 and numbers[column] < 438:  # headers may be older than later calls
            assert int(found[call]) == numbers[column], call
