"""The run-time directory of this user on this host: sockets, locks and records that mean nothing after a reboot.

Standard library only: the supervisor of workers imports it and has to start fast.
"""

import os
import stat as file_modes
from collections.abc import Mapping


def runtime_dir(env: Mapping[str, str]) -> str:
    """`$XDG_RUNTIME_DIR/nvrx-<uid>`, else `/tmp/nvrx-<uid>`."""
    return os.path.join(env.get("XDG_RUNTIME_DIR") or "/tmp", f"nvrx-{os.getuid()}")


def make_private(directory: str | bytes) -> None:
    """Make it if missing, for this user alone. Raises OSError, also where it is another user's."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    found = os.stat(directory)
    if found.st_uid != os.geteuid():
        raise PermissionError(1, "belongs to another user")
    if file_modes.S_IMODE(found.st_mode) != 0o700:
        os.chmod(directory, 0o700)
