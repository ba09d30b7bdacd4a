"""What a process forked from the zygote does to be the worker: all that a fresh one would find. Part of the zygote.

Runs under the command's own Python, in one namespace with `zygote.py`: the standard library only.
Must not know: cycles, ranks, the agent, or why it is started.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

UNUSABLE_STATUS = 70
STDOUT, STDERR = 1, 2
_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_PR_SET_NAME = 15
_NAME_BYTES = 15
_STAT_ARG_START, _STAT_ARG_END = 48 - 3, 49 - 3  # fields of /proc/<pid>/stat after the name, from 0
_ORPHANED_SIGNAL = signal.SIGRTMIN + 8  # the kernel's word that a parent has ended; blocked, only waited for
_ORPHANED_AGAIN_S = 1.0
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_POLICIES = {b"bind": 2, b"local": 4}
_BITS = 64

if TYPE_CHECKING:
    Run = Callable[[], None]


class Command:
    """What the workers run: `script` or `module`, its name, and the words after it."""

    def __init__(self, argv: list[str], kind: str, target: str, arguments: list[str]) -> None:
        self.argv, self.kind, self.target, self.arguments = argv, kind, target, arguments


class Order:
    """One worker to be forked.

    `cpus`: numbers with commas, or empty. `memory`: `bind NODE`, `local` or empty. `changed`: NAME=value.
    """

    def __init__(self, blobs: list[bytes], fds: list[int]) -> None:
        self.cwd, self.cpus, self.memory, removed = *blobs[:3], int(blobs[3])
        self.removed, self.changed = blobs[4 : 4 + removed], blobs[4 + removed :]
        self.fds = fds  # its standard output, its standard error, its socket to the supervisor

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class Worker:
    """A process that is about to be a worker; `output`: what imports wrote, by descriptor."""

    def __init__(
        self,
        libc: ctypes.CDLL,
        own_paths: tuple[str, ...],
        supervisor_pid: int,
        name: bytes,
        command: Command,
        output: dict[int, bytes],
    ) -> None:
        self._libc, self._own_paths, self._supervisor_pid = libc, own_paths, supervisor_pid
        self._name, self._command, self._output = name, command, output

    def become(self, order: Order, midwife_pid: int) -> Run:
        """Make ready, say so, and wait for the word to begin; what to run then. Ends the process otherwise."""
        stdout_fd, stderr_fd, link_fd = order.fds
        try:
            os.setpgid(0, 0)
            self._await_supervisor(midwife_pid)
            os.chdir(order.cwd)
            self._bind(order)
            for fd, target in ((stdout_fd, STDOUT), (stderr_fd, STDERR)):
                os.dup2(fd, target)
                os.close(fd)
            for name in order.removed:
                os.environb.pop(name, None)
            for entry in order.changed:
                name, _, value = entry.partition(b"=")
                os.environb[name] = value
            self._show_command_line()
            set_name(self._libc, self._name)
            _reopen(sys.stdout, STDOUT, "<stdout>")
            _reopen(sys.stderr, STDERR, "<stderr>")
            sys.path_importer_cache.clear()  # folders are listed anew: what was added meanwhile is found
            _renew_randomness()
            run = self._command_to_run()
            os.write(link_fd, str(os.getpid()).encode() + b"\n")
            told = os.read(link_fd, 1)
        except BaseException:  # noqa: BLE001 - a worker that is not complete must not begin
            os._exit(UNUSABLE_STATUS)  # its socket falls silent, and the supervisor starts this one cold
        if not told:
            os._exit(UNUSABLE_STATUS)
        os.close(link_fd)
        for fd, output in self._output.items():
            os.write(fd, output)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        return run

    def _await_supervisor(self, midwife_pid: int) -> None:
        """Until the supervisor is the parent; from then on its death is ours."""
        self._libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(_ORPHANED_SIGNAL), 0, 0, 0)
        while os.getppid() == midwife_pid:
            signal.sigtimedwait([_ORPHANED_SIGNAL], _ORPHANED_AGAIN_S)
        signal.sigtimedwait([_ORPHANED_SIGNAL], 0)  # it may have ended before we looked: nothing is to be pending
        self._libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != self._supervisor_pid:
            os._exit(UNUSABLE_STATUS)
        # As for a cold worker: the agent may take its stack where Yama allows that to parents alone.
        with open(f"/proc/{self._supervisor_pid}/stat") as file:
            agent_pid = int(file.read().rpartition(")")[2].split()[1])
        self._libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(agent_pid), 0, 0, 0)

    def _bind(self, order: Order) -> None:
        """As taskset and numactl do before they become the command."""
        if order.cpus:
            os.sched_setaffinity(0, map(int, order.cpus.split(b",")))
        if order.memory:
            policy, _, node = order.memory.partition(b" ")
            words = (ctypes.c_ulong * (int(node) // _BITS + 1))() if node else None
            if words is not None:
                words[int(node) // _BITS] = 1 << int(node) % _BITS
            bits = ctypes.c_ulong(len(words) * _BITS + 1 if words is not None else 0)
            number = ctypes.c_long(_SET_MEMPOLICY[os.uname().machine])
            if self._libc.syscall(number, ctypes.c_int(_POLICIES[policy]), words, bits) != 0:
                raise OSError(ctypes.get_errno(), "set_mempolicy")

    def _show_command_line(self) -> None:
        """In ps; where ours was longer, empty words are left at the end."""
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[_STAT_ARG_START]), int(fields[_STAT_ARG_END])
        text = b"".join(os.fsencode(word) + b"\0" for word in self._command.argv)
        with open("/proc/self/cmdline", "rb") as file:
            shown = file.read()
        if start and len(shown) == end - start and len(text) <= len(shown) and ctypes.string_at(start, 6) == shown[:6]:
            ctypes.memmove(start, text.ljust(len(shown), b"\0"), len(shown))

    def _command_to_run(self) -> Run:
        command = self._command
        if hasattr(sys, "orig_argv"):
            sys.orig_argv[:] = command.argv
        main = sys.modules["__main__"]
        main.__dict__.pop("__warningregistry__", None)  # of the boot
        if command.kind == "module":
            import runpy

            sys.argv[:] = ["-m", *command.arguments]
            return self._guarded(lambda: runpy._run_module_as_main(command.target))  # type: ignore[attr-defined]
        sys.argv[:] = [command.target, *command.arguments]
        path = os.path.join(os.getcwd(), command.target)
        with open(path, "rb") as file:
            source = file.read()
        from importlib.machinery import SourceFileLoader

        main.__dict__.update(__file__=path, __loader__=SourceFileLoader("__main__", path))
        if sys.version_info < (3, 15):
            main.__dict__["__cached__"] = None
        return self._guarded(lambda: exec(compile(source, path, "exec", dont_inherit=True), main.__dict__))

    def _guarded(self, run: Run) -> Run:
        """The same, but whatever comes out is shown without our frames; what becomes of it is the interpreter's."""
        own = (*self._own_paths, "<string>")

        def guarded() -> None:
            try:
                run()
            except SystemExit:
                raise
            except BaseException:
                hook = sys.excepthook

                def show(kind: Any, error: BaseException, trace: Any) -> None:
                    while trace is not None and trace.tb_frame.f_code.co_filename in own:
                        trace = trace.tb_next
                    sys.last_traceback = trace
                    sys.excepthook = hook
                    hook(kind, error.with_traceback(trace), trace)

                sys.excepthook = show
                raise

        return guarded


def set_name(libc: ctypes.CDLL, name: bytes) -> None:
    libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name[:_NAME_BYTES]), 0, 0, 0)


def _reopen(stream: Any, fd: int, name: str) -> None:
    """The same object, as it would be had it been made for what the descriptor is now: others may hold it.

    On a file object of its own, as one keeps for its life whether it can be sought in: a pipe cannot.
    """
    if type(stream) is not io.TextIOWrapper:
        return
    buffer: Any = stream.buffer
    stream.flush()
    settings = {"encoding": stream.encoding, "errors": stream.errors, "newline": "\n"}
    line_buffering, write_through = stream.line_buffering, stream.write_through
    raw: Any = io.FileIO(fd, "wb", closefd=False)
    raw.name = name
    if isinstance(buffer, io.BufferedWriter):
        buffer.__init__(raw, max(raw._blksize, 2))  # type: ignore[misc]
    else:
        buffer = raw
    stream.__init__(buffer, **settings, line_buffering=line_buffering, write_through=write_through)  # type: ignore[misc]
    stream.mode = "w"  # type: ignore[misc]


def _renew_randomness() -> None:
    """What each process draws from the system when it imports; `random` does it itself at a fork."""
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process()._config["authkey"] = process.AuthenticationString(os.urandom(32))
    tempfile = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile._name_sequence = None  # type: ignore[attr-defined]
    logging = sys.modules.get("logging")
    if logging is not None:
        import time

        at = time.time_ns() if sys.version_info >= (3, 13) else time.time()
        logging._startTime = at  # type: ignore[attr-defined]
