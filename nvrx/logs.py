"""Logging that never blocks: one line per event, written by a thread of its own.

A full pipe behind standard error must not stop heartbeats: when the queue is full, lines are dropped and counted.
Standard library only: the store process is small and imports it.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

MAX_QUEUED = 10_000
FLUSH_WITHIN_S = 1.0
STANDARD_ERROR = 2


def one_line(text: str) -> str:
    """A message without line breaks and control characters: one event stays one line."""
    joined = " ".join(text.split())
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in joined)


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        text = one_line(record.getMessage())
        if record.exc_info:
            text += " | " + one_line(self.formatException(record.exc_info))
        return f"{stamp}.{int(record.msecs):03d} {record.levelname.lower()} {record.name}: {text}"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": one_line(record.getMessage()),
        }
        if record.exc_info:
            values["exception"] = one_line(self.formatException(record.exc_info))
        return json.dumps(values)


class _Background(logging.Handler):
    """Queues lines for a daemon thread that writes them to one descriptor: none waits for another's reader."""

    def __init__(self, descriptor: int, form: logging.Formatter, file: Path | None = None) -> None:
        super().__init__()
        self.setFormatter(form)
        self.file = file
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_QUEUED)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="nvrx-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            dropped, self._dropped = self._dropped, 0
            why = "its disk was full" if self.file is not None else "the reader of this log is too slow"
            note = f"({dropped} log lines were dropped: {why})\n" if dropped else ""
            data = f"{note}{line}\n".encode("utf-8", "backslashreplace")
            try:
                os.write(self._descriptor, data)
            except OSError:
                # Closed, or its disk is full: the log is not worth the training that it tells of. Room may come.
                self._dropped += dropped + 1

    def close(self) -> None:
        super().close()
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(FLUSH_WITHIN_S)


def start(level: str, form: str, of: str = "") -> None:
    """Send the log to standard error; `of`: that of one logger alone, in a program that has a log of its own."""
    logger = logging.getLogger(of)
    logger.handlers[:] = [_Background(STANDARD_ERROR, _Json() if form == "json" else _Text())]
    logger.propagate = False
    logger.setLevel(level.upper())


def add_file(path: Path, of: str = "") -> None:
    """Append the log to a file as well, once. Raises OSError if it cannot be opened."""
    logger = logging.getLogger(of)
    ours = [one for one in logger.handlers if isinstance(one, _Background)]
    if ours and all(one.file != path for one in ours):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        assert ours[0].formatter is not None
        logger.addHandler(_Background(descriptor, ours[0].formatter, path))


def finish(of: str = "") -> None:
    """Write out what is queued, for at most FLUSH_WITHIN_S."""
    for handler in logging.getLogger(of).handlers:
        handler.close()
