"""Ports that this node holds free for the store of a coming cycle (`--store rank0`).

Bound but not listening, with SO_REUSEADDR: the kernel gives such a port to nobody who asks for any, yet a worker
that binds it by number with SO_REUSEADDR, as torch's TCPStore does, gets it. So there is no gap between picking a
port and using it.
"""

from __future__ import annotations

import socket

OFFERED = 6
"""More than the coordinator leaves out because recent cycles had them: also where assignments never arrived."""
MAX_REFUSED = 100
"""After so many ports of earlier cycles in a row one is offered again: all others must be taken."""


class StorePorts:
    """A few ports held at all times; each serves one cycle."""

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}
        self._used: dict[int, socket.socket] = {}
        self._past: set[int] = set()

    def offer(self) -> tuple[int, ...]:
        """Ports that no cycle has used on this node."""
        again: list[socket.socket] = []
        while len(self._held) < OFFERED:
            one = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("", 0))
            port = one.getsockname()[1]
            if port in self._past and len(again) < MAX_REFUSED:
                again.append(one)  # held until others are found: else the kernel may give it once more
            else:
                self._held[port] = one
        for one in again:
            one.close()
        return tuple(self._held)

    def use(self, port: int) -> None:
        """A cycle was given `port`: it is held until the next cycle gets its own, and not offered again."""
        if port in self._used:
            return
        for one in self._used.values():
            one.close()
        self._used.clear()
        if port in self._held:
            self._used[port] = self._held.pop(port)
            self._past.add(port)

    def close(self) -> None:
        for one in (*self._held.values(), *self._used.values()):
            one.close()
        self._held.clear()
        self._used.clear()
