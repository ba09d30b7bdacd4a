"""Linux processes as facts and acts: /proc, prctl, and signals sent to exactly the process that was seen.

Must not know: workers, cycles, the agent, clocks, or anything outside the standard library (the supervisor
imports this, and has to start fast and stay small).
"""

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Sent by the kernel when the agent ends: the socket says so too, unless a forked child of the agent holds it.
_AGENT_DIED_SIGNAL = signal.SIGRTMIN + 7
# A batch scheduler signals every process of a step, us too. What becomes of it is the agent's to decide.
_IGNORED_SIGNALS = (
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGTERM,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGPIPE,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
)

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61

# Loaded once, before any fork: a child between fork and exec must not open libraries.
_libc = ctypes.CDLL(None, use_errno=True)

# What reading /proc raises when a process ends under our eyes.
_ENDED = (FileNotFoundError, ProcessLookupError)


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One life of a pid: the number alone may come to mean another process."""

    pid: int
    start_time_ticks: int  # since boot, in clock ticks (field 22 of /proc/<pid>/stat)


@dataclass(frozen=True, slots=True)
class ProcessStat:
    id: ProcessId
    state: str  # one letter, as in ps
    parent_pid: int
    group_id: int
    session_id: int


def _prctl(option: int, argument: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"prctl({option}, {argument}): {os.strerror(errno)}")


def become_subreaper(wanted: bool = True) -> None:
    """Orphans below this process come to it, not to init: `waitpid` then knows whether any is left."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(wanted))


def set_parent_death_signal(signo: int) -> None:
    """Be sent `signo` when the thread that started this process ends."""
    _prctl(_PR_SET_PDEATHSIG, signo)


def begin_beside_agent(name: str, *woken_by: int) -> tuple[int, int]:
    """For a program that the agent starts beside itself, with signals blocked so that none ends it before this.

    It lives through what is sent to a whole step. Its wake-up pipe, read and write end, has a byte for each of
    `woken_by` and for the agent's death.
    """
    for signo in _IGNORED_SIGNALS:
        signal.signal(signo, signal.SIG_IGN)
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    for handled in (*woken_by, _AGENT_DIED_SIGNAL):
        signal.signal(handled, lambda _signo, _frame: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    set_process_name(name)
    set_parent_death_signal(_AGENT_DIED_SIGNAL)
    return read_fd, write_fd


def take_more_descriptors() -> None:
    """For this process: the soft limit is often too low for the pipes of many workers."""
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def allow_debugging_by(pid: int) -> None:
    """Let a process and those below it read this one's memory where Yama allows that to parents alone."""
    with contextlib.suppress(OSError):  # a kernel without Yama does not ask
        _prctl(_PR_SET_PTRACER, pid)


def set_process_name(name: str) -> None:
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)


def read_stat(pid: int) -> ProcessStat | None:
    """None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except _ENDED:
        return None
    # The name in parentheses may itself hold blanks and parentheses.
    fields = text.rpartition(b")")[2].split()
    return ProcessStat(
        id=ProcessId(pid, int(fields[19])),
        state=fields[0].decode(),
        parent_pid=int(fields[1]),
        group_id=int(fields[2]),
        session_id=int(fields[3]),
    )


def all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def is_running(stat: ProcessStat) -> bool:
    """False for a zombie, unless only its first thread has ended."""
    if stat.state not in "ZX":
        return True
    try:
        return len(os.listdir(f"/proc/{stat.id.pid}/task")) > 1
    except _ENDED:
        return False


def _children_from_kernel(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(*_ENDED):
        for thread_id in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(*_ENDED), open(f"/proc/{pid}/task/{thread_id}/children", "rb") as file:
                children.extend(map(int, file.read().split()))
    return children


def _children_from_scan() -> Callable[[int], list[int]]:
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        if (stat := read_stat(pid)) is not None:
            children.setdefault(stat.parent_pid, []).append(pid)
    return lambda pid: children.get(pid, [])


# Kernels built without CONFIG_PROC_CHILDREN have no such file; then all of /proc is read.
HAS_CHILDREN_FILE = os.path.exists(f"/proc/self/task/{os.getpid()}/children")


def children(pid: int) -> list[int]:
    """Those that `pid` has not reaped. Of our own none is missed, but for those added meanwhile: a process with
    one thread takes none away while it looks."""
    return _children_from_kernel(pid) if HAS_CHILDREN_FILE else _children_from_scan()(pid)


def descendants(
    root_pid: int,
    below: Callable[[ProcessStat], bool] = lambda _: True,
    has_children_file: bool = HAS_CHILDREN_FILE,
) -> list[ProcessStat]:
    """All processes below `root_pid`, parents first; none below those for which `below` is false.

    A snapshot of a moving thing: what forks or ends meanwhile may be missed, so callers that need
    certainty repeat it until `waitpid` says that none is left.
    """
    children_of = _children_from_kernel if has_children_file else _children_from_scan()
    found: dict[int, ProcessStat] = {}
    parents = [root_pid]
    while parents:
        parent = parents.pop(0)
        for pid in children_of(parent):
            stat = read_stat(pid)
            # The pid may have passed to a stranger since it was listed: its parent says so.
            if stat is None or pid in found or stat.parent_pid not in (parent, root_pid):
                continue
            found[pid] = stat
            if below(stat):
                parents.append(pid)
    return list(found.values())


def _open_handle(pid: int) -> int | None:
    """None where the kernel (before 5.3), a sandbox or a full descriptor table refuses one."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def send_signals(target: ProcessId, *signos: int, open_handle: Callable[[int], int | None] = _open_handle) -> bool:
    """Send to this very process, never to one that took over its pid. False when it is gone or not ours."""
    if target.pid <= 1 or target.pid == os.getpid():
        raise AssertionError(f"refusing to signal pid {target.pid}")
    handle = open_handle(target.pid)
    try:
        # The handle is pinned to one process; the start time says that it is the one that was seen.
        # Without a handle a pid would have to go round within microseconds.
        stat = read_stat(target.pid)
        if stat is None or stat.id != target:
            return False
        for signo in signos:
            if handle is None:
                os.kill(target.pid, signo)
            else:
                signal.pidfd_send_signal(handle, signo)
    except (ProcessLookupError, PermissionError):  # ended, or became another user's (setuid)
        return False
    finally:
        if handle is not None:
            os.close(handle)
    return True


def handles_signal(pid: int, signo: int) -> bool:
    """True when the process has a handler of its own (neither default nor ignored)."""
    with contextlib.suppress(*_ENDED), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signo - 1) & 1)
    return False


def environment_has(pid: int, entry: bytes) -> bool:
    """True when the process was started with this `NAME=value` in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return entry in file.read().split(b"\0")
    except (*_ENDED, PermissionError):
        return False


def pid_space() -> str:
    """Names what pids and start times here are relative to: this boot and this pid namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
