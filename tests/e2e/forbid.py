"""A program: runs another where the kernel forbids some system calls, as a container's seccomp profile does.

`python -m tests.e2e.forbid set_mempolicy,get_mempolicy=ENOSYS COMMAND...`: they fail with EPERM, or as is said, for all
that it starts, too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

_NUMBERS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237},
}
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def forbid(names: list[str]) -> None:
    """From now on these system calls of this process fail."""
    numbers = _NUMBERS[platform.machine()]
    code = [struct.pack("HBBI", _LOAD, 0, 0, 0)]
    for one in names:
        name, _, how = one.partition("=")
        code.append(struct.pack("HBBI", _JUMP_IF_EQUAL, 0, 1, numbers[name]))
        code.append(struct.pack("HBBI", _RETURN, 0, 0, _ERRNO | getattr(errno, how or "EPERM")))
    code.append(struct.pack("HBBI", _RETURN, 0, 0, _ALLOW))
    instructions = ctypes.create_string_buffer(b"".join(code))
    program = _Filter(len(code), ctypes.addressof(instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        sys.exit(f"no seccomp filter can be set here: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    forbid(sys.argv[1].split(","))
    os.execvp(sys.argv[2], sys.argv[2:])
