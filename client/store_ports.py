"""Ports that this node holds free for the store of a coming cycle (`--store rank0`).

Bound but not listening, with SO_REUSEADDR: the kernel gives such a port to nobody who asks for any, yet a worker
that binds it by number with SO_REUSEADDR, as torch's TCPStore does, gets it. So there is no gap between picking a
port and using it.
"""

from __future__ import annotations

import socket

OFFERED = 2


class StorePorts:
    """A few ports held at all times; each serves one cycle."""

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}
        self._used: dict[int, socket.socket] = {}

    def offer(self) -> tuple[int, ...]:
        """Ports that no cycle has used, at least one."""
        while len(self._held) < OFFERED:
            one = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("", 0))
            self._held[one.getsockname()[1]] = one
        return tuple(self._held)

    def use(self, port: int) -> None:
        """A cycle starts on `port`: it is held on until the next cycle starts, and not offered again."""
        for one in self._used.values():
            one.close()
        self._used.clear()
        if port in self._held:
            self._used[port] = self._held.pop(port)

    def close(self) -> None:
        for one in (*self._held.values(), *self._used.values()):
            one.close()
        self._held.clear()
        self._used.clear()
