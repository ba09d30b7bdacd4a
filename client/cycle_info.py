"""`--cycle-info-dir` (rule H5): each cycle as a JSON file, and a link `current`, for scripts that watch a directory.

`<dir>/<run>.cycle-<n>.json` holds the cycle's rank map, first as chosen and then as ended; `<dir>/current` points to
the latest. Many nodes may share the directory: all write the same, and what is newer is never put back. Knows no
protocol; may block as long as the file system does.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from pathlib import Path

from nvrx.core.ids import CycleNumber, RunId

from .worker_files import write_whole

CURRENT = "current"
ENDED = "ENDED"
_NAME = re.compile(r"(?P<run>.+)\.cycle-(?P<cycle>\d+)\.json")


class CycleInfo:
    """The cycles of one run in a directory, which is made if missing."""

    def __init__(self, directory: Path, run_id: RunId) -> None:
        self._directory = directory.absolute()
        self._run_id = run_id

    def path(self, cycle: CycleNumber) -> Path:
        return self._directory / f"{self._run_id}.cycle-{cycle}.json"

    def keep(self, cycle: CycleNumber, rank_map: str, *, has_ended: bool) -> None:
        """Write a cycle's rank map (JSON), unless the file says as much already. Raises OSError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self.path(cycle)
        there = _read(path)
        if there != rank_map and (has_ended or not _says_ended(there)):
            write_whole(path, rank_map)
        self._point_to(path.name, cycle)

    def _point_to(self, name: str, cycle: CycleNumber) -> None:
        link = self._directory / CURRENT
        with contextlib.suppress(OSError):  # no link yet, or something that is none: it is replaced
            found = _NAME.fullmatch(os.readlink(link))
            if found is not None and found["run"] == self._run_id and int(found["cycle"]) >= cycle:
                return
        new = link.with_name(f".{CURRENT}.{uuid.uuid4().hex}")
        new.symlink_to(name)
        new.replace(link)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _says_ended(text: str) -> bool:
    try:
        found = json.loads(text)
    except ValueError:
        return False
    return isinstance(found, dict) and str(found.get("state", "")).endswith(ENDED)
