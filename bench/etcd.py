"""An etcd cluster on this machine's loopback, for figures and tests. Knows nothing of coordinators."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HEARTBEATS_PER_ELECTION = 10


@dataclass(frozen=True)
class MemberPlan:
    """How to start one member, and the port that its clients come to."""

    argv: list[str]
    port: int


def plan(
    program: str, directory: Path, size: int, *, election_ms: int, scheme: str = "http", options: Sequence[str] = ()
) -> list[MemberPlan]:
    """A new cluster of `size` members, whose data lie below `directory`; `options` are etcd's own."""
    ports = free_ports(2 * size)
    clients, peers = ports[:size], ports[size:]
    everybody = ",".join(f"m{index}=http://127.0.0.1:{port}" for index, port in enumerate(peers))
    plans = []
    for index in range(size):
        client, peer = f"{scheme}://127.0.0.1:{clients[index]}", f"http://127.0.0.1:{peers[index]}"
        argv = [program, "--name", f"m{index}", "--data-dir", str(directory / f"m{index}"), "--logger", "zap"]
        argv += ["--listen-client-urls", client, "--advertise-client-urls", client]
        argv += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        argv += ["--initial-cluster", everybody, "--initial-cluster-state", "new"]
        argv += ["--heartbeat-interval", str(election_ms // HEARTBEATS_PER_ELECTION)]
        plans.append(MemberPlan([*argv, "--election-timeout", str(election_ms), *options], clients[index]))
    return plans


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
