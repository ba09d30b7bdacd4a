"""What coordinator and store process say to each other: JSON lines over a Unix socket, and the record that names it.

The record lies in the run-time directory, readable by its user alone, and holds the secret that whoever takes the store
process over has to know (rule I6). Knows no key, run or cycle.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

VERSION = 1
"""Of these messages: a coordinator that speaks another does not take a store process over."""
MAX_LINE_BYTES = 1024 * 1024
HELLO_WITHIN_S = 5.0
READY = "ready"
"""The line on standard output that says that the process serves."""

Message: TypeAlias = dict[str, Any]
Kind = Literal["bridge", "torch"]


@dataclass(frozen=True)
class Record:
    """Where a store process listens for coordinators."""

    version: int
    kind: Kind
    pid: int
    secret: str
    host: str
    lasting_port: int


@dataclass(frozen=True)
class Paths:
    """Files of one store process. `key` is the journal's id: whoever holds the journal may take the process over."""

    directory: Path
    key: str

    @property
    def record(self) -> Path:
        return self.directory / f"store-{self.key}.json"

    @property
    def socket(self) -> Path:
        return self.directory / f"store-{self.key}.sock"


@contextlib.contextmanager
def within_limit(path: Path) -> Iterator[str]:
    """A Unix socket's path as the kernel takes it, which allows 107 bytes however deep the directory lies."""
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def write_record(paths: Paths, record: Record) -> None:
    """Raises OSError."""
    partial = paths.record.with_suffix(f".{os.getpid()}")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w") as file:
        json.dump(asdict(record), file)
    partial.replace(paths.record)


def read_record(paths: Paths) -> Record | None:
    """None where there is none that this version understands."""
    try:
        record = Record(**json.loads(paths.record.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return record if record.version == VERSION else None


def forget_record(paths: Paths, own: Record) -> None:
    """Remove the files of a process that ends, unless another has taken its place."""
    if read_record(paths) == own:
        for path in (paths.record, paths.socket):
            with contextlib.suppress(OSError):
                path.unlink()


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """None at the end, also where it is no message."""
    try:
        line = await reader.readuntil(b"\n")
        message = json.loads(line)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError, ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def write_message(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
