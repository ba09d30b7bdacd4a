"""The messages between agent and supervisor: JSON objects, each after its length; and the supervisor's end.

Must not know: what the messages mean, processes, asyncio, or anything outside the standard library.
Nothing here unpickles. A message over the limit is a bug: the sender raises, the receiver hangs up.
"""

import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

# The largest message is a spawn: workers times environment (Linux bounds an environment to a few MiB).
MESSAGE_LIMIT_BYTES = 64 * 1024 * 1024
HEADER = struct.Struct("!I")
_READ_BYTES = 256 * 1024
_FLUSH_TIMEOUT_S = 1.0

Message = dict[str, Any]


class ChannelClosed(Exception):
    """The other end is gone, or no longer makes sense."""


def encode(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(body) > MESSAGE_LIMIT_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is over the limit of {MESSAGE_LIMIT_BYTES}")
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> Message:
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError("a message is not an object")
    return message


def pack_bytes(text: str | os.PathLike[str]) -> str:
    """Arguments, environment and paths are bytes: one character each, whatever locale either end runs in."""
    return os.fsencode(text).decode("latin-1")


def unpack_bytes(text: str) -> bytes:
    return text.encode("latin-1")


class Channel:
    """The supervisor's end. Never blocks: what the agent does not read now waits in a buffer.

    The buffer is bounded by what the agent asked for: each of its messages leads to a few of ours.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._outgoing)

    def receive(self) -> Iterator[Message]:
        """The whole messages that have arrived. Raises ChannelClosed at the end."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not data:
            raise ChannelClosed("end of file")
        self._incoming += data
        while len(self._incoming) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._incoming)
            if length > MESSAGE_LIMIT_BYTES:
                raise ChannelClosed(f"a message of {length} bytes")
            end = HEADER.size + length
            if len(self._incoming) < end:
                return
            body = bytes(self._incoming[HEADER.size : end])
            del self._incoming[:end]
            try:
                message = decode(body)
            except ValueError as error:
                raise ChannelClosed(f"not a message: {error}") from error
            yield message

    def send(self, message: Message) -> None:
        self._outgoing += encode(message)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes now. A broken socket is left for `receive` to report."""
        try:
            while self._outgoing:
                sent = self._sock.send(self._outgoing)
                del self._outgoing[:sent]
        except BlockingIOError:
            return
        except OSError:
            self._outgoing.clear()

    def close(self) -> None:
        self._sock.settimeout(_FLUSH_TIMEOUT_S)
        with contextlib.suppress(OSError):  # nobody reads it any more
            self._sock.sendall(self._outgoing)
        self._sock.close()
