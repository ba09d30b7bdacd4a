"""The process between an agent and its workers: starts them, sees their end at once, ends the tree below.

One per life of an agent. Single-threaded, so that code may run between fork and exec; a child subreaper, so
that nothing below can leave it; in a session of its own, so that a terminal's Ctrl-C reaches the agent alone.
When the agent dies, everything here ends within seconds. When this process dies, its workers die with it.

Must not know: the coordinator, grpc, asyncio, what a worker is for, or when to start or stop anything: the
agent decides. Imports only its siblings and the standard library. Driven by events (the socket, SIGCHLD);
timers run only while something is being waited for that has no event.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from . import processes
from .output_pipes import OutputFiles, OutputPipes
from .supervisor_channel import Channel, ChannelClosed, Message, unpack_bytes
from .supervisor_record import MARKER_NAME, Record, RecordError, RunningWorker, marker
from .tree_stop import TreeStop
from .warm import Born, Start, Warmth, WarmWish
from .worker_start import NOT_RUNNABLE, Command, Ended, NotStarted, describe_end, start_worker

# What is left of the grace when the agent is gone: all must have ended 5 s after it.
_ORPHANED_GRACE_S = 3.0
# flock has no event, and processes that are not our children end without one.
_TAKE_OVER_AGAIN_S = 0.1
_STUCK_AFTER_S = 3.0
_EMERGENCY_S = 5.0
_CRASHED = 70  # EX_SOFTWARE


@dataclass(slots=True)
class _Worker:
    running: RunningWorker
    cycle: int
    process: subprocess.Popen[bytes] | None  # None: born warm


class Supervisor:
    def __init__(self, channel: Channel, agent_pid: int, wakeup_fd: int, pipes: OutputPipes) -> None:
        self._channel = channel
        self._pipes = pipes
        self._pipes_watched = False
        self._agent_pid = agent_pid
        self._wakeup_fd = wakeup_fd
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ, self._on_channel)
        self._selector.register(wakeup_fd, selectors.EVENT_READ, self._on_wakeup)
        own = processes.read_stat(os.getpid())
        assert own is not None
        self._marker = marker(own.id).partition(b"=")[2]
        self._warmth = Warmth(self._selector, self._note, {MARKER_NAME.encode(): self._marker})
        self._grace_s = _ORPHANED_GRACE_S
        self._agent_alive = True
        self._closing = False
        # Taking over from an older supervisor with the same key.
        self._record: Record | None = None
        self._locked = False
        self._ready = False
        self._take_over_at_s: float | None = None
        self._wait_said = False
        self._leftovers_since_s: float | None = None
        self._leftovers_said = False
        self._waiting_spawn: Message | None = None
        self._record_failed = False
        # What runs.
        self._cycle: int | None = None
        self._workers: dict[int, _Worker] = {}
        self._any_left = False
        self._stop: TreeStop | None = None
        self._handlers: dict[str, Callable[[Message], None]] = {
            "hello": self._on_hello,
            "spawn": self._on_spawn,
            "stop": lambda message: self._begin_stop(float(message["grace_s"])),
            "kill": lambda _: self._begin_stop(0.0),
            "signal": self._on_signal,
            "prewarm": self._on_prewarm,
            "close": self._on_close,
            "hand over again": lambda _: self._pipes.hand_over_again(),
        }

    def run(self) -> None:
        """Until the agent closes or dies, and nothing is left."""
        self._notice_agent_death()  # it may have died before we asked the kernel to tell
        while self._any_left or not self._closing:
            for key, _ in self._selector.select(self._timeout_s()):
                key.data()
            self._notice_agent_death()
            ended = self._reap()
            now_s = time.monotonic()
            if self._stop is not None and (ended or now_s >= self._stop.next_step_s):
                self._say_stuck(self._stop.step(now_s))
            if self._take_over_at_s is not None and now_s >= self._take_over_at_s:
                self._take_over(now_s)
            if self._may_warm:
                self._warmth.step(now_s)
            self._watch_unsent()
        self._warmth.end()
        if self._record is not None and self._locked:
            self._record.forget()
        self._channel.close()

    def end_everything(self) -> None:
        """The last act after a bug: leave no process behind, if at all possible within seconds."""
        deadline_s = time.monotonic() + _EMERGENCY_S
        stop = TreeStop(time.monotonic(), 0.0)
        while time.monotonic() < deadline_s:
            stop.step(time.monotonic())
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(_TAKE_OVER_AGAIN_S)

    # --- events

    def _timeout_s(self) -> float | None:
        due = [self._take_over_at_s] if self._take_over_at_s is not None else []
        if self._stop is not None:
            due.append(self._stop.next_step_s)
        if self._may_warm and self._warmth.next_step_s is not None:
            due.append(self._warmth.next_step_s)
        return max(0.0, min(due) - time.monotonic()) if due else None

    @property
    def _may_warm(self) -> bool:
        """Not while others are to end, nor before those of an earlier agent have."""
        return self._ready and self._stop is None and not self._closing

    def _on_wakeup(self) -> None:
        try:
            while os.read(self._wakeup_fd, 4096):
                pass
        except BlockingIOError:
            return

    def _on_channel(self) -> None:
        self._channel.flush()
        try:
            for message in self._channel.receive():
                # What has ended has ended by itself, and there may be room: look before acting.
                self._reap()
                self._handlers[message["type"]](message)
        except ChannelClosed:
            self._on_agent_gone()

    def _watch_unsent(self) -> None:
        if self._pipes.has_unsent and not self._pipes_watched:
            self._selector.register(self._pipes, selectors.EVENT_WRITE, self._pipes.flush)
        elif self._pipes_watched and not self._pipes.has_unsent:
            self._selector.unregister(self._pipes)
        self._pipes_watched = self._pipes.has_unsent
        if self._agent_alive:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._channel.has_unsent else 0)
            self._selector.modify(self._channel, events, self._on_channel)

    def _notice_agent_death(self) -> None:
        if os.getppid() != self._agent_pid:
            self._on_agent_gone()

    def _on_agent_gone(self) -> None:
        if not self._agent_alive:
            return
        self._agent_alive = False
        self._selector.unregister(self._channel)
        self._close_with(min(self._grace_s, _ORPHANED_GRACE_S))

    def _send(self, type: str, **fields: object) -> None:
        if self._agent_alive:
            self._channel.send({"type": type, **fields})

    # --- taking over

    def _on_hello(self, message: Message) -> None:
        self._grace_s = float(message["stop_grace_s"])
        try:
            self._record = Record(unpack_bytes(message["runtime_dir"]), message["key"], message["identity"])
            self._take_over(time.monotonic())
        except RecordError as error:
            self._send("failed", message=str(error))
            self._close_with(0.0)
            return
        self._send("hello")

    def _take_over(self, now_s: float) -> None:
        """Get the lock, then see the last of what its former holder left, then be ready to start workers."""
        assert self._record is not None
        self._take_over_at_s = now_s + _TAKE_OVER_AGAIN_S
        if not self._locked:
            self._locked = self._record.try_lock()
        if not self._locked:
            if not self._wait_said:
                self._wait_said = True
                self._send("waiting", pid=self._record.holder_pid())
            return
        left = self._record.kill_leftovers()
        if left:
            if self._leftovers_since_s is None:
                self._leftovers_since_s = now_s
            if now_s - self._leftovers_since_s >= _STUCK_AFTER_S and not self._leftovers_said:
                self._leftovers_said = True
                self._say_stuck(left)
            return
        self._take_over_at_s = None
        self._ready = True
        self._write_record()
        if self._waiting_spawn is not None:
            message, self._waiting_spawn = self._waiting_spawn, None
            self._on_spawn(message)

    def _write_record(self) -> None:
        assert self._record is not None
        try:
            self._record.write(self._cycle, (worker.running for worker in self._workers.values()))
        except OSError as error:
            # A full disk stops no training: the record is the second line, after the parent-death signal.
            if not self._record_failed:
                self._record_failed = True
                print(f"nvrx supervisor: cannot record the running workers: {error}", file=sys.stderr)

    # --- starting

    def _on_spawn(self, message: Message) -> None:
        cycle = int(message["cycle"])
        if self._closing or self._record is None:
            self._send("refused", cycle=cycle, message="the supervisor is closing or was never greeted")
        elif self._any_left:
            left = [stat.id.pid for stat in processes.descendants(os.getpid()) if not self._warmth.spares(stat)]
            reason = f"processes of cycle {self._cycle} are left: {left}"
            self._send("refused", cycle=cycle, message=reason)
        elif not self._ready:
            self._waiting_spawn = message
        else:
            self._spawn(cycle, message)

    def _spawn(self, cycle: int, message: Message) -> None:
        self._cycle = cycle
        self._stop = None
        self._any_left = True  # until waitpid says otherwise: also when no worker could be started
        failed: list[tuple[int, NotStarted]] = []
        with contextlib.ExitStack() as files:
            starts: dict[int, Start] = {}
            for plain in message["workers"]:
                local_rank = int(plain["local_rank"])
                try:
                    outputs = files.enter_context(self._pipes.open(_output_files(plain)))
                except OSError as error:
                    why = f"cannot open an output of the worker: {error}"
                    failed.append((local_rank, NotStarted(NOT_RUNNABLE, why)))
                else:
                    starts[local_rank] = Start(self._command(plain), outputs)
            born = self._warmth.bear(list(starts.values()))
            for (local_rank, start), warm in zip(starts.items(), born, strict=True):
                process = warm or start_worker(start.command, start.outputs)
                if isinstance(process, NotStarted):
                    failed.append((local_rank, process))
                    continue
                stat = processes.read_stat(process.pid)
                assert stat is not None  # it is our child, and not reaped yet
                cold = None if isinstance(process, Born) else process
                self._workers[process.pid] = _Worker(RunningWorker(local_rank, stat.id), cycle, cold)
        self._write_record()
        for warm in filter(None, born):
            warm.begin()
        self._warmth.workers_started(time.monotonic())
        self._send(
            "spawned",
            cycle=cycle,
            workers=[
                {
                    "local_rank": worker.running.local_rank,
                    "pid": worker.running.id.pid,
                    "start_time_ticks": worker.running.id.start_time_ticks,
                    "warm": worker.process is None,
                }
                for worker in self._workers.values()
            ],
        )
        for local_rank, reason in failed:
            end = Ended(reason.exit_code, None, reason.message)
            self._say_exited(cycle, local_rank, end, by_agent=False)

    def _command(self, plain: Message) -> Command:
        env = {unpack_bytes(name): unpack_bytes(value) for name, value in plain["env"].items()}
        env[MARKER_NAME.encode()] = self._marker
        return Command(
            argv=[unpack_bytes(argument) for argument in plain["argv"]],
            env=env,
            cwd=unpack_bytes(plain["cwd"]),
        )

    def _on_prewarm(self, message: Message) -> None:
        wish = WarmWish(
            modules=tuple(message["modules"]),
            argv=tuple(unpack_bytes(argument) for argument in message["argv"]),
            env={unpack_bytes(name): unpack_bytes(value) for name, value in message["env"].items()},
            cwd=unpack_bytes(message["cwd"]),
        )
        self._warmth.wish(wish, time.monotonic() + float(message["after_s"]))

    def _on_signal(self, message: Message) -> None:
        """Only to workers that handle it: the default action of most signals is to kill."""
        signo = int(message["signo"])
        for pid in self._workers:
            if processes.handles_signal(pid, signo):
                os.kill(pid, signo)  # a child that is not reaped keeps its pid

    # --- ending

    def _begin_stop(self, grace_s: float) -> None:
        if self._waiting_spawn is not None:
            cycle = self._waiting_spawn["cycle"]
            self._waiting_spawn = None
            self._send("refused", cycle=cycle, message="stopped before it could begin")
        now_s = time.monotonic()
        if not self._any_left:
            self._send("gone", cycle=self._cycle)
        elif self._stop is None:
            self._stop = TreeStop(now_s, grace_s, self._warmth.spares)
        else:
            self._stop.shorten(now_s, grace_s)

    def _on_close(self, message: Message) -> None:
        self._close_with(float(message["grace_s"]))

    def _close_with(self, grace_s: float) -> None:
        self._closing = True
        if self._any_left:
            self._begin_stop(grace_s)

    def _reap(self) -> bool:
        """Take in all that has ended. True when anything has. No child left means no descendant left."""
        ended = False
        while True:
            try:
                pid, wait_status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                nothing_left = True
                break
            if pid == 0:
                nothing_left = self._only_the_zygote_is_left()
                break
            ended = True
            if pid == self._warmth.pid:
                self._warmth.on_reaped(wait_status, time.monotonic())
            elif (worker := self._workers.pop(pid, None)) is not None:
                self._on_worker_ended(worker, wait_status)
        if self._any_left and nothing_left:
            self._on_nothing_left()
            return True
        return ended

    def _only_the_zygote_is_left(self) -> bool:
        """It is no cycle's process. Whatever else is below us is, or has above it, a child of ours that we
        have not reaped: so it cannot be missed among our children, whom nobody but us takes away."""
        if not self._any_left or self._warmth.pid is None:
            return False
        return processes.children(os.getpid()) == [self._warmth.pid] and self._warmth.is_clean()

    def _on_worker_ended(self, worker: _Worker, wait_status: int) -> None:
        end = describe_end(wait_status)
        if worker.process is not None:
            worker.process.returncode = end.exit_code or 0  # reaped here, so that Popen does not wait for it
        # A worker that failed just before its turn to be stopped has failed.
        by_agent = self._stop is not None and self._stop.has_signalled(worker.running.id)
        self._say_exited(worker.cycle, worker.running.local_rank, end, by_agent)

    def _say_exited(self, cycle: int, local_rank: int, end: Ended, by_agent: bool) -> None:
        self._send(
            "exited",
            cycle=cycle,
            local_rank=local_rank,
            exit_code=end.exit_code,
            signal=end.signal,
            message=f"stopped by agent ({end.message})" if by_agent else end.message,
            stopped_by_agent=by_agent,
            time_s=time.monotonic(),
        )

    def _on_nothing_left(self) -> None:
        self._any_left = False
        self._pipes.forget()
        self._stop = None
        self._write_record()
        self._send("gone", cycle=self._cycle)

    def _note(self, text: str, is_problem: bool) -> None:
        self._send("note", text=text, is_problem=is_problem)

    def _say_stuck(self, pids: list[int]) -> None:
        if pids:
            self._send("stuck", pids=pids)


def _output_files(plain: Message) -> OutputFiles:
    prefix = plain["prefix"]
    return OutputFiles(
        unpack_bytes(plain["stdout"]),
        unpack_bytes(plain["stderr"]),
        unpack_bytes(prefix) if prefix is not None else None,
    )


def main(arguments: list[str]) -> int:
    """`<fd of the socket to the agent> <pid of the agent> <fd of the socket to the log process, or ->`."""
    fd, agent_pid = int(arguments[0]), int(arguments[1])
    read_fd, _ = processes.begin_beside_agent("nvrx-supervisor", signal.SIGCHLD)
    processes.become_subreaper()
    processes.take_more_descriptors()
    os.set_inheritable(fd, False)
    to_log_process = socket.socket(fileno=int(arguments[2])) if arguments[2] != "-" else None
    if to_log_process is not None:
        to_log_process.set_inheritable(False)
    supervisor = Supervisor(Channel(socket.socket(fileno=fd)), agent_pid, read_fd, OutputPipes(to_log_process))
    try:
        supervisor.run()
    except Exception:  # noqa: BLE001 - top of this process: whatever the bug, nothing below may outlive us
        traceback.print_exc()
        supervisor.end_everything()
        return _CRASHED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
