"""A log file: rotation, a disk that is full (for real: a file size limit, and /dev/full), a file that is emptied."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nvrx.client.log_file import Disk, LogFile, Rotation


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Said:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.clock = Clock()
        self.disk = Disk(self.lines.append, self.clock)


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """The kernel refuses more, with EFBIG: a real failure of write and splice that is over when we say so."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def through_pipe(file: LogFile, data: bytes) -> None:
    """As the log process does it."""
    read_end, write_end = os.pipe()
    try:
        assert os.write(write_end, data) == len(data)
        left = len(data)
        if file.splices:
            left -= file.splice(read_end, left)
        if left:
            file.write(os.read(read_end, left))
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.rule("G8")
@pytest.mark.parametrize("spliced", [True, False])
def test_what_is_dropped_is_said_once_and_counted(tmp_path: Path, spliced: bool) -> None:
    said = Said()
    path = tmp_path / "log"
    file = LogFile(os.fsencode(path), said.disk)
    put = through_pipe if spliced else LogFile.write
    put(file, b"a" * 900)
    assert file.missing_tail is None
    with files_no_larger_than(1000):
        put(file, b"b" * 300)
        put(file, b"c" * 50)
        assert file.missing_tail == b"b" * 200 + b"c" * 50
        said.clock.now_s += 2.0
        put(file, b"d" * 10)  # tried again, in vain
    put(file, b"e")  # the time to try again has not come
    assert len(said.lines) == 1
    assert f"cannot write {path}: {os.strerror(errno.EFBIG)}" in said.lines[0]
    said.clock.now_s += 2.0
    put(file, b"again\n")
    assert said.lines[1:] == [f"{path} is written again; 261 bytes were dropped ({os.strerror(errno.EFBIG)})"]
    note = f"\n[nvrx: 261 bytes were dropped here: {os.strerror(errno.EFBIG)}]\n".encode()
    assert path.read_bytes() == b"a" * 900 + b"b" * 100 + note + b"again\n"
    assert file.missing_tail is None
    file.close()
    assert len(said.lines) == 2


@pytest.mark.rule("G8")
def test_a_full_disk_is_said_once_for_all_files(tmp_path: Path) -> None:
    said = Said()
    for name in "abc":
        (tmp_path / name).symlink_to("/dev/full")
    files = [LogFile(os.fsencode(tmp_path / name), said.disk) for name in "abc"]
    for file in files:
        through_pipe(file, b"x" * 5000)  # which cannot be spliced to: written, and refused
        assert file.missing_tail == b"x" * 4096
    assert [os.strerror(errno.ENOSPC) in line for line in said.lines] == [True]
    for file in files:
        file.close()
    assert said.lines[1:] == [
        f"5000 bytes of {tmp_path / name} were dropped (No space left on device)" for name in "abc"
    ]


@pytest.mark.rule("G8")
def test_a_disk_that_fails_again_and_again_is_not_announced_each_time(tmp_path: Path) -> None:
    said = Said()
    file = LogFile(os.fsencode(tmp_path / "log"), said.disk)
    for _ in range(20):
        with files_no_larger_than((tmp_path / "log").stat().st_size):
            through_pipe(file, b"lost")
        said.clock.now_s += 1.5
        through_pipe(file, b"kept")
    assert len([line for line in said.lines if "cannot write" in line]) == 1
    assert (tmp_path / "log").read_bytes().count(b"kept") == 20
    assert len(said.lines) == 2
    file.close()
    assert said.lines[2:] == [f"{4 * 19} bytes of {tmp_path / 'log'} were dropped (an earlier failure)"]


@pytest.mark.rule("G8")
def test_a_file_that_cannot_be_made_is_made_later(tmp_path: Path) -> None:
    said = Said()
    (tmp_path / "cycle").write_text("in the way")
    path = tmp_path / "cycle" / "rank-0.out"
    file = LogFile(os.fsencode(path), said.disk)
    file.write(b"lost")
    (tmp_path / "cycle").unlink()
    said.clock.now_s += 2.0
    file.write(b"kept")
    file.close()
    assert path.read_bytes().endswith(b"kept")
    assert "4 bytes were dropped" in said.lines[-1]


@pytest.mark.rule("G8")
def test_a_file_that_was_emptied_is_written_from_its_start(tmp_path: Path) -> None:
    """As `: > rank-0.out` and logrotate's copytruncate do: no hole of NUL bytes remains."""
    path = tmp_path / "log"
    path.write_bytes(b"of an earlier agent\n")
    file = LogFile(os.fsencode(path), Said().disk)
    through_pipe(file, b"one\n")
    assert path.read_bytes() == b"of an earlier agent\none\n"
    os.truncate(path, 0)
    through_pipe(file, b"two\n")
    assert path.read_bytes() == b"two\n"


@pytest.mark.rule("G8")
def test_files_over_the_size_are_rotated_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"0" * 40 + b"\n")
    file = LogFile(os.fsencode(path), Said().disk, Rotation(max_bytes=100, keep=3))
    assert not file.splices
    everything = b"".join(b"%d line\n" % number for number in range(200))
    for at in range(0, len(everything), 333):
        file.write(everything[at : at + 333])
    file.close()
    names = ["log.3", "log.2", "log.1", "log"]
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(names)
    pieces = [(tmp_path / name).read_bytes() for name in names]
    assert everything.endswith(b"".join(pieces))
    assert all(50 < len(one) <= 100 and one.endswith(b"\n") for one in pieces[:-1])


@pytest.mark.rule("G8")
def test_a_line_longer_than_a_file_is_cut_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = LogFile(os.fsencode(path), Said().disk, Rotation(max_bytes=100, keep=9))
    file.write(b"short\n")
    line = bytes(range(65, 91)) * 10
    file.write(line)
    names = ["log.3", "log.2", "log.1", "log"]
    assert [len((tmp_path / name).read_bytes()) for name in names] == [6, 100, 100, 60]
    assert b"".join((tmp_path / name).read_bytes() for name in names) == b"short\n" + line
