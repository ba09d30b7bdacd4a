"""torch's own store clients, as seen by a test: objects whose methods are those of torch's, in another process.

torch is imported there, once. Knows nothing of the servers.
"""

from __future__ import annotations

import contextlib
import itertools
import platform
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from .raw import PATIENCE_S
from .servers import RunningStore, running
from .values import from_line, from_plain, to_line, to_plain

# poll and ppoll: what a client of torch's sleeps in while it waits for keys. For other answers it sleeps in recvfrom.
_SLEEPING = {"x86_64": {"7", "271"}, "aarch64": {"73"}}


class StoreError(Exception):
    """An exception that torch's client raised: the name of its class, and its text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text


class Later:
    """The same methods as a client's; each begins the call and gives the future of its answer."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, op: str) -> Callable[..., Future[Any]]:
        return lambda *args: self._client.begin(op, *args)


class Client:
    """One of torch's store objects. `client.get("k")` is what torch answers; an exception of its becomes StoreError."""

    def __init__(self, clients: Clients, number: int) -> None:
        self._clients = clients
        self.number = number
        self._thread = 0
        self.later = Later(self)

    def open(self, store: RunningStore, timeout_s: float, prefixes: list[str], host: str | None) -> None:
        opened = self.begin("open", host or store.host, store.port, timedelta(seconds=timeout_s), prefixes)
        self._thread = opened.result(PATIENCE_S)

    def begin(self, op: str, *args: Any) -> Future[Any]:
        return self._clients.begin(self.number, op, args)

    def __getattr__(self, op: str) -> Callable[..., Any]:
        return lambda *args: self.begin(op, *args).result(PATIENCE_S)

    def clone(self) -> Client:
        """A second client of the same store, by torch's `clone`."""
        other = self._clients.new()
        other._thread = other.begin("clone", self.number).result(PATIENCE_S)
        return other

    def asleep(self) -> None:
        """Wait until its call has sent what it has to send, and sleeps until keys come."""
        numbers = _SLEEPING.get(platform.machine())
        doing = Path(f"/proc/{self._clients.pid}/task/{self._thread}/syscall")
        pause = threading.Event()
        with contextlib.suppress(PermissionError):
            while numbers and doing.read_text().split()[0] not in numbers:
                pause.wait(0.001)


class Clients:
    """The process that holds the clients."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._numbers = itertools.count()
        self._calls = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._writing = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def client(
        self, store: RunningStore, *prefixes: str, timeout_s: float = PATIENCE_S, host: str | None = None
    ) -> Client:
        """A new TCPStore, within a PrefixStore for each prefix."""
        one = self.new()
        one.open(store, timeout_s, list(prefixes), host)
        return one

    def new(self) -> Client:
        return Client(self, next(self._numbers))

    def begin(self, client: int, op: str, args: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._writing:
            number = next(self._calls)
            self._answers[number] = future
            assert self._process.stdin is not None
            self._process.stdin.write(to_line({"id": number, "client": client, "op": op, "args": to_plain(args)}))
            self._process.stdin.flush()
        return future

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            words = from_line(line)
            future = self._answers.pop(words["id"])
            if "error" in words:
                future.set_exception(StoreError(words["error"], words["text"]))
            else:
                future.set_result(from_plain(words["result"]))
        for future in self._answers.values():
            future.set_exception(RuntimeError("the process that holds torch's clients has ended"))


@contextmanager
def start_clients(scratch: Path) -> Iterator[Clients]:
    with running(scratch, "tests.store.torch_clients", text=False) as process:
        yield Clients(process)
