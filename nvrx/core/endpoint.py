"""HOST:PORT, as people write it on command lines. Looks no name up."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_PORT = 65535
LOOPBACK_HOSTS = frozenset({"localhost", "::1"})


@dataclass(frozen=True)
class HostPort:
    """A host (a name or an address, IPv6 without brackets) and a port (0: any free one)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine's loopback by its spelling."""
    return host.lower() in LOOPBACK_HOSTS or re.fullmatch(r"127(\.[0-9]{1,3}){3}", host) is not None


def parse_endpoint(text: str) -> HostPort:
    """Read `host:port` or `[v6]:port`. Raises ValueError with one line: the value, and what is wrong with it."""
    example = "give HOST:PORT, such as node1:7700 or [::1]:7700"
    if "://" in text:
        raise ValueError(f"{text!a} is a URL; {example}")
    bracketed = re.fullmatch(r"\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\](?::(.*))?", text)
    if bracketed is not None:
        host, port = bracketed[1], bracketed[2]
    else:
        if text.count(":") > 1:
            address, _, last = text.rpartition(":")
            raise ValueError(f"{text!a} has several colons; write an IPv6 address in brackets, [{address}]:{last}")
        host, colon, port = text.partition(":")
        port = port if colon else None
    if not host or re.fullmatch(r"[A-Za-z0-9._:%-]+", host) is None:
        raise ValueError(f"{text!a} has no usable host; {example}")
    if not port:
        raise ValueError(f"{text!a} has no port; {example}")
    if re.fullmatch(r"[0-9]{1,5}", port) is None or int(port) > MAX_PORT:
        raise ValueError(f"{text!a} has the port {port!a}; a port is a number from 0 to {MAX_PORT}")
    return HostPort(host, int(port))
