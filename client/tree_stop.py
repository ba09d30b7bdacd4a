"""Ends every process below this one: SIGTERM, a grace, then SIGKILL until none is left.

Must not know: workers, cycles, the agent, sockets. It does not reap; `now_s` is an argument.
Whether any process is left is known to the caller alone: it is a subreaper, and `waitpid` says so.
"""

import contextlib
import os
import signal
from collections.abc import Callable

from .processes import ProcessId, ProcessStat, descendants, send_signals

# There is no event for an orphan that comes to us from below a process that was not our child, nor for a
# fork under SIGKILL; so while (and only while) a stop is under way the tree is looked at again, besides at
# each exit.
_TERM_AGAIN_S = 0.5
_KILL_AGAIN_S = 0.1
# Against processes that fork as fast as they are killed, within one step.
_KILL_PASSES_LIMIT = 100
_STUCK_AFTER_S = 3.0
_STUCK_AGAIN_S = 5.0


class TreeStop:
    """`spares` is true for a process that is not to be touched, nor what is below it."""

    def __init__(self, now_s: float, grace_s: float, spares: Callable[[ProcessStat], bool] = lambda _: False) -> None:
        self._spares = spares
        self._deadline_s = now_s + grace_s
        self._told: set[ProcessId] = set()
        self._killed_at_s: dict[ProcessId, float] = {}
        self._stuck_said_s: float | None = None
        self.next_step_s = now_s

    def shorten(self, now_s: float, grace_s: float) -> None:
        """A later stop can only bring the end nearer."""
        self._deadline_s = min(self._deadline_s, now_s + grace_s)
        self.next_step_s = now_s

    def has_signalled(self, id: ProcessId) -> bool:
        return id in self._told or id in self._killed_at_s

    def step(self, now_s: float) -> list[int]:
        """Call when a child has ended and when `next_step_s` is due. Returns pids that survive SIGKILL."""
        if now_s < self._deadline_s:
            self._terminate()
            self.next_step_s = min(now_s + _TERM_AGAIN_S, self._deadline_s)
            return []
        self._kill(now_s)
        self.next_step_s = now_s + _KILL_AGAIN_S
        return self._stuck(now_s)

    def _tree(self, below: Callable[[ProcessStat], bool] = lambda _: True) -> list[ProcessStat]:
        found = descendants(os.getpid(), below=lambda stat: not self._spares(stat) and below(stat))
        return [stat for stat in found if not self._spares(stat)]

    def _terminate(self) -> None:
        """Tell each process once.

        A process begun later by one that has been told is its answer to SIGTERM (a shell's trap that copies
        the checkpoint away): it is left to finish, and told only when that parent is gone.
        """
        told = frozenset(self._told)
        for stat in self._tree(below=lambda stat: stat.id not in told):
            if stat.id not in told:
                # SIGCONT second, so that a stopped process wakes up to the SIGTERM.
                send_signals(stat.id, signal.SIGTERM, signal.SIGCONT)
                self._told.add(stat.id)

    def _kill(self, now_s: float) -> None:
        own_pid, own_group = os.getpid(), os.getpgid(0)
        leads_session = os.getsid(0) == own_pid
        for number in range(_KILL_PASSES_LIMIT):
            found_new = False
            for stat in self._tree():
                if stat.id in self._killed_at_s and number > 0:
                    continue
                found_new = found_new or stat.id not in self._killed_at_s
                self._killed_at_s.setdefault(stat.id, now_s)
                # A group is killed in one go, which no fork escapes (one by one, a program that only forks
                # and exits was seen to live on for 9 s; so, for 3 ms). Its number cannot have passed to
                # strangers: a child of ours that is not reaped is in it; and every session below ours was
                # begun by a descendant, so all its members are descendants too.
                if leads_session and stat.parent_pid == own_pid and stat.group_id not in (0, 1, own_group):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(stat.group_id, signal.SIGKILL)
                send_signals(stat.id, signal.SIGKILL)
            if not found_new:
                return

    def _stuck(self, now_s: float) -> list[int]:
        if self._stuck_said_s is not None and now_s - self._stuck_said_s < _STUCK_AGAIN_S:
            return []
        left = {stat.id for stat in self._tree()}
        pids = sorted(id.pid for id, at_s in self._killed_at_s.items() if id in left and now_s - at_s >= _STUCK_AFTER_S)
        if pids:
            self._stuck_said_s = now_s
        return pids
