"""Stores under measurement, each a store process of its own, and the load generator beside it. Knows no figures.

A store process ends soon after the connection that controls it: whatever ends this program ends them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from bench import processes
from bench.store_load import Measured

KINDS = ("bridge", "torch", "asyncio")
"""asyncio: our server on asyncio's own loop, only to see what uvloop is worth."""
HOST = "127.0.0.1"
_ENTRY = "nvrx.server.store_host.process"
_ON_ASYNCIO = (
    f"import asyncio, sys, uvloop; uvloop.run = asyncio.run; from {_ENTRY} import main; sys.exit(main(sys.argv[1:]))"
)


class Server:
    """A store process of one kind."""

    def __init__(self, kind: str, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True)
        entry = ["-c", _ON_ASYNCIO] if kind == "asyncio" else ["-m", _ENTRY]
        served = "torch" if kind == "torch" else "bridge"
        options = ["--kind", served, "--host", HOST, "--directory", str(directory), "--key", "bench"]
        argv = [sys.executable, *entry, *options]
        self._process = processes.start(argv, os.environ, directory / "log", stdout=subprocess.PIPE)
        self.pid = self._process.pid
        _line(self._process.stdout, f"the {kind} store did not start; see {directory / 'log'}")
        self._control = socket.socket(socket.AF_UNIX)
        self._control.connect(str(directory / "store-bench.sock"))
        self._answers = self._control.makefile("rb")
        secret = json.loads((directory / "store-bench.json").read_text())["secret"]
        self._ask({"do": "hello", "secret": secret})

    def open_port(self) -> int:
        port: int = self._ask({"do": "open", "count": 1})["ports"][0]
        return port

    def rss_mb(self) -> float:
        """Resident memory, in MB of 10^6 bytes."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def close(self) -> None:
        self._control.close()
        self._process.terminate()
        self._process.wait()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self._control.sendall(json.dumps(message).encode() + b"\n")
        answer: dict[str, Any] = json.loads(_line(self._answers, "the store process ended"))
        if not answer["ok"]:
            raise RuntimeError(f"the store process refused {message}: {answer}")
        return answer


class Generator:
    """The process that puts one port of a server under load."""

    def __init__(self, server: Server, log: Path) -> None:
        where = json.dumps({"host": HOST, "port": server.open_port(), "pid": server.pid})
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.store_load", where],
                cwd=processes.REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        self._log = log

    def do(self, what: str, **how: Any) -> Measured:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **how}).encode() + b"\n")
        self._process.stdin.flush()
        line = _line(self._process.stdout, f"the load generator ended in {what!r}; see {self._log}")
        return Measured(**json.loads(line))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _line(file: IO[bytes] | None, otherwise: str) -> bytes:
    assert file is not None
    line = file.readline()
    if not line:
        raise RuntimeError(otherwise)
    return line
