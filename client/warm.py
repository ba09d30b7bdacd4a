"""Keeps one zygote ready below the supervisor, and has the workers of a cycle forked from it.

Must not know: cycles, the agent's protocol, what a worker is for, or anything outside the standard library.
`now_s` is an argument, except while workers are being born. The caller reaps, and tells `on_reaped`.

A worker that was born waits for the word to begin: whoever is not known here by then never runs the command.
Whatever goes wrong, the caller starts the worker cold; nobody waits for a zygote that is not ready.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from . import zygote
from .output_pipes import Outputs
from .processes import ProcessStat, descendants, is_running, read_stat, send_signals
from .warm_binding import WarmBinding, unwrap
from .warm_command import (
    EnvironmentChange,
    NotWarm,
    WarmCommand,
    environment_change,
    read_command,
    shared_environment,
)
from .worker_start import Command, before_exec, describe_end

# After workers have started: their own start needs the processors first.
AFTER_WORKERS_S = 10.0
_OLD_AFTER_S = 3600.0
_BACKOFF_LEAST_S = 10.0
_BACKOFF_MOST_S = 600.0
_ENDED_IMPORTING_LIMIT = 3
# From the order to the last worker's word; tens of milliseconds where nothing is wrong.
_BORN_WITHIN_S = 3.0
_KILL_PASSES_LIMIT = 100
_ENDED_WITHIN_S = 5.0
_ENDED_AGAIN_S = 0.01
_READ_BYTES = 64 * 1024
_BEGIN = b"g"
_LEAST_TIMEOUT_S = 0.001  # none would mean: do not wait at all


@dataclass(frozen=True, slots=True)
class WarmWish:
    """What to be ready for: modules to have imported, and the command, environment and folder of workers."""

    modules: tuple[str, ...]
    argv: tuple[bytes, ...]
    env: Mapping[bytes, bytes]
    cwd: bytes


@dataclass(frozen=True, slots=True)
class Start:
    """A worker to be started; the outputs are open while it is."""

    command: Command
    outputs: Outputs


@dataclass(frozen=True, slots=True)
class Born:
    """A worker that is our child and waits for the word."""

    pid: int
    link: socket.socket

    def begin(self) -> None:
        with contextlib.suppress(OSError), self.link:  # it may have been killed meanwhile
            self.link.sendall(_BEGIN)


@dataclass(frozen=True, slots=True)
class _Plan:
    change: EnvironmentChange
    binding: WarmBinding


class _State(Enum):
    IMPORTING = "importing"
    READY = "ready"
    ENDING = "ending"


class Warmth:
    """`say` gets lines for people, and whether they tell of a problem. `extra_env` is the zygote's, too."""

    def __init__(
        self, selector: selectors.BaseSelector, say: Callable[[str, bool], None], extra_env: Mapping[bytes, bytes]
    ) -> None:
        self._selector = selector
        self._tell = say
        self._extra_env = dict(extra_env)
        self._sources: dict[str, str] = {}
        self._wish: WarmWish | None = None
        self._command: WarmCommand | None = None
        self._env: dict[bytes, bytes] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._incoming = bytearray()
        self._state = _State.ENDING
        self._due_s: float | None = None  # when to start one, or to replace the one that is ready
        self._backoff_s = _BACKOFF_LEAST_S
        self._said: set[str] = set()
        self._ended_importing = 0  # in a row

    # --- what the supervisor has to know

    @property
    def pid(self) -> int | None:
        """The zygote, from its start until it is reaped."""
        return self._process.pid if self._process is not None else None

    @property
    def next_step_s(self) -> float | None:
        """None while one is ending: its end is an event."""
        is_ending = self._process is not None and self._state is _State.ENDING
        return None if is_ending else self._due_s

    def spares(self, stat: ProcessStat) -> bool:
        """True for the zygote, which is no worker's; what is below it, if anything, is not to be looked at."""
        return stat.id.pid == self.pid

    def is_clean(self) -> bool:
        """Nothing runs below a zygote that may have forked. Where something does, all of it is ended; it is no for now.

        One that still imports may have helpers, as ldconfig: it has never been told to fork.
        """
        if self._state is _State.IMPORTING or self.pid is None or not any(map(is_running, descendants(self.pid))):
            return True
        if self._state is _State.READY:
            self._say("the warm process has processes below it, and is replaced")
            self._replace(time.monotonic())
        return False

    # --- its life

    def wish(self, wish: WarmWish, at_s: float) -> None:
        """Begin at `at_s`. Says in one line where this command cannot be warmed."""
        command = read_command(wish.argv)
        if isinstance(command, NotWarm):
            self._say(f"workers are not warmed: {command.reason}")
            return
        self._wish, self._command = wish, command
        self._sources = zygote.read_sources()
        self._env = shared_environment(wish.env) | self._extra_env
        self._due_s = at_s

    def step(self, now_s: float) -> None:
        """Call when `next_step_s` is due."""
        if self._due_s is None or now_s < self._due_s:
            return
        if self._process is None:
            self._due_s = None
            self._start(now_s)
        elif self._state is _State.READY:
            self._replace(now_s, after_s=0.0)

    def workers_started(self, now_s: float) -> None:
        """Their own start goes first."""
        if self._due_s is not None:
            self._due_s = max(self._due_s, now_s + AFTER_WORKERS_S)

    def on_reaped(self, wait_status: int, now_s: float) -> None:
        assert self._process is not None
        end = describe_end(wait_status)
        self._process.returncode = end.exit_code or 0  # reaped, so that Popen does not wait for it
        self._process = None
        self._hang_up()
        if self._state is _State.IMPORTING:
            self._ended_importing += 1
        if self._ended_importing == _ENDED_IMPORTING_LIMIT:
            self._say(f"workers are not warmed: the warm process ends while it imports ({end.message})")
            self._wish = self._due_s = None
        elif self._state is not _State.ENDING:
            self._say(f"the warm process ended ({end.message}); workers start cold until there is another")
            self._again_later(now_s)

    def end(self) -> None:
        """End it, and see it gone. The last act of a supervisor."""
        self._wish = self._due_s = None
        if self._process is None:
            return
        self._kill()
        deadline_s = time.monotonic() + _ENDED_WITHIN_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(self._process.pid, os.WNOHANG)[0] == 0:
                    time.sleep(_ENDED_AGAIN_S)
                    continue
            self.on_reaped(0, time.monotonic())
            return

    def _start(self, now_s: float) -> None:
        assert self._wish is not None
        assert self._command is not None
        ours, theirs = socket.socketpair()
        boot_fd = os.memfd_create("nvrx-zygote", 0)
        with theirs, open(boot_fd, "r+b", buffering=0) as boot:
            boot.write(zygote.boot_text(self._sources, theirs.fileno(), self._told()).encode("ascii"))
            boot.seek(0)
            argv = _zygote_argv(self._command, boot_fd)
            try:
                self._process = subprocess.Popen(
                    argv,
                    env=self._env,
                    cwd=self._wish.cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), boot_fd),
                    process_group=0,
                    # What a scheduler sends to a whole step is for workers; blocked, not ignored, as forks clear that.
                    preexec_fn=before_exec(os.getpid(), blocked=signal.valid_signals()),
                )
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                ours.close()
                self._say_once(f"cannot start the warm process: {error}; workers start cold")
                self._again_later(now_s)
                return
        self._state = _State.IMPORTING
        self._socket = ours
        self._incoming.clear()
        self._selector.register(ours, selectors.EVENT_READ, self._on_readable)

    def _told(self) -> list[bytes]:
        """What a zygote is told of its task."""
        assert self._wish is not None
        assert self._command is not None
        modules = ",".join(self._wish.modules).encode()
        place = str(self._command.words_before).encode()
        return [str(os.getpid()).encode(), modules, self._command.kind.encode(), place, *self._command.argv]

    def _again_later(self, now_s: float) -> None:
        self._due_s = now_s + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _BACKOFF_MOST_S)

    def _replace(self, now_s: float, after_s: float = AFTER_WORKERS_S) -> None:
        self._kill()
        self._due_s = now_s + after_s

    def _kill(self) -> None:
        """It, and whatever its imports may have started."""
        assert self._process is not None
        self._state = _State.ENDING
        self._hang_up()
        pid = self._process.pid
        seen: set[int] = set()
        for _ in range(_KILL_PASSES_LIMIT):
            found = descendants(pid)
            if (own := read_stat(pid)) is not None:
                found.append(own)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # it leads its group, and is not reaped
            for stat in found:
                send_signals(stat.id, signal.SIGKILL)
            if seen.issuperset(stat.id.pid for stat in found):
                return
            seen.update(stat.id.pid for stat in found)

    def _hang_up(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None

    # --- what it says

    def _on_readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # it is about to end, and will be reaped
            self._selector.unregister(self._socket)
            return
        self._incoming += data
        while len(self._incoming) >= 4:
            end = 4 + int.from_bytes(self._incoming[:4], "big")
            if len(self._incoming) < end:
                return
            kind, text = zygote.unpack(bytes(self._incoming[4:end]))
            del self._incoming[:end]
            self._on_said(kind, text.decode("utf-8", "replace"), time.monotonic())
            if self._socket is None:
                return

    def _on_said(self, kind: bytes, text: str, now_s: float) -> None:
        assert self._wish is not None
        if kind == b"warning":
            self._say_once(f"--prewarm: {text}")
        elif kind == b"ready":
            self._state = _State.READY
            self._ended_importing = 0
            self._backoff_s = _BACKOFF_LEAST_S
            self._due_s = now_s + _OLD_AFTER_S
            self._tell(f"the warm process is ready (pid {self.pid}; {', '.join(self._wish.modules)})", False)
        elif self._state is _State.IMPORTING:  # it would be the same the next time
            self._say(f"workers are not warmed: {text}")
            self._kill()
            self._wish = self._due_s = None
        else:
            self._say(f"the warm process is replaced: {text}")
            self._replace(now_s)

    # --- workers

    def bear(self, starts: Sequence[Start]) -> list[Born | None]:
        """Fork a worker for each; None for those to be started cold.

        Answers within seconds, whatever the zygote does. Who was born and is not returned never begins.
        """
        cold: list[Born | None] = [None] * len(starts)
        if self._wish is None:
            return cold
        if self._state is not _State.READY or self._socket is None:
            self._tell("the warm process is not ready: workers start cold", False)
            return cold
        plans = []
        for start in starts:
            plan = self._fits(start.command)
            if isinstance(plan, NotWarm):
                self._say_once(f"workers start cold: {plan.reason}")
                return cold
            plans.append(plan)
        deadline_s = time.monotonic() + _BORN_WITHIN_S
        links: list[socket.socket] = []
        try:
            for start, plan in zip(starts, plans, strict=True):
                links.append(self._order(start, plan, deadline_s))
            self._send([b"fork"], deadline_s)
            born = _await_birth(links, deadline_s)
        except OSError:  # it has ended, or is stuck: then nobody was told to fork
            _close_all(links)
            born = cold
        late = sum(one is None for one in born)
        if late:
            # Their sockets are closed by now: whoever of them comes to be ends at once. None is to hang on below.
            self._say(f"{late} of {len(born)} workers did not come from the warm process: they start cold")
            if self._state is _State.READY and not self._has_word():
                self._replace(time.monotonic())
        return born

    def _fits(self, command: Command) -> _Plan | NotWarm:
        assert self._wish is not None
        found = unwrap(command.argv)
        if found is None or found.argv != self._wish.argv:
            return NotWarm("the command is another than at the start, or behind a program that is not understood")
        if command.cwd != self._wish.cwd:
            return NotWarm("the working directory is another than at the start")
        change = environment_change(self._env, command.env)
        return change if isinstance(change, NotWarm) else _Plan(change, found.binding)

    def _order(self, start: Start, plan: _Plan, deadline_s: float) -> socket.socket:
        """The socket to a worker that is to come. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            cpus = ",".join(map(str, plan.binding.cpus)).encode()
            place = [start.command.cwd, cpus, plan.binding.memory]
            removed = plan.change.removed
            entries = [name + b"=" + value for name, value in plan.change.set]
            blobs = [b"worker", *place, str(len(removed)).encode(), *removed, *entries]
            fds = [start.outputs.stdout_fd, start.outputs.stderr_fd, theirs.fileno()]
            try:
                self._send(blobs, deadline_s, fds)
            except OSError:
                ours.close()
                raise
            return ours

    def _send(self, blobs: Sequence[bytes], deadline_s: float, fds: Sequence[int] = ()) -> None:
        """Raises OSError where it does not take it in time."""
        assert self._socket is not None
        data = memoryview(zygote.pack(blobs))
        self._socket.settimeout(max(_LEAST_TIMEOUT_S, deadline_s - time.monotonic()))
        sent = socket.send_fds(self._socket, [data], list(fds)) if fds else 0
        self._socket.sendall(data[sent:])

    def _has_word(self) -> bool:
        """Whether it has said why: then that decides what becomes of it."""
        assert self._socket is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(0))

    def _say(self, problem: str) -> None:
        self._tell(problem, True)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)


def _zygote_argv(command: WarmCommand, boot_fd: int) -> list[bytes]:
    argv = [command.interpreter, *command.options]
    least_bytes = sum(len(word) + 1 for word in command.argv) - sum(len(word) + 1 for word in argv)
    return [*argv, *zygote.boot_words(boot_fd, least_bytes)]


def _await_birth(links: Sequence[socket.socket], deadline_s: float) -> list[Born | None]:
    """Those that have said their pid, as our children; the sockets of all others are closed."""
    born: list[Born | None] = [None] * len(links)
    with selectors.DefaultSelector() as selector:
        for index, link in enumerate(links):
            selector.register(link, selectors.EVENT_READ, index)
        while selector.get_map() and (left_s := deadline_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                link = links[key.data]
                selector.unregister(link)
                born[key.data] = _born(link)
    _close_all([link for link, one in zip(links, born, strict=True) if one is None])
    return born


def _close_all(links: Sequence[socket.socket]) -> None:
    for link in links:
        link.close()


def _born(link: socket.socket) -> Born | None:
    try:
        text = link.recv(32).strip()
    except OSError:
        return None
    stat = read_stat(int(text)) if text.isdigit() else None
    if stat is None or stat.parent_pid != os.getpid():
        return None
    return Born(stat.id.pid, link)
