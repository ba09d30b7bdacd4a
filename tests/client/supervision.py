"""Tools of the supervisor's tests: real processes, and ways to wait for what they do without sleeping."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from nvrx.client.processes import is_running, read_stat
from nvrx.client.supervisor_link import Event, Identity, SupervisorLink, WorkerSpec

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0
FOREVER = "while :; do sleep 100 & wait; done"  # a shell that acts on signals at once
T = TypeVar("T", bound=Event)


async def ended(pid: int) -> None:
    """Until the process has ended, be it a child of ours or not."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_reader(handle, over.set)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await over.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


def alive(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and is_running(stat)


class Lines:
    """A FIFO that workers `echo` to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        self._reader = asyncio.StreamReader()

    async def open(self) -> "Lines":
        # For writing, too, so that it does not end when the first writer does.
        file = os.fdopen(os.open(self.path, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._reader), file
        )
        return self

    async def next(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return (await self._reader.readline()).decode().strip()

    async def next_pids(self, count: int) -> list[int]:
        return [int(await self.next()) for _ in range(count)]

    def close(self) -> None:
        self._transport.close()


class Bench:
    """Starts links and processes in one folder, and ends them with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.links: list[SupervisorLink] = []
        self.pids: list[int] = []
        self.lines = Lines(folder / "lines")

    async def link(
        self, key: str = "key", stop_grace_s: float = 15.0, handover_fd: int | None = None
    ) -> SupervisorLink:
        link = await SupervisorLink.start(
            self.folder / "runtime",
            key,
            Identity("run", "node", "1"),
            stop_grace_s=stop_grace_s,
            handover_fd=handover_fd,
        )
        self.links.append(link)
        return link

    def worker(self, *argv: str, rank: int = 0) -> WorkerSpec:
        return WorkerSpec(
            local_rank=rank,
            argv=argv,
            env={**os.environ, "LINES": str(self.lines.path)},
            cwd=str(self.folder),
            stdout_path=str(self.folder / f"{rank}.out"),
            stderr_path=str(self.folder / f"{rank}.err"),
        )

    def shell(self, script: str, rank: int = 0) -> WorkerSpec:
        return self.worker("bash", "-c", script, rank=rank)

    def python(self, code: str, *arguments: str, rank: int = 0) -> WorkerSpec:
        return self.worker(sys.executable, "-S", "-c", code, *arguments, rank=rank)

    def output(self, rank: int = 0) -> str:
        return (self.folder / f"{rank}.out").read_text()

    async def close(self) -> None:
        for link in self.links:
            await link.close(grace_s=0.0)
        for pid in self.pids:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.lines.close()


async def next_event(link: SupervisorLink, kind: type[T]) -> T:
    """The next event of this kind; those of other kinds before it are dropped."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            event = await link.events.get()
            if isinstance(event, kind):
                return event


async def events_until(link: SupervisorLink, kind: type[Event]) -> Sequence[Event]:
    events: list[Event] = []
    async with asyncio.timeout(PATIENCE_S):
        while not events or not isinstance(events[-1], kind):
            events.append(await link.events.get())
    return events
