"""Listening sockets of a store process: which address and which port. Knows nothing of who connects."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

BACKLOG = 16 * 1024
"""Connections that wait to be accepted; the kernel takes no more than net.core.somaxconn."""
MAX_RETIRED = 256
"""Closed ports that are kept from anybody else, so that what still dials one of them reaches nobody."""
# A connection whose host went away is noticed after two minutes.
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_COUNT = 60, 15, 4


class NoPort(Exception):
    """No port can be had; the message is one line."""


@dataclass(frozen=True)
class PortRange:
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low}-{self.high}"


class Ports:
    """Ports of one address. `host` is numeric, or a name that is looked up once: raises NoPort where that fails."""

    def __init__(self, host: str, cycle_ports: PortRange | None) -> None:
        self.host = host
        self._range = cycle_ports
        self._next = cycle_ports.low if cycle_ports is not None else 0
        self._retired: dict[int, socket.socket] = {}
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        except (OSError, UnicodeError) as error:
            raise NoPort(f"cannot listen on {host} for the store: {error}") from error
        self._family = family
        self._address = str(address[0])

    def choose_from(self, cycle_ports: PortRange | None) -> None:
        """From now on ports of cycles are of this range; None: any. Those that are open stay so."""
        if cycle_ports != self._range:
            self._range = cycle_ports
            self._next = cycle_ports.low if cycle_ports is not None else 0

    def lasting(self, port: int) -> socket.socket:
        """A listening socket on this port; 0: on any. Raises NoPort."""
        try:
            return self._listen(port)
        except OSError as error:
            raise NoPort(
                f"cannot listen on {self.host}:{port} for the store: {error.strerror}; give another with --store-port"
            ) from error

    def cycle(self) -> socket.socket:
        """A listening socket on a port that no cycle has had, or not for long. Raises NoPort."""
        if self._range is None:
            return self._any()
        for _ in range(self._range.high - self._range.low + 1):
            port = self._next
            self._next = port + 1 if port < self._range.high else self._range.low
            if port not in self._retired and (one := self._try(port)) is not None:
                return one
        low, high = self._range.low, self._range.high
        for port in [one for one in self._retired if low <= one <= high]:  # the oldest first
            self._retired.pop(port).close()
            if (one := self._try(port)) is not None:
                return one
        raise NoPort(f"every port of --store-ports {self._range} on {self.host} is taken; give a wider range")

    def _try(self, port: int) -> socket.socket | None:
        """None where somebody has it. Raises NoPort where another would not help."""
        try:
            return self._listen(port)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return None
            raise self._no_port(error) from error

    def _any(self) -> socket.socket:
        try:
            return self._listen(0)
        except OSError as error:
            raise self._no_port(error) from error

    def _no_port(self, error: OSError) -> NoPort:
        return NoPort(f"cannot listen on {self.host} for the store of a cycle: {error.strerror}")

    def retire(self, port: int) -> None:
        """A cycle's port was closed: nobody gets it for now, and nobody answers there."""
        try:
            held = self._socket()
        except OSError:  # no descriptor is left for this
            return
        try:
            held.bind((self._address, port))
        except OSError:
            held.close()
            return
        self._retired[port] = held
        if len(self._retired) > MAX_RETIRED:
            self._retired.pop(next(iter(self._retired))).close()

    def _socket(self) -> socket.socket:
        one = socket.socket(self._family, socket.SOCK_STREAM)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        return one

    def _listen(self, port: int) -> socket.socket:
        one = self._socket()
        try:
            # Accepted sockets inherit these.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_COUNT)
            one.bind((self._address, port))
            one.listen(BACKLOG)
            one.setblocking(False)
        except OSError:
            one.close()
            raise
        return one
