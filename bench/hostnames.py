"""Where host names come from, for this process and all that it starts. Knows nothing of what is measured.

torch's TCPStore looks up the name of every peer that connects (reverse DNS), inside its only thread. With a
slow or silent resolver that costs 0.1 s to 10 s per connection: it would be measured, not the recovery.
So names come from files only, or, where that very cost is measured, from a resolver that answers late.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

NSSWITCH = Path("/etc/nsswitch.conf")
RESOLV = Path("/etc/resolv.conf")
_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_DNS = ("127.0.0.1", 53)
_NO_SUCH_NAME = struct.pack(">HHHHH", 0x8183, 1, 0, 0, 0)  # flags of an answer, and one question comes back with it
_ID_BYTES, _HEADER_BYTES = 2, 12


def use_files_only(scratch: Path) -> str | None:
    """Enter a private mount namespace in which nsswitch.conf says `hosts: files`; None, or why not.

    Must be called before any thread is started: only the calling thread and its children are moved.
    """
    try:
        _replace(scratch, _CLONE_NEWNS, {NSSWITCH: _nsswitch("files")})
    except OSError as error:
        return str(error)
    return None


def use_late_resolver(scratch: Path, answer_after_s: float) -> None:
    """Ask for all names a resolver that knows none and answers late: here, in a network of this process's own.

    Raises OSError. To be called before any thread is started, as above; it starts one.
    """
    resolv = f"nameserver {_DNS[0]}\n"
    _replace(scratch, _CLONE_NEWNS | _CLONE_NEWNET, {NSSWITCH: _nsswitch("dns"), RESOLV: resolv})
    server = socket.socket(type=socket.SOCK_DGRAM)
    fcntl.ioctl(server, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    server.bind(_DNS)
    threading.Thread(target=_answer_late, args=(server, answer_after_s), daemon=True).start()


def _answer_late(server: socket.socket, after_s: float) -> None:
    due: deque[tuple[float, bytes, tuple[str, int]]] = deque()
    while True:
        server.settimeout(max(1e-6, due[0][0] - time.monotonic()) if due else None)
        try:
            query, asker = server.recvfrom(512)
        except TimeoutError:
            _, answer, asker = due.popleft()
            server.sendto(answer, asker)
        else:
            due.append((time.monotonic() + after_s, no_such_name(query), asker))


def no_such_name(query: bytes) -> bytes:
    """The answer of a name server that knows no name."""
    return query[:_ID_BYTES] + _NO_SUCH_NAME + query[_HEADER_BYTES:]


def _nsswitch(source: str) -> str:
    kept = [line for line in NSSWITCH.read_text().splitlines() if not line.startswith("hosts:")]
    return "\n".join([*kept, f"hosts: {source}", ""])


def _replace(scratch: Path, namespaces: int, files: Mapping[Path, str]) -> None:
    """Enter namespaces of our own, in which these files read otherwise. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(namespaces), "unshare")
    _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount --make-rprivate /")
    # Not where another call put them: those files are mounted as they are, and whoever started us reads them.
    own = Path(tempfile.mkdtemp(prefix="names-", dir=scratch))
    for path, content in files.items():
        replacement = own / path.name
        replacement.write_text(content)
        _check(libc.mount(bytes(replacement), bytes(path), None, _MS_BIND, None), f"mount on {path}")


def _check(result: int, what: str) -> None:
    if result != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{what}: {os.strerror(errno)}")
