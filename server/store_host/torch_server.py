"""torch's own store server in the place of ours (`--store torch`): the same interface around `TCPStore`.

The only place that imports torch, and only in a process that was asked to. What torch does not tell is not known here:
which client sent what; keys that are the coordinator's are not protected.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

_ESTABLISHED = "01"
_READ_BYTES = 64 * 1024


class TorchServer:
    """torch's store on one port."""

    def __init__(self, store: Any, host: str, port: int) -> None:
        self._store = store
        self._host = host
        self.port = port

    @classmethod
    async def start(cls, listening: socket.socket) -> TorchServer:
        """Serve on a socket that already listens."""
        host, port = listening.getsockname()[:2]
        reachable = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        fd = listening.detach()  # torch closes it
        # Its constructor connects to itself and may look names up for seconds: not on the loop.
        try:
            store = await asyncio.to_thread(_make_store, reachable, port, fd)
        except (ImportError, RuntimeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise OSError(f"torch's store does not start on {reachable}:{port}: {reason}") from error
        return cls(store, reachable, port)

    @property
    def clients(self) -> int:
        """Connections other than torch's own."""
        return max(0, _established(self.port) - 1)

    async def close(self) -> None:
        """Stop the server, which cuts all clients off."""
        # Dropping the last reference stops it and waits for its thread: not on the loop.
        last, self._store = [self._store], None
        await asyncio.to_thread(last.clear)

    async def serve_privileged(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass a control connection on to the server."""
        onward_reader, onward_writer = await asyncio.open_connection(self._host, self.port)
        try:
            passing = {
                asyncio.create_task(_pass_on(reader, onward_writer)),
                asyncio.create_task(_pass_on(onward_reader, writer)),
            }
            _, pending = await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
        finally:
            onward_writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # either end is gone
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()


def _make_store(host: str, port: int, fd: int) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


def _established(port: int) -> int:
    """Connections that this port has accepted, by the kernel's tables (proc_pid_net(5))."""
    wanted = f":{port:04X}"
    count = 0
    for table in (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")):
        if table.exists():
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                count += fields[1].endswith(wanted) and fields[3] == _ESTABLISHED
    return count
