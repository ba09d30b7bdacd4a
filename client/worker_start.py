"""Starts one worker so that it is the command itself: its pid, its signals, its exit code; and words an end.

Must not know: cycles, the agent, the protocol, asyncio, or anything outside the standard library.
Only for a single-threaded process (the supervisor): code runs between fork and exec.
"""

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .output_pipes import Outputs
from .processes import allow_debugging_by, set_parent_death_signal

# What a shell answers for a command it cannot find, or cannot run.
_NOT_FOUND = 127
NOT_RUNNABLE = 126
_DESCRIPTORS = resource.getrlimit(resource.RLIMIT_NOFILE)
"""How many this process was given, and workers are to have."""


@dataclass(frozen=True, slots=True)
class Command:
    argv: list[bytes]
    env: dict[bytes, bytes]
    cwd: bytes


@dataclass(frozen=True, slots=True)
class NotStarted:
    exit_code: int
    message: str


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: one of `exit_code` and `signal` is None."""

    exit_code: int | None
    signal: int | None
    message: str


def start_worker(command: Command, outputs: Outputs) -> subprocess.Popen[bytes] | NotStarted:
    """Start it in a process group of its own, with these outputs."""
    try:
        return subprocess.Popen(
            command.argv,
            env=command.env,
            cwd=command.cwd,
            stdin=subprocess.DEVNULL,
            stdout=outputs.stdout_fd,
            stderr=outputs.stderr_fd,
            close_fds=True,
            process_group=0,
            preexec_fn=before_exec(os.getpid()),
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return _not_started(command, error)


def before_exec(supervisor_pid: int, blocked: Iterable[int] = ()) -> Callable[[], None]:
    """For a child of the supervisor: to die with it, and to have the signal settings and limits of a fresh process."""
    # Exec resets what has a handler; an ignored signal (as what a terminal sends, here) would stay ignored.
    ignored = [signo for signo in signal.valid_signals() if signal.getsignal(signo) is signal.SIG_IGN]
    agent_pid = os.getppid()

    def prepare() -> None:
        set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != supervisor_pid:  # it died before we asked to be told
            os._exit(NOT_RUNNABLE)
        allow_debugging_by(agent_pid)  # py-spy, which the agent starts when a worker hangs, is no parent of it
        resource.setrlimit(resource.RLIMIT_NOFILE, _DESCRIPTORS)
        for signo in ignored:
            signal.signal(signo, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)

    return prepare


def _not_started(command: Command, error: Exception) -> NotStarted:
    program = os.fsdecode(command.argv[0]) if command.argv else "the command"
    if not isinstance(error, OSError) or error.errno is None:
        return NotStarted(NOT_RUNNABLE, f"{program}: {error}")
    if not os.path.isdir(command.cwd):
        return NotStarted(NOT_RUNNABLE, f"working directory {os.fsdecode(command.cwd)}: not found")
    match error.errno:
        case errno.ENOENT if os.path.exists(os.path.join(command.cwd, command.argv[0])):
            return NotStarted(_NOT_FOUND, f"{program}: the interpreter that it names is not found")
        case errno.ENOENT | errno.ENOTDIR:
            return NotStarted(_NOT_FOUND, f"{program}: not found")
        case errno.EACCES:
            return NotStarted(NOT_RUNNABLE, f"{program}: permission denied")
        case number:
            return NotStarted(NOT_RUNNABLE, f"{program}: {os.strerror(number)}")


def describe_end(wait_status: int) -> Ended:
    """From what `waitpid` returns."""
    code = os.waitstatus_to_exitcode(wait_status)
    if code >= 0:
        return Ended(exit_code=code, signal=None, message=f"exit code {code}")
    core = " (core dumped)" if os.WCOREDUMP(wait_status) else ""
    return Ended(exit_code=None, signal=-code, message=f"{signal_name(-code)}{core}")


def signal_name(signo: int) -> str:
    """`SIGSEGV`, or `signal 40`: real-time signals have no names."""
    try:
        return signal.Signals(signo).name
    except ValueError:
        return f"signal {signo}"
