"""A parser of the store's commands that is slow and plainly right: reads everything again whenever asked.

Knows of the product only its names and numbers (`opcodes`).
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

from nvrx.store.opcodes import GRAMMAR, MAX_COMMAND_BYTES, MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES, Kind, Opcode


class _Short(Exception):
    """The rest is still to come."""


class _Wrong(Exception):
    """What came is no command, or over a limit."""


@dataclass
class Verdict:
    """What a connection's bytes amount to. `unfinished`: how many bytes came after the last whole command."""

    commands: list[list[Any]] = field(default_factory=list)
    failed: bool = False
    unfinished: int = 0


def judge(data: bytes) -> Verdict:
    """The commands in `data`, and whether a failure or only the rest comes after them."""
    source = io.BytesIO(data)
    verdict = Verdict()
    begun = 0
    try:
        while source.tell() < len(data):
            begun = source.tell()
            verdict.commands.append(_command(source))
            begun = source.tell()
    except _Short:
        verdict.unfinished = len(data) - begun
    except _Wrong:
        verdict.failed = True
    return verdict


def encode(command: list[Any]) -> bytes:
    """A command as a client writes it."""
    parts = [bytes([command[0]])]
    for kind, value in zip(GRAMMAR[Opcode(command[0])], command[1:], strict=True):
        match kind:
            case Kind.U32:
                parts.append(value.to_bytes(4, "little"))
            case Kind.I64:
                parts.append(value.to_bytes(8, "little", signed=True))
            case Kind.KEY | Kind.VALUE:
                parts += [len(value).to_bytes(8, "little"), value]
            case Kind.KEYS | Kind.PAIRS:
                count = len(value) if kind is Kind.KEYS else len(value) // 2
                parts.append(count.to_bytes(8, "little"))
                parts += [piece for entry in value for piece in (len(entry).to_bytes(8, "little"), entry)]
    return b"".join(parts)


def _command(source: io.BytesIO) -> list[Any]:
    number = _exactly(source, 1)[0]
    try:
        opcode = Opcode(number)
    except ValueError as error:
        raise _Wrong from error
    return [number, *(_field(source, kind) for kind in GRAMMAR[opcode])]


def _field(source: io.BytesIO, kind: Kind) -> Any:
    match kind:
        case Kind.U32:
            return int.from_bytes(_exactly(source, 4), "little")
        case Kind.I64:
            return int.from_bytes(_exactly(source, 8), "little", signed=True)
        case Kind.KEY:
            return _text(source, MAX_KEY_BYTES)
        case Kind.VALUE:
            return _text(source, MAX_VALUE_BYTES)
        case Kind.KEYS:
            return _list(source, [MAX_KEY_BYTES])
        case Kind.PAIRS:
            return _list(source, [MAX_KEY_BYTES, MAX_VALUE_BYTES])


def _text(source: io.BytesIO, limit: int) -> bytes:
    length = int.from_bytes(_exactly(source, 8), "little")
    if length > limit:
        raise _Wrong
    return _exactly(source, length)


def _list(source: io.BytesIO, limits: list[int]) -> list[bytes]:
    """Lengths and entries together are at most MAX_COMMAND_BYTES."""
    count = int.from_bytes(_exactly(source, 8), "little")
    if count > MAX_KEYS:
        raise _Wrong
    entries = []
    size = 0
    for number in range(count * len(limits)):
        entry = _text(source, limits[number % len(limits)])
        size += 8 + len(entry)
        if size > MAX_COMMAND_BYTES:
            raise _Wrong
        entries.append(entry)
    return entries


def _exactly(source: io.BytesIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) < size:
        raise _Short
    return data
