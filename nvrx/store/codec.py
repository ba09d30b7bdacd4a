"""Bytes to commands: incremental and bounded. Knows no key space and no connection.

A command is a list: its opcode, then its fields in the order of GRAMMAR; KEYS are one list of keys, PAIRS one flat list
of key, value, key, value. What a length announces is refused or waited for, never reserved: bytes are kept as they come
and joined only once what is needed next is there. Of a command cut short the few fields before are read again; a list
of keys goes on where it stopped.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import cycle, islice, repeat
from typing import Any, TypeAlias

from .opcodes import GRAMMAR, MAX_COMMAND_BYTES, MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES, Kind, Opcode

Command: TypeAlias = list[Any]

_U32 = struct.Struct("<I")
_I64 = struct.Struct("<q")
_U64 = struct.Struct("<Q")
_read_u32, _read_i64, _read_u64 = _U32.unpack_from, _I64.unpack_from, _U64.unpack_from
_PREFIX = _U64.size
# A command about one key begins with its opcode and the key's length, or with a count of 1 and then that length.
_LONE = struct.Struct("<BQQ")
_read_lone, _LONE_BYTES = _LONE.unpack_from, _LONE.size
_SET, _GET, _ADD = Opcode.SET.value, Opcode.GET.value, Opcode.ADD.value
_WAIT_CHECK = (Opcode.WAIT.value, Opcode.CHECK.value)

_BLOCK = 16

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


class BadCommand(Exception):
    """What a client sent is not the protocol, is over a limit, or not allowed; the text says what."""


class _OpenList:
    """KEYS or PAIRS of which not all entries are there yet."""

    __slots__ = ("command", "entries", "length", "size", "step")

    def __init__(self, command: Command, step: int, entries: list[bytes], length: int) -> None:
        self.command = command
        self.step = step
        self.entries = entries
        self.length = length
        self.size = 0

    def grow(self, size: int) -> None:
        """Raises BadCommand where that is too much."""
        self.size += size
        if self.size > MAX_COMMAND_BYTES:
            raise BadCommand(
                f"{Opcode(self.command[0]).name} is over {MAX_COMMAND_BYTES} bytes, the limit of one command"
            )


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
        if not self._held:
            if self._list is None and (lone := _lone(data)) is not None:
                return [lone]
        else:
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
        position = 0 if self._list is None else self._go_on(self._list, data, commands)
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
                    (count,) = _read_u64(data, position)
                    if count > MAX_KEYS:
                        raise BadCommand(f"{Opcode(opcode).name} announces {count} keys; the limit is {MAX_KEYS}")
                    length = count if step == _READ_KEYS else 2 * count
                    entries: list[bytes] = []
                    position = self._take_entries(opcode, step, length, data, after, entries)
                    if len(entries) < length or position - after > MAX_COMMAND_BYTES:
                        self._list = _OpenList(command, step, entries, length)
                        self._list.grow(position - after)
                        return position
                    command.append(entries)
            else:
                commands.append(command)
        return position

    def _go_on(self, open_list: _OpenList, data: bytes, commands: list[Command]) -> int:
        """Take what has come of a list; with its last entry its command is whole."""
        command, entries, length = open_list.command, open_list.entries, open_list.length
        position = self._take_entries(command[0], open_list.step, length, data, 0, entries)
        open_list.grow(position)
        if len(entries) == length:
            self._list = None
            command.append(entries)
            commands.append(command)
        return position

    def _take_entries(
        self, opcode: int, step: int, length: int, data: bytes, position: int, entries: list[bytes]
    ) -> int:
        """Append the entries that are whole, up to `length` in all; where the rest begins."""
        while True:
            if step == _READ_KEYS:
                position = _take_blocks(length, data, position, entries)
            wanted = min(len(entries) + _BLOCK, length)
            position = self._take_one_by_one(opcode, _limits(step, len(entries), wanted), data, position, entries)
            if len(entries) == length or len(entries) < wanted:
                return position

    def _take_one_by_one(
        self, opcode: int, limits: Iterator[int], data: bytes, position: int, entries: list[bytes]
    ) -> int:
        end = len(data)
        for limit in limits:
            after = position + _PREFIX
            if after > end:
                self._needed = _PREFIX
                break
            (size,) = _read_u64(data, position)
            if size > limit:
                raise BadCommand(f"{Opcode(opcode).name} announces {size} bytes; the limit is {limit}")
            following = after + size
            if following > end:
                self._needed = _PREFIX + size
                break
            entries.append(data[after:following])
            position = following
        return position


def _lone(data: bytes) -> Command | None:
    """The usual chunk, by a way of half the cost: one whole command about one key. None: to be parsed as all others."""
    end = len(data)
    if end < _LONE_BYTES:
        return None
    opcode, size, size_in_list = _read_lone(data)
    if opcode in _WAIT_CHECK:
        if size == 1 and size_in_list == end - _LONE_BYTES <= MAX_KEY_BYTES:
            return [opcode, [data[_LONE_BYTES:]]]
    elif size <= MAX_KEY_BYTES:
        key_end = 1 + _PREFIX + size
        if opcode == _GET and key_end == end:
            return [opcode, data[1 + _PREFIX :]]
        value = key_end + 8
        if opcode == _ADD and value == end:
            return [opcode, data[1 + _PREFIX : key_end], _read_i64(data, key_end)[0]]
        if opcode == _SET and value <= end and _read_u64(data, key_end)[0] == end - value <= MAX_VALUE_BYTES:
            return [opcode, data[1 + _PREFIX : key_end], data[value:]]
    return None


def _limits(step: int, taken: int, length: int) -> Iterator[int]:
    """Of the entries of a list of KEYS or PAIRS that are still to be taken."""
    if step == _READ_KEYS:
        return repeat(MAX_KEY_BYTES, length - taken)
    odd = taken % 2
    return islice(cycle((MAX_KEY_BYTES, MAX_VALUE_BYTES)), odd, odd + length - taken)


def _take_blocks(length: int, data: bytes, position: int, entries: list[bytes]) -> int:
    """Take keys as long as _BLOCK in a row are of one length, as the keys of ranks mostly are: at half the cost."""
    end = len(data)
    while len(entries) + _BLOCK <= length and position + _BLOCK * _PREFIX <= end:
        (size,) = _read_u64(data, position)
        following = position + _BLOCK * (_PREFIX + size)
        if size > MAX_KEY_BYTES or following > end:
            break
        fields = _block(size).unpack_from(data, position)
        if fields[::2].count(size) < _BLOCK:
            break
        entries += fields[1::2]
        position = following
    return position


@lru_cache(maxsize=256)
def _block(size: int) -> struct.Struct:
    return struct.Struct("<" + f"Q{size}s" * _BLOCK)


def text(value: bytes) -> bytes:
    """A key or value as it is written: its length, then its bytes."""
    return u64(len(value)) + value


# Numbers as they are written.
u32: Callable[[int], bytes] = _U32.pack
i64: Callable[[int], bytes] = _I64.pack
u64: Callable[[int], bytes] = _U64.pack
