"""The process that takes workers' output from their pipes to the log files, and to the agent's own streams.

One per agent, started by it; not below the supervisor, which ends what is below it, and not inside it: a file
system that hangs stops this process alone. It ends when its agent has closed or died, the supervisor too, and
every pipe is at its end: what dying workers say is still written. When it dies itself, the agent starts
another and the supervisor, which holds the pipes' read ends as well, hands them over anew.

Must not know: the coordinator, grpc, asyncio, what a worker or a cycle is. Imports only its siblings and the
standard library. Single-threaded but for the writers of the tee.
"""

import array
import contextlib
import json
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from . import processes
from .log_file import Disk, LogFile, Rotation
from .log_tee import Shown, Tee
from .output_pipes import FILES_OF_A_WORKER, HANDOVER_BYTES, PIPE_BYTES, make_pipe
from .supervisor_channel import Channel, ChannelClosed, Message, unpack_bytes

# A write to a pipe whose reader waits costs the worker a wake-up, several times the write itself. So after a
# little output we look away for a moment; the less, the fuller the pipes were when we looked again.
_LOOK_AWAY_MAX_S = 0.005
_LOOK_AWAY_MIN_S = 0.0002
_POLL_RESOLUTION_S = 0.001
_MUCH_BYTES = PIPE_BYTES // 4
# A flush takes what a pipe held when it was asked for; more is being written by something that lives.
_FLUSH_BYTES = 4 * PIPE_BYTES
_TAILS_KEPT = 256
_TEES_CLOSE_WITHIN_S = 0.5
_SAID_QUEUED = 1000


@dataclass(slots=True)
class _Source:
    fd: int
    path: bytes
    file: LogFile
    tee: Tee | None
    shown: Shown


class LogProcess:
    def __init__(
        self,
        control: Channel,
        handover: socket.socket,
        agent_pid: int,
        wakeup: tuple[int, int],
        rotation: Rotation | None,
    ) -> None:
        self._control: Channel | None = control
        self._handover: socket.socket | None = handover
        self._agent_pid = agent_pid
        self._wakeup_read, self._wakeup_write = wakeup
        self._said: deque[str] = deque(maxlen=_SAID_QUEUED)
        self._disk = Disk(self.say, time.monotonic)
        self._rotation = rotation
        self._tees: dict[int, Tee] = {}
        self._sources: dict[int, _Source] = {}
        self._seen: set[int] = set()
        self._missing_tails: dict[bytes, bytes] = {}
        self._private_read, self._private_write = make_pipe()
        # The pipes have a poll of their own, so that only the rest is waited for while we look away from them.
        self._pipes = select.epoll()
        self._rest = select.epoll()
        self._all = select.epoll()
        self._on_event: dict[int, Callable[[], None]] = {}
        self._look_away_s = _LOOK_AWAY_MIN_S
        self._closing = False
        self._all.register(self._pipes.fileno(), select.EPOLLIN)
        self._all.register(self._rest.fileno(), select.EPOLLIN)
        for fd, handler in (
            (control.fileno(), self._on_control),
            (handover.fileno(), self._on_handover),
            (self._wakeup_read, self._on_wakeup),
        ):
            self._rest.register(fd, select.EPOLLIN)
            self._on_event[fd] = handler

    def run(self) -> None:
        self._notice_agent_death()  # it may have died before we asked the kernel to tell
        while self._sources or self._handover is not None or not self._closing:
            self._all.poll()
            self._on_rest(0.0)
            most = self._drain_ready()
            if most:
                self._look_away(most)
        deadline_s = time.monotonic() + _TEES_CLOSE_WITHIN_S
        for tee in self._tees.values():
            tee.close(max(0.0, deadline_s - time.monotonic()))
        self._tell()
        if self._control is not None:
            self._control.close()

    def say(self, text: str) -> None:
        """Have the agent log this; from any thread."""
        self._said.append(text)
        with contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            os.write(self._wakeup_write, b"!")

    # --- events

    def _on_rest(self, timeout_s: float) -> None:
        for fd, _ in self._rest.poll(timeout_s):
            handler = self._on_event.get(fd)
            if handler is not None:  # none where an earlier one of these closed it
                handler()
        self._notice_agent_death()
        self._tell()

    def _look_away(self, most: int) -> None:
        if most >= _MUCH_BYTES:
            self._look_away_s = max(self._look_away_s / 2, _LOOK_AWAY_MIN_S)
        else:
            self._look_away_s = min(self._look_away_s * 2, _LOOK_AWAY_MAX_S)
        if most >= PIPE_BYTES // 2:
            return
        if self._look_away_s < _POLL_RESOLUTION_S:
            time.sleep(self._look_away_s)
        else:
            self._on_rest(self._look_away_s)

    def _on_wakeup(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wakeup_read, 4096):
                pass

    def _tell(self) -> None:
        if self._control is not None and self._control.has_unsent:
            self._control.flush()
        while self._said:
            text = self._said.popleft()
            if self._control is not None:
                self._control.send({"type": "warning", "text": text})
            else:
                with contextlib.suppress(OSError):
                    os.write(2, f"nvrx logs: {text}\n".encode("utf-8", "backslashreplace"))

    def _notice_agent_death(self) -> None:
        if os.getppid() != self._agent_pid:
            self._on_agent_gone()

    def _on_agent_gone(self) -> None:
        if self._control is not None:
            self._forget(self._control.fileno())
            self._control.close()
            self._control = None
        self._closing = True

    def _forget(self, fd: int) -> None:
        self._rest.unregister(fd)
        del self._on_event[fd]

    def _on_control(self) -> None:
        assert self._control is not None
        try:
            self._control.flush()
            for message in self._control.receive():
                self._on_message(message)
        except ChannelClosed:
            self._on_agent_gone()

    def _on_message(self, message: Message) -> None:
        match message["type"]:
            case "flush":
                tails = [self._flush(unpack_bytes(path)) for path in message["paths"]]
                assert self._control is not None
                missing = tails[0].decode("latin-1") if tails[0] is not None else None
                self._control.send({"type": "flushed", "number": message["number"], "missing_tail": missing})
            case "close":
                self._closing = True

    # --- pipes

    def _on_handover(self) -> None:
        """Take over the read ends that the supervisor has sent."""
        while self._handover is not None:
            fds = array.array("i")
            room = socket.CMSG_SPACE(FILES_OF_A_WORKER * fds.itemsize)
            try:
                data, ancillary, _, _ = self._handover.recvmsg(HANDOVER_BYTES, room, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                data, ancillary = b"", []
            if not data:
                self._forget(self._handover.fileno())
                self._handover.close()
                self._handover = None
                return
            for _, _, carried in ancillary:
                fds.frombytes(carried[: len(carried) - len(carried) % fds.itemsize])
            for plain, fd in zip(json.loads(data), fds, strict=True):
                self._take_over(plain, fd)

    def _take_over(self, plain: Message, fd: int) -> None:
        if plain["number"] in self._seen:  # sent to our predecessor, which left it unread, and sent anew
            os.close(fd)
            return
        self._seen.add(plain["number"])
        path = unpack_bytes(plain["path"])
        shown = Shown(unpack_bytes(plain["prefix"] or ""))
        tee = self._tee(plain["stream"]) if plain["prefix"] is not None else None
        self._sources[fd] = _Source(fd, path, LogFile(path, self._disk, self._rotation), tee, shown)
        self._pipes.register(fd, select.EPOLLIN)

    def _tee(self, stream: int) -> Tee:
        if stream not in self._tees:
            name = "standard output" if stream == 1 else "standard error"
            self._tees[stream] = Tee(stream, name, self.say)
        return self._tees[stream]

    def _drain_ready(self) -> int:
        """Once from each pipe that has something; the most that one had."""
        most = 0
        for fd, _ in self._pipes.poll(0):
            source = self._sources.get(fd)
            if source is not None:
                most = max(most, self._drain(source))
        return most

    def _drain(self, source: _Source) -> int:
        """What the pipe holds now, to its file; how much that was.

        By way of a pipe of our own, to which pages move at once: a worker's pipe is locked while it is read.
        """
        try:
            count = os.splice(source.fd, self._private_write, PIPE_BYTES)
        except BlockingIOError:
            return 0
        if count == 0:
            self._end(source)
            return 0
        left = count
        tee = source.tee if source.tee is not None and source.tee.has_room(count) else None
        if tee is None and source.file.splices:
            left -= source.file.splice(self._private_read, left)
        while left:
            data = os.read(self._private_read, left)
            left -= len(data)
            source.file.write(data)
            if tee is not None:
                tee.offer(source.shown, data)
        return count

    def _end(self, source: _Source) -> None:
        self._pipes.unregister(source.fd)
        del self._sources[source.fd]
        os.close(source.fd)
        if source.tee is not None:
            source.tee.offer(source.shown, None)
        self._keep_missing_tail(source)
        source.file.close()

    def _keep_missing_tail(self, source: _Source) -> None:
        tail = source.file.missing_tail
        if tail is not None:
            self._missing_tails[source.path] = tail
            while len(self._missing_tails) > _TAILS_KEPT:
                del self._missing_tails[next(iter(self._missing_tails))]

    def _flush(self, path: bytes) -> bytes | None:
        """Write what the pipe of this file holds. The end of the output, where the file lacks it."""
        self._on_handover()
        for source in [one for one in self._sources.values() if one.path == path]:
            written = 0
            while written < _FLUSH_BYTES and (count := self._drain(source)):
                written += count
            if source.fd in self._sources:
                return source.file.missing_tail
        return self._missing_tails.get(path)


def main(arguments: list[str]) -> int:
    """`<fd of the socket to the agent> <fd where read ends arrive> <pid of the agent> <max bytes, or 0> <keep>`."""
    control_fd, handover_fd, agent_pid, max_bytes, keep = map(int, arguments)
    wakeup = processes.begin_beside_agent("nvrx-logs")
    for fd in (control_fd, handover_fd):
        os.set_inheritable(fd, False)
    handover = socket.socket(fileno=handover_fd)
    handover.setblocking(False)
    processes.take_more_descriptors()  # four for each worker
    rotation = Rotation(max_bytes, keep) if max_bytes else None
    LogProcess(Channel(socket.socket(fileno=control_fd)), handover, agent_pid, wakeup, rotation).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
