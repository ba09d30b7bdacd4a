"""The agent's end of its supervisor: starts it, asks it, and hands on what it tells.

Must not know: the coordinator, grpc, what a cycle is for, when to stop, or how processes are ended.
Start it before any grpc channel exists, from the main thread: the supervisor is tied to the life of the
thread that starts it. Nothing here blocks the event loop, except the one start of a process.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import nvrx

from .supervisor_channel import HEADER, MESSAGE_LIMIT_BYTES, Message, decode, encode, pack_bytes
from .worker_start import signal_name

# Isolated from the user's Python variables and site packages: it starts fast and imports what we import.
_BOOT = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from nvrx.client.supervisor import main; sys.exit(main(sys.argv[1:]))"
)
# The agent's reader waits when it is this far behind; the supervisor then keeps what it has to say.
_EVENTS_LIMIT = 4096
_HELD_BACK_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class SupervisorError(Exception):
    """The supervisor could not be started, or is gone."""


class SpawnRefused(SupervisorError):
    """No worker was started; the text says why (an older cycle is left, or a stop came first)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose workers these are, written beside them for people and for the next agent."""

    run: str
    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """`env` is the whole environment (NVRX_SUPERVISOR is added).

    Output is appended to the files, whose folder must exist. A relative program is looked up in env's PATH.
    """

    local_rank: int
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    stdout_path: str
    stderr_path: str
    # Of its lines on the agent's own streams, where there is a log process; None: not shown there.
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class SpawnedWorker:
    local_rank: int
    pid: int
    start_time_ticks: int  # with the pid, names the process for this boot
    warm: bool = False  # forked from the zygote


@dataclass(frozen=True, slots=True)
class Spawned:
    """Without the workers that could not be started: an Exited with code 126 or 127 follows for each."""

    cycle: int
    workers: tuple[SpawnedWorker, ...]


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker's own end; its children may live on. One of `exit_code` and `signal` is None."""

    cycle: int
    local_rank: int
    exit_code: int | None
    signal: int | None
    # `exit code 3`, `SIGSEGV (core dumped)`, `signal 40`, `stopped by agent (SIGTERM)`, `x: not found`
    message: str
    stopped_by_agent: bool
    time_s: float  # time.monotonic() of this machine


@dataclass(frozen=True, slots=True)
class Gone:
    """No process of the cycle is left, of any kind. Also the answer to a stop with nothing to stop."""

    cycle: int | None  # None: nothing was ever started


@dataclass(frozen=True, slots=True)
class Stuck:
    """These have been sent SIGKILL and are still there after seconds (device driver, network file system)."""

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Waiting:
    """An older supervisor with this key still ends its workers; a spawn waits until it is done."""

    holder_pid: int | None


@dataclass(frozen=True, slots=True)
class SupervisorDied:
    """Its workers died with it. Never said after `close`."""

    message: str


@dataclass(frozen=True, slots=True)
class Note:
    """One line for people, about warm workers."""

    text: str
    is_problem: bool


Event = Spawned | Exited | Gone | Stuck | Waiting | Note | SupervisorDied


class SupervisorLink:
    """Take from `events` all the time: it is bounded, and while it is full the answer to a `spawn` waits."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue(_EVENTS_LIMIT)
        self._process = process
        self._reader = reader
        self._writer = writer
        self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._spawning: asyncio.Future[Spawned] | None = None
        self._closing = False
        self._dead = False
        self._reading = asyncio.create_task(self._read(), name="supervisor link")

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(
        cls,
        runtime_dir: str | Path,
        key: str,
        identity: Identity,
        *,
        stop_grace_s: float = 15.0,
        handover_fd: int | None = None,
    ) -> "SupervisorLink":
        """Start the supervisor of `key`; returns when it answers, which may be before an older one has ended.

        `runtime_dir` is made, for this user alone. When the agent dies, workers get the smaller of
        `stop_grace_s` and 3 s.
        `handover_fd`: of a LogLink; without it workers write straight into their files.
        Raises SupervisorError when the directory cannot be used.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = _start_process(theirs.fileno(), handover_fd)
            except OSError as error:
                ours.close()
                raise SupervisorError(f"cannot start the supervisor: {error}") from error
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        link = cls(process, reader, writer)
        link._send(
            {
                "type": "hello",
                "runtime_dir": pack_bytes(runtime_dir),
                "key": key,
                "identity": asdict(identity),
                "stop_grace_s": stop_grace_s,
            }
        )
        try:
            await link._hello
        except BaseException:
            await link.close(grace_s=0.0)
            raise
        return link

    async def spawn(self, cycle: int, workers: Sequence[WorkerSpec]) -> Spawned:
        """Start the workers of a cycle. Raises SpawnRefused while anything of an older one is left.

        Waits for an older supervisor with the same key. One at a time. The answer is among the events, too.
        """
        if self._dead or self._closing:
            raise SupervisorError("the supervisor is gone")
        if self._spawning is not None:
            raise SpawnRefused("another spawn is under way")
        data = encode({"type": "spawn", "cycle": cycle, "workers": [_plain(worker) for worker in workers]})
        self._spawning = asyncio.get_running_loop().create_future()
        self._writer.write(data)
        # Shielded: when the caller is cancelled the answer still comes, and the next spawn must not take it.
        return await asyncio.shield(self._spawning)

    def prewarm(
        self, modules: Sequence[str], argv: Sequence[str], env: Mapping[str, str], cwd: str, *, after_s: float = 0.0
    ) -> None:
        """From `after_s` on keep a process ready that has imported `modules`, and fork from it workers of this command.

        Of `env` only what all workers have in common counts. Notes say what becomes of it.
        """
        self._send(
            {
                "type": "prewarm",
                "modules": list(modules),
                "argv": [pack_bytes(argument) for argument in argv],
                "env": {pack_bytes(name): pack_bytes(value) for name, value in env.items()},
                "cwd": pack_bytes(cwd),
                "after_s": after_s,
            }
        )

    def stop(self, grace_s: float) -> None:
        """SIGTERM to every process below, SIGKILL to what is left after the grace; Gone follows.

        A later stop can shorten the grace, never lengthen it.
        """
        self._send({"type": "stop", "grace_s": grace_s})

    def kill(self) -> None:
        self._send({"type": "kill"})

    def signal(self, signo: int) -> None:
        """Hand a signal on to those workers that handle it (not to their children)."""
        self._send({"type": "signal", "signo": int(signo)})

    def hand_outputs_over_again(self) -> None:
        """There is a new log process."""
        self._send({"type": "hand over again"})

    async def close(self, *, grace_s: float = 3.0) -> None:
        """End the supervisor, and before it whatever still runs; returns when both are gone."""
        self._closing = True
        self._send({"type": "close", "grace_s": grace_s})
        await asyncio.shield(self._reading)  # a cancelled close still hears the end

    # --- below

    def _send(self, message: Message) -> None:
        if not self._dead:
            self._writer.write(encode(message))

    async def _read(self) -> None:
        try:
            while True:
                (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if length > MESSAGE_LIMIT_BYTES:
                    break
                await self._take(decode(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            pass  # its end; what kind of end, its exit status says
        await self._on_end()

    async def _take(self, message: Message) -> None:
        match message["type"]:
            case "hello":
                if not self._hello.done():
                    self._hello.set_result(None)
                return
            case "failed":
                self._fail(SupervisorError(message["message"]))
                return
            case "refused":
                self._fail_spawn(SpawnRefused(message["message"]))
                return
        event = _event(message)
        if isinstance(event, Spawned) and self._spawning is not None:
            if not self._spawning.done():
                self._spawning.set_result(event)
            self._spawning = None
        await self.events.put(event)

    def _fail(self, error: SupervisorError) -> None:
        if not self._hello.done():
            self._hello.set_exception(error)
        self._fail_spawn(error)

    def _fail_spawn(self, error: SupervisorError) -> None:
        if self._spawning is not None and not self._spawning.done():
            self._spawning.set_exception(error)
            self._spawning.exception()  # the caller may have been cancelled: then nobody asks for it
        self._spawning = None

    async def _on_end(self) -> None:
        self._dead = True
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
        # It has closed its socket and is about to be gone; a thread waits for that, not the loop.
        code = await asyncio.to_thread(self._process.wait)
        how = f"exit code {code}" if code >= 0 else signal_name(-code)
        self._fail(SupervisorError(f"the supervisor ended: {how}"))
        if not self._closing:
            await self.events.put(SupervisorDied(how))


def _start_process(fd: int, handover_fd: int | None) -> subprocess.Popen[bytes]:
    # Held back until it ignores them itself: a signal to the whole step must not end it half-started.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK_SIGNALS)
    try:
        return subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", "-X", "utf8", "-c", _BOOT),
                *(str(import_root()), str(fd), str(os.getpid())),
                str(handover_fd) if handover_fd is not None else "-",
            ],
            pass_fds=(fd, handover_fd) if handover_fd is not None else (fd,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # its standard error is the agent's: there it says why it crashed
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def import_root() -> Path:
    """The directory that `nvrx` was imported from: what we start must be of the same version."""
    assert nvrx.__file__ is not None
    return Path(nvrx.__file__).parent.parent


def _plain(worker: WorkerSpec) -> Message:
    if not worker.argv:
        raise ValueError(f"the worker of local rank {worker.local_rank} has no command")
    return {
        "local_rank": worker.local_rank,
        "argv": [pack_bytes(argument) for argument in worker.argv],
        "env": {pack_bytes(name): pack_bytes(value) for name, value in worker.env.items()},
        "cwd": pack_bytes(worker.cwd),
        "stdout": pack_bytes(worker.stdout_path),
        "stderr": pack_bytes(worker.stderr_path),
        "prefix": pack_bytes(worker.prefix) if worker.prefix is not None else None,
    }


def _event(message: Message) -> Event:
    fields = {name: value for name, value in message.items() if name != "type"}
    match message["type"]:
        case "spawned":
            workers = tuple(SpawnedWorker(**worker) for worker in fields["workers"])
            return Spawned(fields["cycle"], workers)
        case "exited":
            return Exited(**fields)
        case "gone":
            return Gone(**fields)
        case "stuck":
            return Stuck(tuple(fields["pids"]))
        case "waiting":
            return Waiting(fields["pid"])
        case "note":
            return Note(**fields)
        case other:
            raise AssertionError(f"the supervisor sent {other!r}")
