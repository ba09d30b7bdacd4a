"""Real etcd members on this machine, and a TCP proxy before one: for the tests of several coordinators.

Everything lies in a temporary folder and is ended by pid. Knows nothing of coordinators.
"""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.etcd import plan
from nvrx.server.etcd.address import EtcdAddress, parse_etcd
from nvrx.server.etcd.client import Etcd

ETCD = shutil.which("etcd")
START_WITHIN_S = 30.0
ELECTION_MS = 500
"""etcd's own election; short, so that a test that kills etcd's leader is over soon."""


def require_etcd() -> str:
    """The program; where it is missing the test is skipped, and fails under CI=true."""
    if ETCD is None:
        missing = "etcd is not installed; try: apt-get install etcd-server"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    return ETCD


class Member:
    """One etcd process."""

    def __init__(self, argv: Sequence[str], port: int, log: Path) -> None:
        self._argv = argv
        self._log = log
        self.port = port
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={"PATH": os.environ["PATH"]}
            )

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(START_WITHIN_S)

    def start_again(self) -> None:
        self.process = self._start()


class EtcdCluster:
    """Some members; `address(prefix)` is for coordinators. `options` are etcd's own."""

    def __init__(self, size: int, *options: str, scheme: str = "http") -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="nvrx-etcd-"))
        self.members = [
            Member(one.argv, one.port, self.directory / f"m{index}.log")
            for index, one in enumerate(
                plan(require_etcd(), self.directory, size, election_ms=ELECTION_MS, scheme=scheme, options=options)
            )
        ]

    def state(self, prefix: str, ports: Sequence[int] | None = None) -> str:
        """What `--state` takes."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports or [one.port for one in self.members])
        return f"etcd://{hosts}/{prefix}"

    def address(self, prefix: str) -> EtcdAddress:
        return parse_etcd(self.state(prefix))

    def wait_until_whole(self) -> None:
        """Wait until every member answers, and so takes part."""
        for member in self.members:
            asyncio.run(_answers(self.state("x", [member.port])))

    def close(self) -> None:
        for member in self.members:
            member.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


async def _answers(state: str) -> None:
    etcd = Etcd(parse_etcd(state))
    try:
        await etcd.range("x", within_s=START_WITHIN_S)
    finally:
        await etcd.close()


class Proxy:
    """Passes bytes on to a port of this machine, until it is cut: then nothing passes, and nobody is told."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._is_cut = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        self._is_cut.set()
        os.write(self._wake_write, b"x")

    def mend(self) -> None:
        self._is_cut.clear()
        os.write(self._wake_write, b"x")

    def _serve(self) -> None:
        other: dict[socket.socket, socket.socket] = {}
        with self._listener:
            while True:
                watched: list[int | socket.socket]
                watched = [self._wake_read] if self._is_cut.is_set() else [self._wake_read, self._listener, *other]
                ready, _, _ = select.select(watched, [], [])
                for one in ready:
                    if one is self._wake_read:
                        if os.read(self._wake_read, 1) == b"q":
                            for connection in other:
                                connection.close()
                            return
                    elif one is self._listener:
                        self._accept(other)
                    elif one in other:
                        self._pass(one, other)

    def _accept(self, other: dict[socket.socket, socket.socket]) -> None:
        connection, _ = self._listener.accept()
        try:
            onward = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            connection.close()
            return
        other[connection], other[onward] = onward, connection

    def _pass(self, source: socket.socket, other: dict[socket.socket, socket.socket]) -> None:
        target = other[source]
        try:
            data = source.recv(65536)
            if data:
                target.sendall(data)
                return
        except OSError:
            pass
        for one in (source, target):
            other.pop(one, None)
            one.close()

    def close(self) -> None:
        os.write(self._wake_write, b"q")
        self._thread.join(START_WITHIN_S)
        os.close(self._wake_read)
        os.close(self._wake_write)
