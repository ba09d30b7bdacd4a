"""`--state etcd://...` as people write it, and what etcd wants to see of us. Connects to nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from nvrx.core.endpoint import HostPort, parse_endpoint

SCHEME = "etcd://"
DEFAULT_PORT = 2379
DEFAULT_PREFIX = "/nvrx"
_EXAMPLE = "give etcd://HOST:PORT[,HOST:PORT...][/PREFIX], such as etcd://e1:2379,e2:2379,e3:2379"
_PREFIX = re.compile(r"(/[A-Za-z0-9._-]+)+")


@dataclass(frozen=True)
class EtcdAddress:
    """Where an etcd cluster is, and below which key our keys are. The prefix begins with a slash and ends without."""

    endpoints: tuple[HostPort, ...]
    prefix: str = DEFAULT_PREFIX

    def __str__(self) -> str:
        return f"{SCHEME}{','.join(map(str, self.endpoints))}{self.prefix}"


@dataclass(frozen=True)
class EtcdAccess:
    """What etcd wants to see: PEM texts for TLS (none: plain text), and a user (none: no authentication)."""

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def is_encrypted(self) -> bool:
        return self.ca is not None


def parse_etcd(text: str) -> EtcdAddress:
    """Read `etcd://host[:port],...[/prefix]`. Raises ValueError with one line: the value, and what is wrong with it."""
    if not text.startswith(SCHEME):
        raise ValueError(f"{text[:128]!a} does not begin with {SCHEME}; {_EXAMPLE}")
    hosts, slash, rest = text.removeprefix(SCHEME).partition("/")
    prefix = f"/{rest.rstrip('/')}" if slash and rest.strip("/") else DEFAULT_PREFIX
    if _PREFIX.fullmatch(prefix) is None:
        raise ValueError(f"{text[:128]!a} has the prefix {prefix!a}; a prefix has letters, digits, '.', '_', '-', '/'")
    endpoints = tuple(_endpoint(one, text) for one in hosts.split(","))
    if len(set(endpoints)) < len(endpoints):
        raise ValueError(f"{text[:128]!a} names a host twice; {_EXAMPLE}")
    return EtcdAddress(endpoints, prefix)


def _endpoint(text: str, whole: str) -> HostPort:
    lacks_port = ":" not in text or text.endswith("]")
    try:
        return parse_endpoint(f"{text}:{DEFAULT_PORT}" if lacks_port else text)
    except ValueError as error:
        raise ValueError(f"{whole[:128]!a}: {error}; {_EXAMPLE}") from error
