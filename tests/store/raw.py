"""The bytes that torch's store clients send, and a socket to send them by. Knows no torch and nothing of ours.

The numbers are written down here a second time on purpose: this is what judges a server.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum

PATIENCE_S = 100.0
MAGIC = 0x3C85F7CE
MAX_KEY = 8 * 1024
MAX_VALUE = 8 * 1024 * 1024
MAX_KEYS = 128 * 1024
READY, NOT_READY = b"\0", b"\1"
STOP_WAITING, WAIT_CANCELED = b"\0", b"\1"
_nonces = itertools.count(0xA5C30001)


class Op(IntEnum):
    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18


def u64(number: int) -> bytes:
    return struct.pack("<Q", number)


def i64(number: int) -> bytes:
    return struct.pack("<q", number)


def blob(data: bytes) -> bytes:
    return u64(len(data)) + data


def command(op: int, *fields: bytes) -> bytes:
    """An opcode and its fields, encoded already."""
    return bytes([op]) + b"".join(fields)


def keyed(op: Op, *blobs: bytes) -> bytes:
    """A command whose fields are a key and values."""
    return command(op, *map(blob, blobs))


def many(op: Op, keys: list[bytes]) -> bytes:
    """A command on a list of keys."""
    return command(op, u64(len(keys)), *map(blob, keys))


def set_(key: bytes, value: bytes) -> bytes:
    return keyed(Op.SET, key, value)


def get(key: bytes) -> bytes:
    return keyed(Op.GET, key)


def add(key: bytes, amount: int) -> bytes:
    return command(Op.ADD, blob(key), i64(amount))


def append(key: bytes, value: bytes) -> bytes:
    return keyed(Op.APPEND, key, value)


def compare_set(key: bytes, expected: bytes, desired: bytes) -> bytes:
    return keyed(Op.COMPARE_SET, key, expected, desired)


def delete(key: bytes) -> bytes:
    return keyed(Op.DELETE_KEY, key)


def check(*keys: bytes) -> bytes:
    return many(Op.CHECK, list(keys))


def wait(*keys: bytes) -> bytes:
    return many(Op.WAIT, list(keys))


def multi_get(*keys: bytes) -> bytes:
    return many(Op.MULTI_GET, list(keys))


def multi_set(*pairs: tuple[bytes, bytes]) -> bytes:
    return command(Op.MULTI_SET, u64(len(pairs)), *(blob(key) + blob(value) for key, value in pairs))


def push(key: bytes, value: bytes) -> bytes:
    return keyed(Op.QUEUE_PUSH, key, value)


def pop(key: bytes) -> bytes:
    return keyed(Op.QUEUE_POP, key)


def queue_len(key: bytes) -> bytes:
    return keyed(Op.QUEUE_LEN, key)


def barrier(key: bytes, world: int) -> bytes:
    return command(Op.BARRIER, blob(key), i64(world))


CANCEL_WAIT = command(Op.CANCEL_WAIT)
NUM_KEYS = command(Op.GETNUMKEYS)
LIST_KEYS = command(Op.LIST_KEYS)
HELLO = command(Op.VALIDATE, struct.pack("<I", MAGIC))


def ping(nonce: int) -> bytes:
    return command(Op.PING, struct.pack("<I", nonce))


@dataclass(frozen=True)
class Reply:
    """What a server sent until it had done all that it was sent; `cut`: it closed the connection."""

    data: bytes
    cut: bool = False


def listed(data: bytes) -> list[bytes]:
    """The keys in a reply to LIST_KEYS, in order of name."""
    (count,) = struct.unpack_from("<q", data)
    keys = []
    at = 8
    for _ in range(count):
        (size,) = struct.unpack_from("<Q", data, at)
        keys.append(data[at + 8 : at + 8 + size])
        at += 8 + size
    assert at == len(data)
    return sorted(keys)


class RawClient:
    """A connection to a store, which has said its greeting unless told otherwise."""

    def __init__(self, host: str, port: int, *, greet: bool = True) -> None:
        self._socket = socket.create_connection((host, port), timeout=PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._closed_by_server = False
        if greet:
            self.send(HELLO)

    def send(self, data: bytes) -> None:
        """Send without waiting for anything; a connection that was cut is found when it is read."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(data)

    def settled(self) -> Reply:
        """All that came until the answer to a ping sent now: the server has done everything sent before."""
        nonce = next(_nonces)
        self.send(ping(nonce))
        pong = struct.pack("<I", nonce)
        received = bytearray()
        while not received.endswith(pong):
            piece = self._receive()
            if not piece:
                return Reply(bytes(received), cut=True)
            received += piece
        return Reply(bytes(received[: -len(pong)]))

    def exchange(self, *commands: bytes) -> Reply:
        """Send commands in one piece; all that came until they were done."""
        self.send(b"".join(commands))
        return self.settled()

    def receive(self, size: int) -> bytes:
        """Wait for so many bytes, as a client that is blocked does; fewer if the server closes."""
        received = bytearray()
        while len(received) < size:
            piece = self._receive(size - len(received))
            if not piece:
                break
            received += piece
        return bytes(received)

    def until_cut(self) -> bytes:
        """All that comes until the server closes the connection."""
        received = bytearray()
        while piece := self._receive():
            received += piece
        return bytes(received)

    def _receive(self, size: int = 1 << 20) -> bytes:
        try:
            return self._socket.recv(size)
        except ConnectionResetError:
            return b""

    def close_half(self) -> None:
        """Say that nothing more will be sent."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
