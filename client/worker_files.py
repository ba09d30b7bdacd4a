"""What this node keeps of each cycle on disk: outputs, error files, rank maps, the agent's log.

`<log-dir>/<run>/<node>/agent.log` and `<log-dir>/<run>/<node>/cycle-<n>/rank-<global>.{out,err}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path

from nvrx.commandline import Failed
from nvrx.core.facts import MAX_MESSAGE, MAX_STDERR_TAIL
from nvrx.core.ids import CycleNumber, GlobalRank, NodeId, RunId, name_problem

from .slow_files import Aside

_READ_WITHIN_S = 0.5
_MAX_ERROR_FILE = 1024 * 1024


@dataclass(frozen=True)
class LastWords:
    """What a worker left behind: the error it wrote itself, and the end of its standard error."""

    message: str
    stderr_tail: str


class WorkerFiles:
    """The files of one node in one run."""

    def __init__(self, log_dir: Path, run_id: RunId, node_id: NodeId) -> None:
        """Raises Failed where an id, that the coordinator may have told, would lead elsewhere."""
        for problem in (name_problem("the run id", run_id), name_problem("the node id", node_id)):
            if problem is not None:
                raise Failed(f"no folder for logs: {problem}")
        self.directory = log_dir.absolute() / run_id / node_id
        self._aside = Aside(_READ_WITHIN_S)

    @property
    def agent_log(self) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        return self.directory / "agent.log"

    def cycle(self, cycle: CycleNumber) -> Path:
        """The directory of a cycle, made if missing and possible: a full disk must not keep workers from starting."""
        path = self.directory / f"cycle-{cycle}"
        with contextlib.suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
        return path

    def output(self, cycle: CycleNumber, rank: GlobalRank, kind: str) -> Path:
        """`rank-<global>.out`, `.err` or `.error.json`, in a directory that need not be there yet."""
        return self.directory / f"cycle-{cycle}" / f"rank-{rank}.{kind}"

    def rank_map(self, cycle: CycleNumber) -> Path:
        """The map that the cycle's workers were started with."""
        return self.cycle(cycle) / "rank-map.json"

    def failed_rank_map(self, cycle: CycleNumber) -> Path:
        """The map of the cycle once it had ended, with its failure record."""
        return self.cycle(cycle) / "failed-rank-map.json"

    def last_words(self, cycle: CycleNumber, rank: GlobalRank, missing_tail: bytes | None = None) -> LastWords:
        """Read what a failed worker left; unreadable files count as silence, and so do those that do not answer.

        `missing_tail`: the end of its standard error where the file lacks it.
        """
        error_file, stderr_file = self.output(cycle, rank, "error.json"), self.output(cycle, rank, "err")
        found: list[LastWords] = []
        in_time = self._aside.do(lambda: found.append(words_in(error_file, stderr_file, missing_tail)))
        return found[0] if in_time and found else LastWords("", _decoded(missing_tail or b""))


def words_in(error_file: Path, stderr_file: Path, missing_tail: bytes | None = None) -> LastWords:
    """Read what a failed worker left in the file that torch's `@record` writes, and on its standard error.

    `missing_tail`: the end of its standard error where the file lacks it.
    """
    tail = _decoded(missing_tail if missing_tail is not None else _tail(stderr_file))
    written = _torch_error(error_file)
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


def _tail(path: Path) -> bytes:
    """Of the file and, where that has just been begun, of the one before it (see LogFile)."""
    last = _end_of(path, MAX_STDERR_TAIL)
    before = MAX_STDERR_TAIL - len(last)
    return (_end_of(path.with_name(f"{path.name}.1"), before) if before else b"") + last


def _end_of(path: Path, count: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - count))
            return file.read(count)
    except OSError:
        return b""


def _decoded(tail: bytes) -> str:
    return tail.decode("utf-8", "replace")


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
