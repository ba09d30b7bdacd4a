"""The clients of a store under load, in a process of their own: raw sockets, requests made beforehand, no torch.

Reads what to do as JSON lines from standard input and answers each with a line: what was done, how long it took, and
what processor time the server (by its pid) spent on it. Knows nothing of which server that is.
"""

from __future__ import annotations

import json
import resource
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nvrx.store.codec import i64, text, u32, u64
from nvrx.store.opcodes import MAGIC, Opcode

VALUE = b"v" * 64
KEYS_OF_MULTI_GET = 16
_HELLO = bytes((Opcode.VALIDATE,)) + u32(MAGIC) + bytes((Opcode.PING,)) + u32(7)
_PONG_BYTES = 4
_POLL_S = 1.0
_MAX_EVENTS = 1024
_AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: a closed connection leaves no TIME_WAIT behind


@dataclass(frozen=True)
class Step:
    """What a client sends, each in a packet of its own, and how long the answer is."""

    requests: tuple[bytes, ...]
    reply_bytes: int


@dataclass(frozen=True)
class Measured:
    """`count` operations, or connections, of `asked`."""

    asked: int
    count: int
    wall_s: float
    cpu_s: float


def key(name: str) -> bytes:
    return text(f"/default_pg/0//worker/{name}".encode())


def command(opcode: Opcode, *fields: bytes) -> bytes:
    return bytes((opcode,)) + b"".join(fields)


def operations(client: int) -> dict[str, list[Step]]:
    """As torch's client does them: what reads waits first, and SET is not answered (here a CHECK follows it)."""
    own, count = key(f"{client:04}"), key(f"{client:04}/count")
    many = [key(f"{number:04}") for number in range(KEYS_OF_MULTI_GET)]
    value = text(VALUE)
    check = command(Opcode.CHECK, u64(1), own)
    wait, wait_for_many = command(Opcode.WAIT, u64(1), own), command(Opcode.WAIT, u64(len(many)), *many)
    return {
        "get": [Step((wait,), 1), Step((command(Opcode.GET, own),), len(value))],
        "set": [Step((command(Opcode.SET, own, value), check), 1)],
        "add": [Step((command(Opcode.ADD, count, i64(1)),), 8)],
        "wait": [Step((wait,), 1)],
        "check": [Step((check,), 1)],
        "multi_get": [
            Step((wait_for_many,), 1),
            Step((command(Opcode.MULTI_GET, u64(len(many)), *many),), len(value) * len(many)),
        ],
        "compare_set": [Step((command(Opcode.COMPARE_SET, own, value, value),), len(value))],
    }


OPERATIONS = tuple(operations(0))


def cpu_s(pid: int) -> float:
    """Processor time of all threads of a process, by the scheduler's own account."""
    spent_ns = [int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(spent_ns) / 1e9


class Load:
    """Connections to one server."""

    def __init__(self, host: str, port: int, pid: int) -> None:
        self._address = (host, port)
        self._pid = pid
        self._held: list[socket.socket] = []

    def operate(self, operation: str, clients: int, seconds: float) -> Measured:
        """Each client repeats an operation, the next when the last was answered."""
        sockets = [self._connect() for _ in range(clients)]
        for number in range(max(clients, KEYS_OF_MULTI_GET)):
            sockets[0].sendall(command(Opcode.SET, key(f"{number:04}"), text(VALUE)))
        try:
            steps = [operations(number)[operation] for number in range(clients)]
            repeat = _repeat_one if clients == 1 else _repeat_all
            repeat(sockets, steps, seconds / 10)  # until all are warm
            return self._measure(clients, lambda: repeat(sockets, steps, seconds))
        finally:
            _close(sockets)

    def connect(self, connections: int, limit_s: float) -> Measured:
        """As many as come at once; held until `drop`. Ends after `limit_s` with those that the server answered."""
        return self._measure(connections, lambda: self._burst(connections, limit_s))

    def drop(self) -> Measured:
        held, self._held = self._held, []
        return self._measure(len(held), lambda: _close(held))

    def wake(self) -> Measured:
        """All held connections wait for one key that then comes."""
        waiting = command(Opcode.WAIT, u64(1), key("late")) + command(Opcode.PING, u32(1))
        for one in self._held:
            one.sendall(waiting)
        _read_each(self._held, _PONG_BYTES)
        caller = self._connect()
        coming = command(Opcode.SET, key("late"), text(b""))

        def wake() -> int:
            caller.sendall(coming)
            return _read_each(self._held, 1)

        measured = self._measure(len(self._held), wake)
        caller.sendall(command(Opcode.DELETE_KEY, key("late")))
        _read(caller, 8)
        _close([caller])
        return measured

    def fill(self, keys: int) -> Measured:
        caller = self._connect()

        def fill() -> int:
            for number in range(keys):
                caller.sendall(command(Opcode.SET, key(f"fill/{number:08}"), text(VALUE)))
            caller.sendall(command(Opcode.GETNUMKEYS))
            return int.from_bytes(_read(caller, 8), "little")

        measured = self._measure(keys, fill)
        _close([caller])
        return measured

    # ---- below --------------------------------------------------------------------------------------------

    def _measure(self, asked: int, act: Callable[[], int]) -> Measured:
        before_s, started_s = cpu_s(self._pid), time.monotonic()
        count = act()
        wall_s = time.monotonic() - started_s
        return Measured(asked, count, wall_s, cpu_s(self._pid) - before_s)

    def _connect(self) -> socket.socket:
        one = socket.create_connection(self._address)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
        one.sendall(_HELLO)
        _read(one, _PONG_BYTES)
        return one

    def _burst(self, connections: int, limit_s: float) -> int:
        deadline_s = time.monotonic() + limit_s
        sockets = {}
        with select.epoll() as poller:
            for _ in range(connections):
                one = socket.socket()
                one.setblocking(False)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
                one.connect_ex(self._address)
                sockets[one.fileno()] = one
                poller.register(one, select.EPOLLOUT)
            answered = 0
            while answered < connections and (left_s := deadline_s - time.monotonic()) > 0:
                for fd, event in poller.poll(min(left_s, _POLL_S), _MAX_EVENTS):
                    if event == select.EPOLLOUT:
                        sockets[fd].send(_HELLO)
                        poller.modify(fd, select.EPOLLIN)
                    else:
                        _read(sockets[fd], _PONG_BYTES)
                        poller.unregister(fd)
                        answered += 1
        for one in sockets.values():
            one.setblocking(True)
        self._held += sockets.values()
        return answered


def _read(one: socket.socket, size: int) -> bytes:
    data = one.recv(size)
    while len(data) < size:
        more = one.recv(size - len(data))
        if not more:
            raise ConnectionError("the server closed a connection")
        data += more
    return data


def _read_each(sockets: Sequence[socket.socket], size: int) -> int:
    """Returns once each has read that much."""
    for one in sockets:
        _read(one, size)
    return len(sockets)


def _repeat_one(sockets: Sequence[socket.socket], steps: Sequence[Sequence[Step]], seconds: float) -> int:
    """Without a poller, which would cost a single client a third of its rate."""
    (one,), (own,) = sockets, steps
    plan = [(step.requests, step.reply_bytes) for step in own]
    end_s = time.monotonic() + seconds
    done = 0
    while time.monotonic() < end_s:
        for requests, size in plan:
            for request in requests:
                one.send(request)
            _read(one, size)
        done += 1
    return done


def _repeat_all(sockets: Sequence[socket.socket], steps: Sequence[Sequence[Step]], seconds: float) -> int:
    period = len(steps[0])
    by_fd = {one.fileno(): (one, own) for one, own in zip(sockets, steps, strict=True)}
    turn = dict.fromkeys(by_fd, 0)
    left = len(sockets)
    done = 0
    with select.epoll() as poller:
        for fd, (one, own) in by_fd.items():
            poller.register(fd, select.EPOLLIN)
            for request in own[0].requests:
                one.send(request)
        end_s = time.monotonic() + seconds
        while left:
            ended = time.monotonic() >= end_s
            for fd, _ in poller.poll(_POLL_S, _MAX_EVENTS):
                one, own = by_fd[fd]
                _read(one, own[turn[fd]].reply_bytes)
                following = turn[fd] = (turn[fd] + 1) % period
                if not following:
                    done += 1
                    if ended:
                        left -= 1
                        continue
                for request in own[following].requests:
                    one.send(request)
    return done


def _close(sockets: Sequence[socket.socket]) -> int:
    for one in sockets:
        one.close()
    return len(sockets)


def main() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    where: dict[str, Any] = json.loads(sys.argv[1])
    load = Load(**where)
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        measured: Measured = getattr(load, order.pop("do"))(**order)
        print(json.dumps(asdict(measured)), flush=True)


if __name__ == "__main__":
    main()
