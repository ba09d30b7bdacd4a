"""This host and interpreter as far as nodes compare them (rule A2): names, process ids, versions.

Reads package metadata and imports none of what it describes.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from nvrx.core.fingerprint import Machine


def this_machine(command: Sequence[str], env: Mapping[str, str], node_id: str) -> Machine:
    """What is known here. Versions are left out where the command names another Python than the agent's."""
    is_ours = not _names_another_python(command[0], env)
    return Machine(
        names=(socket.gethostname(), node_id),
        # A batch script's $$ is the agent's parent, or the agent itself after `exec`.
        process_ids=[one for one in (os.getpid(), os.getppid()) if one > 1],
        python_version=platform.python_version() if is_ours else None,
        torch_version=_torch_version() if is_ours else None,
    )


def _torch_version() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def _names_another_python(first_word: str, env: Mapping[str, str]) -> bool:
    """Whether the command is a Python that is not this one, so that its packages are not known here."""
    if not Path(first_word).name.startswith("python"):
        return False
    found = shutil.which(first_word, path=env.get("PATH", os.defpath))
    if found is None:
        return False
    # Two environments may link to one interpreter: it is the folder that says which packages there are.
    theirs, ours = Path(found), Path(sys.executable)
    return theirs.parent.resolve() != ours.parent.resolve() or theirs.resolve() != ours.resolve()
