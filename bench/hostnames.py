"""Host names from files only, for this process and all that it starts. Knows nothing of what is measured.

torch's TCPStore looks up the name of every peer that connects (reverse DNS), inside its only thread. With a
slow or silent resolver that costs 0.1 s to 10 s per connection: it would be measured, not the recovery.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

NSSWITCH = Path("/etc/nsswitch.conf")
_CLONE_NEWNS = 0x00020000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000


def _check(result: int, what: str) -> None:
    if result != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{what}: {os.strerror(errno)}")


def use_files_only(scratch: Path) -> str | None:
    """Enter a private mount namespace in which nsswitch.conf says `hosts: files`; None, or why not.

    Must be called before any thread is started: only the calling thread and its children are moved.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    replacement = scratch / "nsswitch.conf"
    try:
        lines = NSSWITCH.read_text().splitlines()
        kept = [line for line in lines if not line.startswith("hosts:")]
        replacement.write_text("\n".join([*kept, "hosts: files", ""]))
        _check(libc.unshare(_CLONE_NEWNS), "unshare")
        _check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount --make-rprivate /")
        _check(libc.mount(bytes(replacement), bytes(NSSWITCH), None, _MS_BIND, None), f"mount on {NSSWITCH}")
    except OSError as error:
        return str(error)
    return None
