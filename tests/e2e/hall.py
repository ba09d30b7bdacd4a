"""Where workers report to the test, and are told what to do: one UNIX connection for each worker process.

A connection ends when its process does, so that the end of a worker is an event here too.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .board import PATIENCE_S, Board


@dataclass(eq=False)
class Worker:
    """A worker process as it told of itself. `at` and `ended_at` are on the machine's monotonic clock."""

    connection: socket.socket
    board: Board
    role: str = ""
    pid: int = 0
    at: float = 0.0
    env: dict[str, str] = field(default_factory=dict)
    argv: list[str] = field(default_factory=list)
    cwd: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    ended_at: float | None = None
    unread: bytes = b""

    @property
    def node(self) -> str:
        return self.env.get("NVRX_NODE_ID", "")

    @property
    def cycle(self) -> int:
        return int(self.env.get("NVRX_CYCLE", "-1"))

    @property
    def local_rank(self) -> int:
        return int(self.env.get("LOCAL_RANK", "-1"))

    @property
    def rank(self) -> int:
        return int(self.env.get("RANK", "-1"))

    def tell(self, do: str, **more: Any) -> None:
        """Give it an order."""
        self.connection.sendall(json.dumps({"do": do, **more}).encode() + b"\n")

    def said(self, event: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait for one of its messages; fails at once when it ended without."""

        def found() -> dict[str, Any] | None:
            hit = next((one for one in self.messages if one["event"] == event), None)
            if hit is None and self.ended_at is not None:
                raise AssertionError(f"{self} did not say {event!r}\n{self.board.state()}")
            return hit

        return self.board.until(found, f"{self} to say {event!r}", timeout_s)

    def ended(self, timeout_s: float = PATIENCE_S) -> float:
        """Wait until its process is gone; when that was."""
        return self.board.until(lambda: self.ended_at, f"the end of {self}", timeout_s)

    def __str__(self) -> str:
        state = "running" if self.ended_at is None else "ended"
        return f"{self.role} {self.node}/{self.local_rank} of cycle {self.cycle} (pid {self.pid}, {state})"


class Hall:
    """All workers that ever reported."""

    def __init__(self, board: Board, path: Path) -> None:
        self.workers: list[Worker] = []
        self._board = board
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(256)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connected: set[Worker] = set()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        board.describe_with(self.describe)

    def describe(self) -> str:
        return "\n".join(["--- workers", *map(str, self.workers)])

    def find(
        self, node: str | None, cycle: int | None, local_rank: int | None = 0, role: str = "worker"
    ) -> list[Worker]:
        return [
            one
            for one in self.workers
            if one.role == role
            and node in (None, one.node)
            and cycle in (None, one.cycle)
            and local_rank in (None, one.local_rank)
        ]

    def _serve(self) -> None:
        while True:
            ready = {key.fileobj for key, _ in self._selector.select()}
            if self._wake_read in ready:
                return
            # Ends before beginnings: what was gone before a worker began is seen to be.
            for worker in list(self._connected):
                self._drain(worker)
            if self._listener in ready:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                worker = Worker(connection, self._board)
                self._connected.add(worker)
                self._selector.register(connection, selectors.EVENT_READ)
            self._board.announce()

    def _drain(self, worker: Worker) -> None:
        while True:
            try:
                data = worker.connection.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                worker.ended_at = time.monotonic()
                self._connected.discard(worker)
                self._selector.unregister(worker.connection)
                return
            *lines, worker.unread = (worker.unread + data).split(b"\n")
            for line in lines:
                self._take(worker, json.loads(line))

    def _take(self, worker: Worker, message: dict[str, Any]) -> None:
        if message["event"] == "hello":
            worker.role, worker.pid, worker.at = message["role"], message["pid"], message["at"]
            worker.env, worker.argv, worker.cwd = message["env"], message["argv"], message["cwd"]
            self.workers.append(worker)
        worker.messages.append(message)

    def close(self) -> None:
        os.write(self._wake_write, b"x")
        self._thread.join(PATIENCE_S)
        for one in [self._listener, *(worker.connection for worker in [*self.workers, *self._connected])]:
            with contextlib.suppress(OSError):
                one.close()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
