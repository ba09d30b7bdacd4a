"""One connection to a key space: commands in, replies out. Knows the protocol whole; no socket, loop or clock.

Bytes go in by `feed`; replies leave by `send`, also later, when what WAIT or BARRIER asked for has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from .codec import BadCommand, Command, Parser, i64, text, u32, u64
from .opcodes import MAGIC, MAX_REPLY_BYTES, NOT_READY, READY, STOP_WAITING, WAIT_CANCELED, Opcode
from .space import KeySpace, Waiter

_FIRST = bytes((Opcode.VALIDATE,))
_NOT_TORCH = "the connection does not begin as torch's store clients do"


class Session:
    """A client of a key space. `may_write_all`: also below the space's read-only prefix."""

    __slots__ = ("_guard", "_later", "_parser", "_paused", "_send", "_space", "_validated", "_waiter")

    def __init__(self, space: KeySpace, send: Callable[[bytes], object], may_write_all: bool = False) -> None:
        self._space = space
        self._send = send
        self._guard = None if may_write_all else space.read_only_below
        self._parser = Parser()
        self._waiter = Waiter(self._woken)
        self._validated = False
        self._paused = False
        self._later: Iterator[Command] = iter(())

    @property
    def is_waiting(self) -> bool:
        return self._waiter.missing > 0

    @property
    def held_bytes(self) -> int:
        """Of a command that is not whole yet."""
        return self._parser.held_bytes

    def feed(self, data: bytes) -> None:
        """Do what is asked, in order. Raises BadCommand: the connection is to be cut off, and this session closed."""
        if not self._validated and not self._parser.held_bytes and data[:1] not in (b"", _FIRST):
            raise BadCommand(_NOT_TORCH)  # before anything is held for it
        commands = self._parser.feed(data)
        if self._paused:
            self._later = chain(self._later, commands)
        else:
            self._do(iter(commands))

    def pause(self) -> None:
        """The client does not read its answers. Commands wait from now on, also in the middle of what was fed: a few
        bytes can ask for gigabytes."""
        self._paused = True

    def resume(self) -> None:
        """Go on with the commands that waited. Raises BadCommand as `feed` does."""
        self._paused = False
        later, self._later = self._later, iter(())
        self._do(later)

    def _do(self, commands: Iterator[Command]) -> None:
        for command in commands:
            opcode = command[0]
            if not self._validated:
                if opcode != Opcode.VALIDATE or command[1] != MAGIC:
                    raise BadCommand(_NOT_TORCH)
                self._validated = True
                continue
            reply = _HANDLERS[opcode](self, *command[1:])
            if reply is not None:
                self._send(reply)
                if self._paused:
                    self._later = commands
                    return
        if self._parser.failure is not None:
            raise self._parser.failure

    def close(self) -> None:
        """The connection is gone."""
        self._space.cancel(self._waiter)

    def _woken(self) -> None:
        self._send(STOP_WAITING)

    def _check_writable(self, key: bytes) -> None:
        if self._guard is not None and key.startswith(self._guard):
            raise BadCommand(f"key {key[:64]!a} is the coordinator's and read-only")

    # ---- commands: the reply, or None where there is none or it comes later ---------------------------------

    def _validate(self, number: int) -> None:
        raise BadCommand("VALIDATE comes twice")

    def _set(self, key: bytes, value: bytes) -> None:
        if self._guard is not None:
            self._check_writable(key)
        self._space.set(key, value)

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        self._check_writable(key)
        return text(self._space.compare_set(key, expected, desired))

    def _get(self, key: bytes) -> bytes:
        value = self._space.values.get(key, b"")
        return u64(len(value)) + value

    def _add(self, key: bytes, amount: int) -> bytes:
        if self._guard is not None:
            self._check_writable(key)
        return i64(self._space.add(key, amount))

    def _check(self, keys: list[bytes]) -> bytes:
        return READY if self._space.has_all(keys) else NOT_READY

    def _wait(self, keys: list[bytes]) -> bytes | None:
        return STOP_WAITING if self._space.wait(self._waiter, keys) else None

    def _getnumkeys(self) -> bytes:
        return i64(len(self._space.values))

    def _delete_key(self, key: bytes) -> bytes:
        self._check_writable(key)
        return i64(self._space.delete(key))

    def _append(self, key: bytes, value: bytes) -> None:
        self._check_writable(key)
        self._space.append(key, value)

    def _multi_get(self, keys: list[bytes]) -> bytes:
        values = self._space.values
        parts = []
        size = 0
        for key in keys:
            value = values.get(key, b"")
            size += len(value) + 8
            if size > MAX_REPLY_BYTES:
                raise BadCommand(f"MULTI_GET asks for more than {MAX_REPLY_BYTES} bytes, the limit of one reply")
            parts.append(u64(len(value)))
            parts.append(value)
        return b"".join(parts)

    def _multi_set(self, pairs: list[bytes]) -> None:
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            self._set(key, value)

    def _cancel_wait(self) -> bytes:
        self._space.cancel(self._waiter)
        return WAIT_CANCELED

    def _ping(self, nonce: int) -> bytes:
        return u32(nonce)

    def _queue_push(self, key: bytes, value: bytes) -> None:
        self._check_writable(key)
        self._space.queue_push(key, value)

    def _queue_pop(self, key: bytes) -> bytes:
        self._check_writable(key)
        length, value = self._space.queue_pop(key)
        return i64(length) if value is None else i64(length) + text(value)

    def _queue_len(self, key: bytes) -> bytes:
        return i64(self._space.queue_length(key))

    def _list_keys(self) -> bytes:
        keys = list(self._space.values)
        if sum(map(len, keys)) + 8 * len(keys) > MAX_REPLY_BYTES:
            raise BadCommand(f"LIST_KEYS asks for more than {MAX_REPLY_BYTES} bytes, the limit of one reply")
        return i64(len(keys)) + b"".join(map(text, keys))

    def _barrier(self, key: bytes, world: int) -> bytes | None:
        self._check_writable(key)
        return STOP_WAITING if self._space.barrier(self._waiter, key, world) else None


_HANDLERS: list[Callable[..., bytes | None]] = [getattr(Session, f"_{opcode.name.lower()}") for opcode in Opcode]
