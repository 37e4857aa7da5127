"""Refuses a process the system calls that a worker does not need, with a seccomp filter on x86-64 and 64-bit ARM.

The process cannot start another process or program, or act on one that is not its own; it has TCP sockets only, and cannot use
parts of the kernel in which flaws are often found. It may start threads. A refused call fails with EPERM, so that a library
goes on that has only tried.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

# By the name of the machine: its AUDIT_ARCH of <linux/audit.h>, and the column of its numbers below.
_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_FOREIGN = 0x40000000  # numbers from here on belong to another set of calls (x32), which would pass the filter

# Numbers on x86-64 and ARM, of <asm/unistd.h>; -1: there is no such call. From 424 on they are the same on all machines.
_REFUSED: dict[str, tuple[int, int]] = {
    # other programs and processes
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, -1), "vfork": (58, -1), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    # attributes and sizes of files, which Landlock does not restrict, or not in all versions
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1),
    "futimesat": (261, -1), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "setxattrat": (463, 463),
    "removexattrat": (466, 466), "truncate": (76, 45),
    # the kernel; without a namespace of its own, the process can mount nothing unless it is root's
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "unshare": (272, 97), "setns": (308, 268),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "reboot": (169, 142), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip

_ALLOW, _ERROR = 0x7FFF0000, 0x00050000  # SECCOMP_RET_ALLOW and SECCOMP_RET_ERRNO, to which the error is added
_REFUSE, _MISSING = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # BPF's instructions
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16  # offsets in struct seccomp_data
_SET_SECCOMP, _FILTER_MODE = 22, 2  # of prctl(2)
SET_NO_NEW_PRIVS = 38  # of prctl(2); required before a process restricts itself

# With these flags, a file that is opened to be read is truncated, too, past older versions of Landlock.
_TRUNC_MASK = os.O_TRUNC | os.O_ACCMODE
_TYPE_MASK = 0xF  # of a socket's type, without its flags
_CLONE_THREAD = 0x10000
_FAST_OPEN = 0x20000000  # MSG_FASTOPEN: connects, past Landlock's rules
_TERMINAL_INPUTS = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX type into the terminal from which the agent was started


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


class _Argument(NamedTuple):
    """The argument with this number, from 0 on, has this value, after the mask was applied. Its lower 32 bits count."""

    number: int
    value: int
    mask: int = 0xFFFFFFFF


class _Rule(NamedTuple):
    """The answer to one call: `then` if all arguments of one of the cases are so, else `otherwise`."""

    numbers: tuple[int, int]
    cases: Sequence[tuple[_Argument, ...]] = ()
    then: int = _ALLOW
    otherwise: int = _REFUSE

    def code(self, number: int) -> bytes:
        """The instructions for a call with this number; they leave other calls to those that follow."""
        code = b""
        for case in self.cases:
            code += b"".join(_test(each, 3 * (len(case) - position) - 2) for position, each in enumerate(case))
            code += _instruction(_RETURN, self.then)
        code += _instruction(_RETURN, self.otherwise)
        return _instruction(_IF_EQUAL, number, 0, len(code) // 8) + code


def can_refuse() -> bool:
    """Whether this machine and its kernel have such filters."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES or sys.maxsize < 1 << 32:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.prctl(_SET_SECCOMP, _FILTER_MODE, None, 0, 0) != 0 and ctypes.get_errno() == errno.EFAULT


def refuse_system_calls(unix_sockets: bool) -> bool:
    """Refuse this process those calls for good, before it starts other threads. Returns whether the system supports it.

    `unix_sockets`: it may make Unix sockets, over which the user's other programs can be reached.
    """
    if not can_refuse():
        return False
    code = _filter(_rules(os.getpid(), unix_sockets))
    program = _Program(len(code) // 8, code)
    libc = ctypes.CDLL(None, use_errno=True)
    checked(libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    checked(libc.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.byref(program), 0, 0))
    return True


def checked(result: int) -> int:
    """What a function of the C library has returned; raises OSError if it has failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _rules(pid: int, unix_sockets: bool) -> list[_Rule]:
    """All rules for the process `pid`. Frequent calls come first."""
    stream = _Argument(1, socket.SOCK_STREAM, _TYPE_MASK)
    sockets: list[tuple[_Argument, ...]] = [
        (_Argument(0, family), stream, _Argument(2, protocol))
        for family in (socket.AF_INET, socket.AF_INET6)
        for protocol in (0, socket.IPPROTO_TCP)
    ]
    sockets.append((_Argument(0, socket.AF_NETLINK), _Argument(2, 0)))  # the C library asks for addresses
    if unix_sockets:
        sockets.append((_Argument(0, socket.AF_UNIX),))
    fast_open = {index: [(_Argument(index, _FAST_OPEN, _FAST_OPEN),)] for index in (2, 3)}
    own = (_Argument(0, pid),)
    return [
        _Rule((44, 206), fast_open[3], _REFUSE, _ALLOW),  # sendto
        _Rule((46, 211), fast_open[2], _REFUSE, _ALLOW),  # sendmsg
        _Rule((307, 269), fast_open[3], _REFUSE, _ALLOW),  # sendmmsg
        _Rule((16, 29), [(_Argument(1, number),) for number in _TERMINAL_INPUTS], _REFUSE, _ALLOW),  # ioctl
        _Rule((2, -1), [(_Argument(1, os.O_TRUNC, _TRUNC_MASK),)], _REFUSE, _ALLOW),  # open
        _Rule((257, 56), [(_Argument(2, os.O_TRUNC, _TRUNC_MASK),)], _REFUSE, _ALLOW),  # openat
        _Rule((437, 437), otherwise=_MISSING),  # openat2: its flags are out of reach, as are those of clone3
        _Rule((41, 198), sockets),  # socket
        _Rule((53, 199), [(_Argument(0, socket.AF_UNIX), stream)]),  # socketpair: streams stay connected; for asyncio
        _Rule((56, 220), [(_Argument(0, _CLONE_THREAD, _CLONE_THREAD),)]),  # clone
        _Rule((435, 435), otherwise=_MISSING),  # clone3: the C library then calls clone
        _Rule((62, 129), [own]),  # kill
        _Rule((234, 131), [own]),  # tgkill
        _Rule((302, 261), [own, (_Argument(0, 0),)]),  # prlimit64
        *map(_Rule, _REFUSED.values()),
    ]


def _filter(rules: Sequence[_Rule]) -> bytes:
    """The program of the filter."""
    machine, column = _MACHINES[platform.machine()]
    code = _instruction(_LOAD, _MACHINE_AT) + _instruction(_IF_EQUAL, machine, 1, 0) + _instruction(_RETURN, _REFUSE)
    code += _instruction(_LOAD, _NUMBER_AT)
    code += _instruction(_IF_AT_LEAST, _FOREIGN, 0, 1) + _instruction(_RETURN, _REFUSE)
    for rule in rules:
        if (number := rule.numbers[column]) >= 0:
            code += rule.code(number)
    return code + _instruction(_RETURN, _ALLOW)


def _test(argument: _Argument, otherwise: int) -> bytes:
    """Three instructions that jump over `otherwise` further ones unless the argument is so."""
    offset = _ARGUMENTS_AT + 8 * argument.number  # little-endian: the lower half comes first
    code = _instruction(_LOAD, offset) + _instruction(_AND, argument.mask)
    return code + _instruction(_IF_EQUAL, argument.value, 0, otherwise)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
