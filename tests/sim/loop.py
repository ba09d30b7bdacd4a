"""An asyncio loop whose time is simulated: it never sleeps, its clock jumps to the next timer.

What the engine hands to threads (its journal) is run in the loop as a disk job that takes simulated time. Knows no
node, no coordinator and no rule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

CLOCK_RESOLUTION_S = 1e-9
TURN_S = 1e-6
"""What one turn of the loop takes: code that asks the clock twice sees it go on, as it does on a real machine."""
MAX_IDLE_TURNS = 20_000
"""Turns of the loop without a wait: somebody spins."""


class Spinning(Exception):
    """Tasks wake each other for ever."""


class NothingToDo(Exception):
    """Every task waits, and no timer will ever ring."""


class _Clockwork:
    """In place of a selector: waiting for files is letting time pass."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._idle_turns = 0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise NothingToDo("every task waits and no timer is set")
        self.now_s += max(timeout, TURN_S)
        if timeout > TURN_S:
            self._idle_turns = 0
        else:
            self._idle_turns += 1
            if self._idle_turns > MAX_IDLE_TURNS:
                self._idle_turns = 0
                raise Spinning(f"{MAX_IDLE_TURNS} turns of the loop without a wait, at {self.now_s:.3f} s")
        return []

    def close(self) -> None:
        pass


PROCESS: ContextVar[object | None] = ContextVar("process", default=None)
"""Whose code runs: set for what may be suspended as one."""


class DiskJob:
    """One call of the disk that is under way."""

    def __init__(self, call: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        self._call = call
        self._answer = answer
        self.timer: asyncio.TimerHandle | None = None

    def work(self) -> None:
        try:
            result = self._call()
        except Exception as error:  # noqa: BLE001  # handed to whoever waits, as an executor does
            if not self._answer.cancelled():
                self._answer.set_exception(error)
        else:
            if not self._answer.cancelled():
                self._answer.set_result(result)


class _Gate:
    """A callback of a process that may be suspended."""

    def __init__(self, loop: SimulatedLoop, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._loop = loop
        self._callback = callback
        self._args = args
        self._context: Context | None = None
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        if self._loop.puts_off(self):
            self._context = copy_context()
        else:
            self._callback(*self._args)

    def run_late(self) -> None:
        assert self.handle is not None
        if not self.handle.cancelled():
            self._loop.call_soon(self._again, context=self._context)

    def _again(self) -> None:
        assert self.handle is not None
        if not self.handle.cancelled():
            self._callback(*self._args)


class SimulatedLoop(asyncio.BaseEventLoop):
    """Deterministic: the same calls in the same order have the same course."""

    def __init__(self, disk_delay_s: Callable[[], float]) -> None:
        super().__init__()
        self._clockwork = _Clockwork()
        self._selector = self._clockwork
        self._clock_resolution = CLOCK_RESOLUTION_S
        self._disk_delay_s = disk_delay_s
        self._jobs: list[DiskJob] = []
        self._suspended: object | None = None
        self._put_off: list[_Gate] = []
        self.on_error: Callable[[str], None] = lambda _: None
        self.set_exception_handler(self._note_error)

    def time(self) -> float:
        return self._clockwork.now_s

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    # ---- suspending a process ---------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]  # typeshed binds the types of callback and args together
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if self._process_of(context) is None:
            return super().call_soon(callback, *args, context=context)
        gate = _Gate(self, callback, args)
        gate.handle = super().call_soon(gate, context=context)
        return gate.handle

    def call_at(  # type: ignore[override]  # as above
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self._process_of(context) is None:
            return super().call_at(when, callback, *args, context=context)
        gate = _Gate(self, callback, args)
        gate.handle = handle = super().call_at(when, gate, context=context)
        return handle

    def _process_of(self, context: Context | None) -> object | None:
        return PROCESS.get() if context is None else context.get(PROCESS)

    @property
    def is_suspended(self) -> bool:
        return self._suspended is not None

    def suspend(self, process: object) -> None:
        """SIGSTOP: nothing of a process runs, whatever becomes due."""
        self._suspended = process

    def resume(self, process: object) -> None:
        """SIGCONT: what had become due runs now, in its order."""
        if self._suspended is not process:
            return
        self._suspended = None
        gates, self._put_off = self._put_off, []
        for gate in gates:
            gate.run_late()

    def puts_off(self, gate: _Gate) -> bool:
        """Whether a callback that is due now has to wait, because its process is suspended."""
        if self._suspended is None or PROCESS.get() is not self._suspended:
            return False
        self._put_off.append(gate)
        return True

    # ---- the disk ---------------------------------------------------------------------------------------

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """A call that would block: done at once, after the disk's delay."""
        answer: asyncio.Future[Any] = self.create_future()
        job = DiskJob(lambda: func(*args), answer)
        self._jobs.append(job)
        job.timer = self.call_later(self._disk_delay_s(), self._finish, job)
        return answer

    def _finish(self, job: DiskJob) -> None:
        self._jobs.remove(job)
        job.work()

    def end_disk_jobs(self, *, keep: bool) -> None:
        """The process that asked for them dies: what is under way is done now, entirely, or never."""
        for job in self._jobs:
            assert job.timer is not None
            job.timer.cancel()
            if keep:
                job.work()
        self._jobs.clear()

    def watched(self, work: Coroutine[Any, Any, Any], name: str, context: Context | None = None) -> asyncio.Task[Any]:
        """A task whose failure is noted at once: nobody else looks at it."""
        task = self.create_task(work, name=name, context=context)
        task.add_done_callback(self._look_at)
        return task

    def _look_at(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._note_error(self, {"message": f"task {task.get_name()} failed", "exception": error})

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.on_error(f"{context['message']}: {context.get('exception')!r}")


def simulated_loop() -> SimulatedLoop:
    """The loop that runs."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    return loop
