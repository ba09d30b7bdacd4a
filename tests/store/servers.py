"""The servers under test, each behind the same few words. Knows how to start them and nothing of what they answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from .bridge_server import BRIDGE
from .raw import PATIENCE_S, RawClient

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class RunningStore:
    """A store that answers at an address; `pid` is the process that serves it."""

    host: str
    port: int
    pid: int

    def raw(self, *, greet: bool = True, host: str | None = None) -> RawClient:
        return RawClient(host or self.host, self.port, greet=greet)


class StoreHost(Protocol):
    """A server process that can serve any number of stores, each empty at first."""

    def open(self) -> RunningStore: ...


def files_only(scratch: Path, *command: str) -> list[str]:
    """A command that is to look up host names in files only."""
    return [sys.executable, "-m", "tests.e2e.files_only", str(scratch), *command]


def quiet() -> dict[str, str]:
    """The environment of a process whose torch says nothing of clients that it cuts off."""
    return {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}


class _Program:
    """A program that opens a store for each line that it is sent, and answers with the port."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def open(self) -> RunningStore:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("open", file=self._process.stdin, flush=True)
        return RunningStore("127.0.0.1", int(self._process.stdout.readline()), self._process.pid)


@contextmanager
def running(scratch: Path, module: str, *, text: bool) -> Iterator[subprocess.Popen[Any]]:
    """A module that runs until the end of its standard input, host names from files only."""
    process: subprocess.Popen[Any] = subprocess.Popen(
        files_only(scratch, sys.executable, "-m", module),
        cwd=ROOT,
        env=quiet(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=text,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()


@contextmanager
def _host(scratch: Path, module: str) -> Iterator[StoreHost]:
    with running(scratch, module, text=True) as process:
        yield _Program(process)


def start_torch(scratch: Path) -> AbstractContextManager[StoreHost]:
    """torch's own server, in a process of its own."""
    return _host(scratch, "tests.store.torch_server")


def start_bridge(scratch: Path) -> AbstractContextManager[StoreHost]:
    """Ours, likewise. Any other way to start it will do: what is needed is `open`."""
    try:
        there = find_spec(BRIDGE) is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        raise NotImplementedError("the bridge is not there yet")
    return _host(scratch, "tests.store.bridge_server")


STARTS = {"torch": start_torch, "bridge": start_bridge}
