"""The zygote: a Python that has imported what workers need, and becomes them by forking. A program of its own.

It runs under the interpreter that the worker command names, which may be another than the agent's (3.9 or
later) and need not know nvrx: only the standard library here, no siblings, nothing left in `__main__`.
Must not know: cycles, ranks, the agent. It does what its socket says; the supervisor is the other end.

Forked twice: who is born has the supervisor as its parent, being the orphan of a process that ended at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

with contextlib.suppress(ImportError):  # as a program it has no package: the boot has run that file in this namespace
    from .zygote_worker import STDERR, STDOUT, UNUSABLE_STATUS, Command, Order, Worker, set_name

LEAST_PYTHON = (3, 9)
_BOOT = """(lambda s,n:(
s.flags.isolated or getattr(s.flags,'safe_path',0) or s.path.pop(0),
[exec(compile(t,p,'exec'),n) for p,t in {sources}.items()],
n['main'](*{arguments}))[2])(__import__('sys'),{{'__name__':'nvrx_zygote','__package__':''}})"""
_HEADER_BYTES = 4
_FDS_PER_WORKER = 3
_OUTPUT_LIMIT_BYTES = 64 * 1024
_HARMLESS_FILES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_LOW_PRIORITY = 19
_THREADS_LOOKS, _THREADS_AGAIN_S = 20, 0.01

if TYPE_CHECKING:
    Run = Callable[[], None]


def read_sources() -> dict[str, str]:
    """What a zygote runs, by path. To be read once, so that an upgrade meanwhile mixes no versions."""
    sources = {}
    for name in ("zygote_worker.py", "zygote.py"):
        path = os.path.join(os.path.dirname(__file__), name)
        with open(path, encoding="utf-8") as file:
            sources[path] = file.read()
    return sources


def boot_text(sources: dict[str, str], channel_fd: int, told: list[bytes]) -> str:
    """A Python expression that makes a process the zygote. It binds no name: they would be the workers'."""
    return _BOOT.format(sources=ascii(sources), arguments=ascii((tuple(sources), channel_fd, told)))


def boot_words(boot_fd: int, least_bytes: int) -> list[bytes]:
    """What stands after the interpreter's options; `boot_text` is read from `boot_fd`.

    Short, as the workers' own command line is written over it, and padded where that is longer.
    """
    words = [b"-c", b"eval(open(%d).read())()" % boot_fd]
    missing = least_bytes - sum(len(word) + 1 for word in words)
    return [*words, b" " * (missing - 1)] if missing > 0 else words


# --- messages: a length, then blobs, each after its length


def pack(blobs: Sequence[bytes]) -> bytes:
    body = b"".join(len(blob).to_bytes(_HEADER_BYTES, "big") + blob for blob in blobs)
    return len(body).to_bytes(_HEADER_BYTES, "big") + body


def unpack(body: bytes) -> list[bytes]:
    blobs, at = [], 0
    while at < len(body):
        start = at + _HEADER_BYTES
        at = start + int.from_bytes(body[at:start], "big")
        blobs.append(body[start:at])
    return blobs


def _receive(channel: socket.socket) -> tuple[list[bytes], list[int]]:
    """The next message and the descriptors that came with it. Ends the process where there is no other end."""
    space = socket.CMSG_SPACE(_FDS_PER_WORKER * 4)
    header, ancillary, _, _ = channel.recvmsg(_HEADER_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds: list[int] = []
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds += [int.from_bytes(data[at : at + 4], sys.byteorder) for at in range(0, len(data) - 3, 4)]
    if header:
        header += _exactly(channel, _HEADER_BYTES - len(header))
        return unpack(_exactly(channel, int.from_bytes(header, "big"))), fds
    os._exit(0)


def _exactly(channel: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = channel.recv(min(count - len(data), 1 << 20))
        if not more:
            os._exit(0)
        data += more
    return data


# --- the zygote


class Zygote:
    def __init__(self, channel: socket.socket, own_paths: tuple[str, ...]) -> None:
        self._channel = channel
        self._own_paths = own_paths
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._output: dict[int, bytes] = {}
        self._watched: dict[str, tuple[int, int, int]] = {}
        with open("/proc/self/comm", "rb") as file:
            self._name = file.read().rstrip(b"\n")
        set_name(self._libc, b"nvrx-zygote")

    def serve(self, told: list[bytes]) -> Run:
        """Returns in a worker alone: what it is to run.

        `told`: the supervisor's pid, modules with commas, `script` or `module`, how many words stand before its name,
        and the words of the command.
        """
        self._supervisor_pid = int(told[0])
        if os.getppid() != self._supervisor_pid:  # a wrapper stands between: nothing born here would be its child
            self._give_up("the command's python starts another process")
        if sys.version_info[:2] < LEAST_PYTHON:
            self._give_up(f"Python {sys.version_info[0]}.{sys.version_info[1]} is too old; 3.9 will do")
        modules, kind, place, *argv = (os.fsdecode(blob) for blob in told[1:])
        self._command = Command(argv, kind, argv[int(place)], argv[int(place) + 1 :])
        self._prepare_path()
        priority = _lower_priority()
        with _Quietly(self._libc, self._output):
            warnings = self._import(modules.split(","))
        if priority is not None:
            os.setpriority(os.PRIO_PROCESS, 0, priority)
        for warning in warnings:
            self._say("warning", warning)
        self._watch(modules.split(","))
        _let_libraries_end_their_threads()
        problem = self._problem()
        if problem:
            self._give_up(problem)
        gc.collect()
        gc.freeze()  # a collection in a worker need not write to what all share
        self._say("ready", "")
        return self._fork_when_told()

    def _say(self, kind: str, text: str) -> None:
        self._channel.sendall(pack([kind.encode(), " ".join(text.split()).encode("utf-8", "replace")[:500]]))

    def _give_up(self, why: str) -> NoReturn:
        self._say("unusable", why)
        os._exit(UNUSABLE_STATUS)

    def _prepare_path(self) -> None:
        """What stands first on the path is what would stand there for the command: imports here look there too."""
        if not _adds_to_path():
            return
        command = self._command
        first = os.getcwd() if command.kind == "module" else os.path.dirname(os.path.realpath(command.target))
        hidden = [name for name in sys.modules if os.path.exists(os.path.join(first, f"{name}.py"))]
        if hidden:
            self._give_up(f"{hidden[0]}.py in {first} hides a standard module")
        sys.path.insert(0, first)

    def _import(self, modules: list[str]) -> list[str]:
        warnings = []
        for name in modules:
            try:
                __import__(name)
            except BaseException as error:  # noqa: BLE001 - also sys.exit: what does not load costs nothing else
                warnings.append(f"cannot import {name}: {type(error).__name__}: {error}")
        return warnings

    def _watch(self, modules: list[str]) -> None:
        """Remember what the user's own modules looked like, and the named ones."""
        library = os.path.dirname(os.__file__) + os.sep
        for name, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if not isinstance(path, str):
                continue
            installed = path.startswith(library) or "site-packages" in path or "dist-packages" in path
            if not installed or name in modules:
                looks = _looks(path)
                if looks is not None:
                    self._watched[path] = looks

    def _problem(self, ours: Sequence[int] = ()) -> str:
        """Why workers cannot be forked from here; empty where they can. `ours`: descriptors beside the socket."""
        tasks = _threads()
        if tasks != 1:
            return f"after its imports it has {tasks} threads"
        children = _children()
        if children:
            return f"its imports left processes running: {children}"
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd > STDERR and fd not in (self._channel.fileno(), *ours):
                held = _link(f"/proc/self/fd/{fd}")
                if held not in ("", *_HARMLESS_FILES):  # "": the one that listed the folder
                    return f"its imports hold {held} open, which workers would share"
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            return "its imports started CUDA"
        if "grpc" in sys.modules:
            return "its imports loaded gRPC, which does not bear a fork"
        return ""

    def _fork_when_told(self) -> Run:
        orders: list[Order] = []
        while True:
            blobs, fds = _receive(self._channel)
            if blobs[0] == b"worker":
                orders.append(Order(blobs[1:], fds))
                continue
            changed = [path for path, looks in self._watched.items() if _looks(path) != looks]
            problem = (
                f"{changed[0]} has changed" if changed else self._problem([fd for order in orders for fd in order.fds])
            )
            if problem:
                self._say("unusable", problem)
            else:
                pid = os.fork()
                if pid == 0:
                    return self._fork_each(orders)
                os.waitpid(pid, 0)
            for order in orders:
                order.close()
            orders = []

    def _fork_each(self, orders: list[Order]) -> Run:
        """In the process between: all are born here, and it ends before any of them begins."""
        own_pid = os.getpid()
        try:
            for order in orders:
                if os.fork() == 0:
                    for other in orders:
                        if other is not order:
                            other.close()
                    self._channel.close()
                    context = (self._libc, self._own_paths, self._supervisor_pid, self._name)
                    return Worker(*context, self._command, self._output).become(order, own_pid)
        finally:
            if os.getpid() == own_pid:
                os._exit(0)
        raise AssertionError("not reached")


class _Quietly:
    """While modules are imported their output goes into memory: each worker then has it, as if it had imported."""

    def __init__(self, libc: ctypes.CDLL, output: dict[int, bytes]) -> None:
        self._libc, self._output = libc, output

    def __enter__(self) -> None:
        self._kept = {fd: (os.dup(fd), os.memfd_create("nvrx-output")) for fd in (STDOUT, STDERR)}
        for fd, (_, memory_fd) in self._kept.items():
            os.dup2(memory_fd, fd)

    def __exit__(self, *_: object) -> None:
        for stream in (sys.stdout, sys.stderr):
            # An import may have put something else in its place, or closed it.
            with contextlib.suppress(AttributeError, ValueError, OSError):
                stream.flush()
        self._libc.fflush(None)
        for fd, (kept_fd, memory_fd) in self._kept.items():
            output = os.pread(memory_fd, _OUTPUT_LIMIT_BYTES, 0)
            if output:
                self._output[fd] = output
            os.dup2(kept_fd, fd)
            os.close(kept_fd)
            os.close(memory_fd)


def _let_libraries_end_their_threads() -> None:
    """Those that know of fork (OpenBLAS) end their threads before one, and start them again when needed."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _lower_priority() -> int | None:
    """Leave the processors to others meanwhile; the priority to go back to. Not where there is no way back."""
    priority = os.getpriority(os.PRIO_PROCESS, 0)
    pid = os.fork()
    if pid == 0:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, priority + 1)
            os.setpriority(os.PRIO_PROCESS, 0, priority)
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(pid, 0)[1] != 0:
        return None
    os.setpriority(os.PRIO_PROCESS, 0, _LOW_PRIORITY)
    return priority


def _adds_to_path() -> bool:
    return not (sys.flags.isolated or getattr(sys.flags, "safe_path", False))


def _looks(path: str) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _threads() -> int:
    """How many there are; one that has been joined may take a moment to be gone."""
    import time

    for _ in range(_THREADS_LOOKS):
        count = len(os.listdir("/proc/self/task"))
        if count == 1:
            break
        time.sleep(_THREADS_AGAIN_S)
    return count


def _children() -> str:
    """Their pids; nothing where the kernel does not tell (the supervisor looks as well)."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return file.read().strip()
    except FileNotFoundError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def main(own_paths: tuple[str, ...], channel_fd: int, told: list[bytes]) -> Run:
    """Returns in workers alone."""
    os.set_inheritable(channel_fd, False)
    return Zygote(socket.socket(fileno=channel_fd), own_paths).serve(told)
