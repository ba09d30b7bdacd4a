"""What this node keeps of each cycle on disk: outputs, error files, rank maps, the agent's log.

`<log-dir>/<run>/<node>/agent.log` and `<log-dir>/<run>/<node>/cycle-<n>/rank-<global>.{out,err}`.
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from nvrx.core.facts import MAX_MESSAGE, MAX_STDERR_TAIL
from nvrx.core.ids import CycleNumber, GlobalRank, NodeId, RunId

_MAX_ERROR_FILE = 1024 * 1024


@dataclass(frozen=True)
class LastWords:
    """What a worker left behind: the error it wrote itself, and the end of its standard error."""

    message: str
    stderr_tail: str


class WorkerFiles:
    """The files of one node in one run."""

    def __init__(self, log_dir: Path, run_id: RunId, node_id: NodeId) -> None:
        self.directory = log_dir.absolute() / run_id / node_id

    @property
    def agent_log(self) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        return self.directory / "agent.log"

    def cycle(self, cycle: CycleNumber) -> Path:
        """The directory of a cycle, made if missing."""
        path = self.directory / f"cycle-{cycle}"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def output(self, cycle: CycleNumber, rank: GlobalRank, kind: str) -> Path:
        """`rank-<global>.out`, `.err` or `.error.json`."""
        return self.cycle(cycle) / f"rank-{rank}.{kind}"

    def rank_map(self, cycle: CycleNumber) -> Path:
        """The map that the cycle's workers were started with."""
        return self.cycle(cycle) / "rank-map.json"

    def failed_rank_map(self, cycle: CycleNumber) -> Path:
        """The map of the cycle once it had ended, with its failure record."""
        return self.cycle(cycle) / "failed-rank-map.json"

    def last_words(self, cycle: CycleNumber, rank: GlobalRank) -> LastWords:
        """Read what a failed worker left; unreadable files count as silence."""
        directory = self.directory / f"cycle-{cycle}"
        tail = _tail(directory / f"rank-{rank}.err")
        written = _torch_error(directory / f"rank-{rank}.error.json")
        lines = [line for line in tail.splitlines() if line.strip()]
        return LastWords((written or (lines[-1] if lines else ""))[:MAX_MESSAGE], tail)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that nobody ever sees a part of it, whoever else writes it too. Raises OSError."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - MAX_STDERR_TAIL))
            return file.read(MAX_STDERR_TAIL).decode("utf-8", "replace")
    except OSError:
        return ""


def _torch_error(path: Path) -> str:
    """The text in the file that torch's `@record` writes (TORCHELASTIC_ERROR_FILE)."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MAX_ERROR_FILE))
    except (OSError, ValueError):
        return ""
    message = found.get("message") if isinstance(found, dict) else None
    if isinstance(message, dict):
        message = message.get("message")
    return message if isinstance(message, str) else ""
