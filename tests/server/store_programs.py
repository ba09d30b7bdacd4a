"""The store process as a process, its control socket, and plain sockets that speak as torch's store clients do."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from nvrx.server.store_host.control import Paths, Record, read_record
from nvrx.store.codec import i64, text, u32, u64
from nvrx.store.opcodes import MAGIC, Opcode

WAIT_S = 30.0
MIB = 2**20
HELLO = bytes([Opcode.VALIDATE]) + u32(MAGIC)
COMMAND = [sys.executable, "-m", "nvrx.server.store_host.process"]


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as one:
            one.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")


class Control:
    """A coordinator's end of the control socket."""

    def __init__(self, paths: Paths) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(str(paths.socket))
        self._lines = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> dict[str, Any] | None:
        """None at the end."""
        try:
            line = self._lines.readline()
        except ConnectionError:
            return None
        return json.loads(line) if line else None

    def ask(self, **message: Any) -> dict[str, Any]:
        self.send(json.dumps(message).encode() + b"\n")
        answer = self.answer()
        assert answer is not None, f"the store process hung up after {message}"
        return answer

    def open(self, count: int = 1) -> list[int]:
        answer = self.ask(do="open", count=count)
        assert answer["ok"], answer
        return list(answer["ports"])

    def clients_of(self, port: int) -> int:
        return int(self.ask(do="state")["ports"][str(port)])

    def close(self) -> None:
        self._lines.close()
        self.socket.close()


class StoreSocket:
    """A client of a store without torch and without asyncio."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family)
        self.socket.settimeout(WAIT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.connect((host, port))
        self.send(HELLO)
        self.ping()

    @classmethod
    def over(cls, control: Control) -> StoreSocket:
        """The lasting store over a control connection."""
        self = cls.__new__(cls)
        assert control.ask(do="store") == {"ok": True}
        self.socket = control.socket
        self.send(HELLO)
        self.ping()
        return self

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def read(self, size: int) -> bytes:
        """Shorter at the end."""
        data = bytearray()
        while len(data) < size:
            try:
                more = self.socket.recv(min(size - len(data), MIB))
            except ConnectionError:
                break
            if not more:
                break
            data += more
        return bytes(data)

    def ping(self) -> None:
        self.send(bytes([Opcode.PING]) + b"ping")
        if self.read(4) != b"ping":
            raise ConnectionError("no answer")

    def set(self, key: bytes, value: bytes) -> None:
        self.send(bytes([Opcode.SET]) + text(key) + text(value))

    def get(self, key: bytes) -> bytes:
        self.send(bytes([Opcode.GET]) + text(key))
        return self.read_text()

    def read_text(self) -> bytes:
        return self.read(int.from_bytes(self.read(8), "little"))

    def add(self, key: bytes, amount: int) -> int:
        self.send(bytes([Opcode.ADD]) + text(key) + i64(amount))
        return int.from_bytes(self.read(8), "little", signed=True)

    def begin_wait(self, key: bytes) -> None:
        self.send(bytes([Opcode.WAIT]) + u64(1) + text(key))
        self.ping()

    def close(self) -> None:
        self.socket.close()


class StoreProgram:
    """A store process. `err` holds the lines of its log so far."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        kind: str = "bridge",
        host: str = "127.0.0.1",
        wrapped: Sequence[str] = (),
        **changes: str,
    ) -> None:
        self.paths = Paths(directory, "test")
        self.host = host
        options = ["--kind", kind, "--host", host, "--directory", str(directory), "--key", "test", *arguments]
        self.process = subprocess.Popen(
            [*wrapped, *COMMAND, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=os.environ | changes,
        )
        self.err: list[str] = []
        self._heard = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.controls: list[Control] = []

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._heard:
                self.err.append(line.rstrip("\n"))
                self._heard.notify_all()

    def first_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ready(self) -> StoreProgram:
        line = self.first_line()
        assert line == "ready\n", f"{line} {self.err}"
        return self

    @property
    def record(self) -> Record:
        record = read_record(self.paths)
        assert record is not None
        return record

    def control(self) -> Control:
        """A coordinator who knows the secret."""
        control = Control(self.paths)
        state = control.ask(secret=self.record.secret)
        assert state["ok"]
        self.controls.append(control)
        return control

    def lasting(self) -> StoreSocket:
        return StoreSocket(self.host, self.record.lasting_port)

    def lines(self, part: str) -> list[str]:
        return [line for line in self.err if part in line]

    def wait_for_lines(self, part: str, count: int = 1) -> list[str]:
        """Wait until the log has so many of them."""
        with self._heard:
            assert self._heard.wait_for(lambda: len(self.lines(part)) >= count, WAIT_S), self.err[-20:]
        return self.lines(part)

    def wait(self) -> int:
        """Wait for its end; its exit code."""
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code

    def is_gone(self) -> bool:
        return self.process.poll() is not None

    def resident_mib(self, peak: bool = False) -> float:
        field = "VmHWM:" if peak else "VmRSS:"
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) / 1024

    def forget_peak(self) -> None:
        """The peak is that from now on, not that of tests before."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def limit_descriptors(self, more: int) -> None:
        """Let it have only so many more than now."""
        most = self.descriptors() + more
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (most, most))

    def end(self) -> None:
        for control in self.controls:
            control.close()
        if not self.is_gone():
            self.process.kill()
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


@contextlib.contextmanager
def store_program(
    directory: Path, *arguments: str, kind: str = "bridge", host: str = "127.0.0.1", wrapped: Sequence[str] = ()
) -> Iterator[StoreProgram]:
    """A store process that is ready."""
    program = StoreProgram(directory, *arguments, kind=kind, host=host, wrapped=wrapped)
    try:
        yield program.ready()
    finally:
        program.end()


def until(what: Callable[[], bool]) -> None:
    """Ask again and again; each time takes a round trip or a system call."""
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline


def free_ports(count: int) -> int:
    """The first of so many ports in a row that are free now, outside what the kernel gives to those who ask for any."""
    for low in range(20_000 + os.getpid() % 10_000, 32_000, count):
        with contextlib.ExitStack() as held:
            try:
                for port in range(low, low + count):
                    one = held.enter_context(socket.socket())
                    one.bind(("127.0.0.1", port))
            except OSError:
                continue
            return low
    raise AssertionError("no free ports")


def is_refused(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as one:
        one.settimeout(WAIT_S)
        try:
            one.connect((host, port))
        except ConnectionRefusedError:
            return True
        # Where nobody listens, a socket can meet itself.
        return bool(one.getsockname() == one.getpeername())


def is_held(port: int) -> bool:
    """Whether somebody keeps the port, listening or not."""
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return True
        return False
