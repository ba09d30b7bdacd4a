"""Lines of many workers on one stream: prefixes, unfinished lines, and readers that are slow or gone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from nvrx.client import log_tee
from nvrx.client.log_tee import Joined, Shown, Tee

PATIENCE_S = 30.0


@pytest.mark.rule("G8")
def test_each_line_has_its_prefix_and_its_bytes() -> None:
    joined, one = Joined(), Shown(b"[1] ")
    assert joined.add(one, b"a\n\xff\x00b\n\nc") == b"[1] a\n[1] \xff\x00b\n[1] \n[1] c"
    assert joined.add(one, b"d\n") == b"d\n"
    assert joined.add(one, b"crlf\r\nnext\r\n") == b"[1] crlf\r\n[1] next\r\n"


@pytest.mark.rule("G8")
def test_an_unfinished_line_ends_where_another_worker_speaks() -> None:
    joined, one, two = Joined(), Shown(b"[1] "), Shown(b"[2] ")
    assert joined.add(one, b"half") == b"[1] half"
    assert joined.add(two, b"whole\n") == b"\n[2] whole\n"
    assert joined.add(one, b"rest\n") == b"[1] rest\n"
    assert joined.add(one, b"last") + joined.end(one) == b"[1] last\n"
    assert joined.end(two) == b""


@pytest.mark.rule("G8")
def test_a_progress_bar_keeps_its_place_on_the_line() -> None:
    """Field case C133."""
    joined, one = Joined(), Shown(b"[1] ")
    assert joined.add(one, b"\r 1%\r 2%\r") == b"\r[1]  1%\r[1]  2%\r"
    assert joined.add(one, b" 3%\r") == b"[1]  3%\r"
    assert joined.add(one, b"\ndone\n") == b"\n[1] done\n"


class Reader:
    """The other end of the stream, read when told."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.fd, self.write_fd = os.pipe()
        self.said: list[str] = []
        self._heard = threading.Condition()
        self.tee = Tee(self.write_fd, "standard output", self._say, clock)

    def show(self, shown: Shown, data: bytes) -> None:
        if self.tee.has_room(len(data)):
            self.tee.offer(shown, data)

    def _say(self, text: str) -> None:
        with self._heard:
            self.said.append(text)
            self._heard.notify_all()

    def wait_said(self, part: str) -> None:
        with self._heard:
            assert self._heard.wait_for(lambda: any(part in line for line in self.said), PATIENCE_S), self.said

    def read_until(self, end: bytes) -> bytes:
        data = b""
        while not data.endswith(end):
            data += os.read(self.fd, 65536)
        return data


@pytest.mark.rule("G8")
def test_what_has_no_line_end_is_shown_all_the_same() -> None:
    """Field case C133: progress bars and long lines, with bounded memory."""
    reader, shown = Reader(), Shown(b"[0] ")
    reader.tee.offer(shown, b"loading")
    assert reader.read_until(b"loading") == b"[0] loading"
    long = b"x" * (5 * 1024 * 1024)
    reader.tee.offer(shown, long)
    reader.tee.offer(shown, b"!")
    assert reader.read_until(b"!") == long + b"!"
    reader.tee.offer(shown, None)
    assert reader.read_until(b"\n") == b"\n"
    assert shown.partial == b""


@pytest.mark.rule("G8")
@pytest.mark.parametrize("blocking", [True, False])
def test_a_reader_that_is_slow_misses_output_and_is_told_how_much(
    blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case C126: `has_room` and `offer` return at once while nobody reads."""
    monkeypatch.setattr(log_tee, "_QUEUE_BYTES", 256 * 1024)
    reader, shown = Reader(), Shown(b"")
    os.set_blocking(reader.write_fd, blocking)
    line = b"%0999d\n" % 7
    for _ in range(2000):
        reader.show(shown, line)
    reader.wait_said("workers write more than is read from standard output")
    text: list[bytes] = []
    reading = threading.Thread(target=lambda: text.extend(iter(lambda: os.read(reader.fd, 65536), b"")))
    reading.start()
    reader.tee.close(PATIENCE_S)
    os.close(reader.write_fd)
    reading.join(PATIENCE_S)
    lines = b"".join(text).splitlines(keepends=True)
    notes = [one for one in lines if one.startswith(b"[nvrx] ")]
    missing = sum(int(one.split()[1]) for one in notes)
    assert set(lines) - set(notes) == {line}
    assert missing + 1000 * (len(lines) - len(notes)) == 2000 * 1000
    assert len(reader.said) == 2
    assert reader.said[-1].startswith(f"{missing} bytes of workers' output were not shown on standard output")


@pytest.mark.rule("G8")
def test_a_reader_that_never_reads_again_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_tee, "_QUEUE_BYTES", 256 * 1024)
    reader, shown = Reader(), Shown(b"")
    for _ in range(1000):
        reader.show(shown, b"%0999d\n" % 7)
    reader.tee.close(0.0)
    assert " bytes of workers' output were not shown" in reader.said[-1]
    os.close(reader.fd)  # lets its thread end


@pytest.mark.rule("G8")
def test_a_reader_that_is_gone_is_said_once() -> None:
    """Field case C126: as with `| head`."""
    reader, shown = Reader(), Shown(b"")
    os.close(reader.fd)
    reader.tee.offer(shown, b"one\n")
    reader.wait_said("standard output is closed (Broken pipe)")
    for _ in range(10):
        reader.show(shown, b"more\n")
    reader.tee.close(PATIENCE_S)
    assert len(reader.said) == 2
    assert reader.said[-1].startswith("54 bytes")


@pytest.mark.rule("G8")
def test_more_than_anybody_reads_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a quick reader too: prefixes for a gigabyte would take the processors from training."""
    monkeypatch.setattr(log_tee, "_BYTES_PER_S", 1024 * 1024)
    now_s = 0.0
    reader = Reader(lambda: now_s)
    assert [reader.tee.has_room(400 * 1024) for _ in range(4)] == [True, True, False, False]
    now_s = 0.5
    assert [reader.tee.has_room(400 * 1024) for _ in range(2)] == [True, False]
    reader.wait_said("more than is read from standard output, or than 1 MiB/s")
