"""`--health-check CMD`: a command of the user's that says how this node is by its exit code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nvrx.core.presence import WELL, Health, HealthReport, health_report

from ..worker_start import signal_name
from .child import Child

NAME = "health-check"
TAIL_BYTES = 4096
MAX_OUTPUT_BYTES = 256 * 1024 * 1024
"""A command that prints more than this is ended: reading it is work."""
ENDS_WITHIN_S = 1.0
_STATES = {0: Health.HEALTHY, 1: Health.DEGRADED, 2: Health.UNHEALTHY}


class CommandCheck:
    """Runs the command, one run at a time. A check that is broken itself counts as degraded, never as failed."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], within_s: float) -> None:
        self._argv = tuple(argv)
        self._env = env
        self._within_s = within_s
        self._running: Child | None = None
        self._tail = b""
        self._bytes = 0

    async def look(self) -> HealthReport:
        """One run, to its end or its time-out."""
        if self._running is not None and not self._running.ended.done():
            return _broken("an earlier run of it survives SIGKILL")
        self._tail, self._bytes = b"", 0
        try:
            self._running = Child(self._argv, self._env, self._hear)
        except OSError as error:
            return _broken(f"cannot be started: {error.strerror}")
        child = self._running
        try:
            in_time = await child.ends_within(self._within_s)
        finally:
            child.kill()
        if self._bytes > MAX_OUTPUT_BYTES:
            return _broken(f"printed more than {MAX_OUTPUT_BYTES >> 20} MiB")
        if not in_time:
            await child.ends_within(ENDS_WITHIN_S)
            return _broken(f"did not end within {self._within_s:g} s{self._last_line(': ')}")
        return self._judge(child.ended.result())

    def close(self) -> None:
        if self._running is not None:
            self._running.kill()

    def _hear(self, data: bytes) -> None:
        self._bytes += len(data)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self._bytes > MAX_OUTPUT_BYTES and self._running is not None:
            self._running.kill()

    def _last_line(self, before: str = "") -> str:
        lines = [line for line in self._tail.decode("utf-8", "replace").splitlines() if line.strip()]
        return f"{before}{lines[-1].strip()}" if lines else ""

    def _judge(self, code: int) -> HealthReport:
        state = _STATES.get(code)
        if state is Health.HEALTHY:
            return WELL
        if state is not None:
            return health_report(state, NAME, self._last_line() or f"exit code {code}")
        if code < 0:
            return _broken(f"was ended by {signal_name(-code)}{self._last_line(': ')}")
        return _broken(f"exit code {code}, which is none of 0, 1, 2{self._last_line(': ')}")


def _broken(why: str) -> HealthReport:
    return health_report(Health.DEGRADED, NAME, f"the check itself {why}")
