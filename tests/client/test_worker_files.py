"""The files of one node: where they are, and what a failed worker left in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvrx.client.worker_files import LastWords, WorkerFiles
from nvrx.commandline import Failed
from nvrx.core.facts import MAX_STDERR_TAIL
from nvrx.core.ids import CycleNumber, GlobalRank, NodeId, RunId

CYCLE, RANK = CycleNumber(2), GlobalRank(5)


@pytest.mark.rule("G8")
@pytest.mark.parametrize("name", ["../../x", "a/b", "..", "", "a\nb", "\x1b[31m", "n" * 300])
def test_names_from_the_wire_lead_nowhere_else(tmp_path: Path, name: str) -> None:
    """Field case C143: whatever a coordinator says."""
    for run, node in ((name, "n0"), ("run", name)):
        with pytest.raises(Failed) as refused:
            WorkerFiles(tmp_path, RunId(run), NodeId(node))
        assert str(refused.value).isprintable()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.rule("G8", "D4")
def test_last_words_go_back_into_the_file_before(tmp_path: Path) -> None:
    """A file that was just rotated has little in it."""
    files = WorkerFiles(tmp_path, RunId("run"), NodeId("n0"))
    files.cycle(CYCLE)
    path = files.output(CYCLE, RANK, "err")
    path.with_name("rank-5.err.1").write_bytes(b"x" * 9000 + b"Traceback\n")
    path.write_bytes(b"RuntimeError: \xff\n")
    words = files.last_words(CYCLE, RANK)
    assert words.message == "RuntimeError: \N{REPLACEMENT CHARACTER}"
    assert words.stderr_tail.endswith("xxTraceback\nRuntimeError: \N{REPLACEMENT CHARACTER}\n")
    assert len(words.stderr_tail) == MAX_STDERR_TAIL


@pytest.mark.rule("G8", "D4")
def test_last_words_that_the_disk_did_not_take(tmp_path: Path) -> None:
    files = WorkerFiles(tmp_path, RunId("run"), NodeId("n0"))
    files.cycle(CYCLE)
    files.output(CYCLE, RANK, "err").write_bytes(b"an older line\n")
    assert files.last_words(CYCLE, RANK, b"a\nboom").message == "boom"


@pytest.mark.rule("G8", "D4")
def test_last_words_in_a_file_that_does_not_answer(tmp_path: Path) -> None:
    """As on a network file system that is gone; here a pipe that nobody writes to. It is waited for once."""
    files = WorkerFiles(tmp_path, RunId("run"), NodeId("n0"))
    path = files.output(CYCLE, RANK, "err")
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    try:
        assert files.last_words(CYCLE, RANK) == LastWords("", "")
        files.output(CYCLE, GlobalRank(6), "err").write_bytes(b"well\n")
        assert files.last_words(CYCLE, GlobalRank(6), b"boom") == LastWords("", "boom")
    finally:
        os.close(os.open(path, os.O_WRONLY))
