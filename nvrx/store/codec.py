"""Bytes to commands: incremental and bounded. Knows no key space and no connection.

A command is a list: its opcode, then its fields in the order of GRAMMAR; KEYS are one list of keys, PAIRS one flat list
of key, value, key, value. What a length announces is refused or waited for, never reserved: bytes are kept as they come
and joined only once what is needed next is there. Of a command cut short the few fields before are read again; a list
of keys goes on where it stopped.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

from .opcodes import GRAMMAR, MAX_COMMAND_BYTES, MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES, Kind, Opcode

Command: TypeAlias = list[Any]

_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_U64 = struct.Struct("<Q")
_read_u32, _read_i64, _read_u64 = _U32.unpack_from, _I64.unpack_from, _U64.unpack_from
_PREFIX = _U64.size

# A field of a command as the parser sees it: a limit above 0 is that of a length prefix.
_READ_U32, _READ_I64, _READ_KEYS, _READ_PAIRS = 0, -1, -2, -3
_STEP = {
    Kind.U32: _READ_U32,
    Kind.I64: _READ_I64,
    Kind.KEY: MAX_KEY_BYTES,
    Kind.VALUE: MAX_VALUE_BYTES,
    Kind.KEYS: _READ_KEYS,
    Kind.PAIRS: _READ_PAIRS,
}
_STEPS: list[tuple[int, ...]] = [tuple(_STEP[kind] for kind in GRAMMAR[opcode]) for opcode in Opcode]
# The limits of the entries that follow one another in a list.
_ENTRIES = {_READ_KEYS: (MAX_KEY_BYTES,), _READ_PAIRS: (MAX_KEY_BYTES, MAX_VALUE_BYTES)}


class BadCommand(Exception):
    """What a client sent is not the protocol, is over a limit, or not allowed; the text says what."""


class _OpenList:
    """KEYS or PAIRS of which not all entries are there yet."""

    __slots__ = ("command", "entries", "length", "limits", "size")

    def __init__(self, command: Command, limits: tuple[int, ...], length: int) -> None:
        self.command = command
        self.limits = limits
        self.entries: list[bytes] = []
        self.length = length
        self.size = 0


class Parser:
    """The commands of one connection."""

    __slots__ = ("_chunks", "_held", "_list", "_needed", "failure")

    def __init__(self) -> None:
        self.failure: BadCommand | None = None
        """Set once something came that is no command: nothing after it is read."""
        self._chunks: list[bytes] = []
        self._held = 0
        self._needed = 1
        self._list: _OpenList | None = None

    @property
    def held_bytes(self) -> int:
        """What waits for the rest of a command."""
        return self._held + (self._list.size if self._list is not None else 0)

    def feed(self, data: bytes) -> list[Command]:
        """The commands that are whole now, up to the first that is none: then `failure` is set."""
        if self.failure is not None:
            return []
        if self._held:
            self._held += len(data)
            self._chunks.append(data)
            if self._held < self._needed:
                return []
            data = b"".join(self._chunks)
            self._chunks.clear()
        commands: list[Command] = []
        try:
            position = self._parse(data, commands)
        except BadCommand as failure:
            self.failure = failure
            self._held, self._list = 0, None
            return commands
        self._held = len(data) - position
        if self._held:
            self._chunks.append(data[position:])
        return commands

    def _parse(self, data: bytes, commands: list[Command]) -> int:
        """Take what is whole; where the rest begins. Sets how much of the rest is needed to go on."""
        end = len(data)
        position = 0
        if self._list is not None:
            position = self._parse_list(self._list, data, 0, commands)
        while position < end and self._list is None:
            start = position
            opcode = data[position]
            position += 1
            if opcode >= len(_STEPS):
                raise BadCommand(f"there is no command {opcode}")
            command: Command = [opcode]
            for step in _STEPS[opcode]:
                size = 4 if step == _READ_U32 else 8
                after = position + size
                if after > end:
                    self._needed = after - start
                    return start
                if step > 0:
                    (length,) = _read_u64(data, position)
                    if length > step:
                        raise BadCommand(f"{Opcode(opcode).name} announces {length} bytes; the limit is {step}")
                    position = after + length
                    if position > end:
                        self._needed = position - start
                        return start
                    command.append(data[after:position])
                elif step == _READ_I64:
                    command.append(_read_i64(data, position)[0])
                    position = after
                elif step == _READ_U32:
                    command.append(_read_u32(data, position)[0])
                    position = after
                else:
                    self._list = _open_list(command, step, _read_u64(data, position)[0])
                    position = self._parse_list(self._list, data, after, commands)
                    break
            else:
                commands.append(command)
        return position

    def _parse_list(self, open_list: _OpenList, data: bytes, position: int, commands: list[Command]) -> int:
        """Take whole entries; the list is closed, and its command complete, with the last."""
        end = len(data)
        start = position
        entries, limits, period = open_list.entries, open_list.limits, len(open_list.limits)
        while len(entries) < open_list.length:
            after = position + _PREFIX
            if after > end:
                self._needed = _PREFIX
                break
            limit = limits[len(entries) % period]
            (length,) = _read_u64(data, position)
            if length > limit:
                raise BadCommand(f"{Opcode(open_list.command[0]).name} announces {length} bytes; the limit is {limit}")
            if after + length > end:
                self._needed = _PREFIX + length
                break
            entries.append(data[after : after + length])
            position = after + length
        open_list.size += position - start
        if open_list.size > MAX_COMMAND_BYTES:
            raise BadCommand(
                f"{Opcode(open_list.command[0]).name} is over {MAX_COMMAND_BYTES} bytes, the limit of one command"
            )
        if len(entries) == open_list.length:
            open_list.command.append(entries)
            commands.append(open_list.command)
            self._list = None
        return position


def _open_list(command: Command, step: int, count: int) -> _OpenList:
    if count > MAX_KEYS:
        raise BadCommand(f"{Opcode(command[0]).name} announces {count} keys; the limit is {MAX_KEYS}")
    limits = _ENTRIES[step]
    return _OpenList(command, limits, count * len(limits))


def text(value: bytes) -> bytes:
    """A key or value as it is written: its length, then its bytes."""
    return _U64.pack(len(value)) + value


def i64(number: int) -> bytes:
    return _I64.pack(number)


def u32(number: int) -> bytes:
    return _U32.pack(number)


def u64(number: int) -> bytes:
    return _U64.pack(number)
