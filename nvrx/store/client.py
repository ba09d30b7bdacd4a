"""A client of a TCPStore on asyncio, without torch. One operation at a time; who waits long has a client of their own.

Keys are as torch's Python clients give them: the slash that those put before every key is added here.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from .codec import i64, text, u32, u64
from .opcodes import MAGIC, STOP_WAITING, WAIT_CANCELED, Opcode

T = TypeVar("T")

PREFIX = b"/"
"""What torch's clients put before every key."""


class StoreGone(Exception):
    """The server closed the connection, or never answered; no further operation will succeed."""


class KeyTimeout(Exception):
    """Keys did not come in time; the client remains usable."""


class StoreClient:
    """A connection to a store. Operations raise StoreGone."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()

    @classmethod
    async def connect(cls, host: str, port: int) -> StoreClient:
        """Open a TCP connection."""
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except OSError as error:
            raise StoreGone(f"store {host}:{port}: {error.strerror or error}") from error
        return await cls.greet(reader, writer)

    @classmethod
    async def greet(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> StoreClient:
        """Begin the protocol on a connection that is there."""
        client = cls(reader, writer)
        nonce = secrets.token_bytes(4)
        hello = _command(Opcode.VALIDATE, u32(MAGIC)) + _command(Opcode.PING, nonce)
        if await client._ask(hello, lambda: client._read(4)) != nonce:
            raise client._gone("what answers is not a store")
        return client

    async def set(self, key: str, value: bytes) -> None:
        """Set a key. Torch's protocol does not acknowledge this; a later answer on the same client does."""
        await self._tell(_command(Opcode.SET, _key(key), text(value)))

    async def multi_set(self, values: Mapping[str, bytes]) -> None:
        """Set keys, in order, unacknowledged."""
        pairs = b"".join(_key(key) + text(value) for key, value in values.items())
        await self._tell(_command(Opcode.MULTI_SET, u64(len(values)), pairs))

    async def get(self, key: str) -> bytes:
        """The value; empty where there is none."""
        return await self._ask(_command(Opcode.GET, _key(key)), self._read_text)

    async def add(self, key: str, amount: int) -> int:
        """The sum. A key that holds no number breaks the connection."""
        return await self._ask(_command(Opcode.ADD, _key(key), i64(amount)), self._read_i64)

    async def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """What torch answers: the value afterwards, or `expected` where the key is missing and one was expected."""
        command = _command(Opcode.COMPARE_SET, _key(key), text(expected), text(desired))
        return await self._ask(command, self._read_text)

    async def check(self, keys: Iterable[str]) -> bool:
        """Whether all keys are there."""
        return await self._ask(_command(Opcode.CHECK, _keys(keys)), lambda: self._read(1)) == b"\0"

    async def wait(self, keys: Iterable[str], timeout_s: float | None = None) -> None:
        """Returns once all keys are there. Raises KeyTimeout after `timeout_s`."""
        async with self._turn:
            self._write(_command(Opcode.WAIT, _keys(keys)))
            try:
                try:
                    async with asyncio.timeout(timeout_s):
                        answer = await self._read(1)
                except TimeoutError:
                    answer = await self._cancel_wait()
            except asyncio.CancelledError:
                self.close()  # its answer would be taken for the next one's
                raise
        if answer == WAIT_CANCELED:
            raise KeyTimeout
        if answer != STOP_WAITING:
            raise self._gone("a wait was answered with something else")

    async def _cancel_wait(self) -> bytes:
        """What ended the wait: the keys may have come just before."""
        self._write(_command(Opcode.CANCEL_WAIT))
        answer = await self._read(1)
        if answer == STOP_WAITING:
            await self._read(1)
        return answer

    async def delete(self, key: str) -> bool:
        """Whether the key was there."""
        return bool(await self._ask(_command(Opcode.DELETE_KEY, _key(key)), self._read_i64))

    async def count(self) -> int:
        """How many keys have a value."""
        return await self._ask(_command(Opcode.GETNUMKEYS), self._read_i64)

    async def list_keys(self) -> list[str]:
        """All keys with a value."""
        return await self._ask(_command(Opcode.LIST_KEYS), self._read_keys)

    def close(self) -> None:
        self._writer.close()

    # ---- below --------------------------------------------------------------------------------------------

    async def _tell(self, command: bytes) -> None:
        async with self._turn:
            self._write(command)
            with contextlib.suppress(OSError):  # the next answer that does not come says so
                await self._writer.drain()

    async def _ask(self, command: bytes, read: Callable[[], Awaitable[T]]) -> T:
        async with self._turn:
            self._write(command)
            try:
                return await read()
            except asyncio.CancelledError:
                self.close()  # its answer would be taken for the next one's
                raise

    def _write(self, command: bytes) -> None:
        if self._writer.is_closing():
            raise StoreGone("the connection to the store is closed")
        self._writer.write(command)

    async def _read(self, size: int) -> bytes:
        try:
            return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise self._gone("the store closed the connection") from error

    def _gone(self, message: str) -> StoreGone:
        self.close()
        return StoreGone(message)

    async def _read_i64(self) -> int:
        return int.from_bytes(await self._read(8), "little", signed=True)

    async def _read_text(self) -> bytes:
        return await self._read(int.from_bytes(await self._read(8), "little"))

    async def _read_keys(self) -> list[str]:
        count = await self._read_i64()
        found = [await self._read_text() for _ in range(count)]
        return [key.removeprefix(PREFIX).decode("utf-8", "surrogateescape") for key in found]


def _command(opcode: Opcode, *fields: bytes) -> bytes:
    return bytes((opcode,)) + b"".join(fields)


def _key(key: str) -> bytes:
    return text(PREFIX + key.encode("utf-8", "surrogateescape"))


def _keys(keys: Iterable[str]) -> bytes:
    parts = [_key(key) for key in keys]
    return u64(len(parts)) + b"".join(parts)
