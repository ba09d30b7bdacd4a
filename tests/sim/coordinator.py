"""One life of the simulated coordinator: the real engine and the real services, without a socket.

Puts together what `nvrx.server.app` puts together; crashes, stops and stalls on request. Each decision is checked by
the core's own invariants.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Any

from nvrx.core.commands import Command
from nvrx.core.facts import Fact
from nvrx.core.ids import RunId
from nvrx.core.invariants import check_state, check_step
from nvrx.core.presence import StoreMode, Timing
from nvrx.server.engine import Engine, _Work
from nvrx.server.journals import JournalError
from nvrx.server.services.heartbeat import HeartbeatService
from nvrx.server.services.join import JoinService
from nvrx.server.services.promote import PromoteService
from nvrx.server.services.run import RunService
from nvrx.v1 import heartbeat_pb2_grpc, join_pb2_grpc, promote_pb2_grpc, run_pb2_grpc

from .calls import Server, ServerEar
from .disk import Disk, DiskJournal
from .loop import PROCESS, SimulatedLoop

STOP_WITHIN_S = 3.0
VERSION = "0.0-sim"


class CheckedEngine(Engine):
    """The engine; what it decides is checked before it is written. `on_decided` hears it as well."""

    on_decided: Callable[[Sequence[Fact]], None]

    def _decide(self, run_id: RunId, command: Command, work: _Work) -> None:
        hosted = self.runs.get(run_id)
        before = work.runs.get(run_id, hosted.run if hosted is not None else None)
        rows_before = len(work.rows)
        super()._decide(run_id, command, work)
        facts = [one.fact for one in work.rows[rows_before:]]
        if facts:
            self.on_decided(facts)
            check_step(before, command, facts, work.runs[run_id])
            check_state(work.runs[run_id])


class CoordinatorProcess:
    """From start to end. `on_end` hears why the process ended by itself."""

    def __init__(
        self,
        disk: Disk,
        loop: SimulatedLoop,
        *,
        timing: Timing,
        store: StoreMode,
        wall: Callable[[], float],
        ear: ServerEar,
        on_decided: Callable[[Sequence[Fact]], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._loop = loop
        context = copy_context()
        context.run(PROCESS.set, self)
        self.engine = CheckedEngine(
            DiskJournal(disk),
            clock=loop.time,
            wall=wall,
            timing=timing,
            store=store,
        )
        self.engine.on_decided = on_decided
        self.server = Server(ear, context)
        self._heartbeats = HeartbeatService(self.engine, asyncio.Event())
        server: Any = self.server
        join_pb2_grpc.add_JoinServiceServicer_to_server(JoinService(self.engine, VERSION), server)
        heartbeat_pb2_grpc.add_HeartbeatServiceServicer_to_server(self._heartbeats, server)
        promote_pb2_grpc.add_PromoteServiceServicer_to_server(PromoteService(self.engine), server)
        run_pb2_grpc.add_RunServiceServicer_to_server(RunService(self.engine), server)
        self.engine.load()
        self._on_end = on_end
        self._deciding = loop.watched(self._serve(), "engine", context.copy())

    async def _serve(self) -> None:
        try:
            await self.engine.serve()
        except JournalError as error:
            # As the real process: it ends, and says nothing of what it could not keep.
            self.crash(keep_unsynced=False)
            self._on_end(str(error))

    def stall(self, duration_s: float) -> None:
        """SIGSTOP and, later, SIGCONT: what is sent to it meanwhile waits in its buffers."""
        self._loop.suspend(self)
        self._loop.call_later(duration_s, self._loop.resume, self)

    def crash(self, *, keep_unsynced: bool) -> None:
        """SIGKILL: a batch that is being written is kept entirely or lost."""
        self.server.die()
        self._loop.end_disk_jobs(keep=keep_unsynced)
        if asyncio.current_task() is not self._deciding:
            self._deciding.cancel()
        self._loop.resume(self)

    async def stop(self) -> None:
        """SIGTERM (rule E7): streams are closed with a reason that means come back; what is being written is kept."""
        self.server.refuses = True
        self._deciding.cancel()
        self._heartbeats.close()
        self.engine.end_watches()
        handlers = [one.task for one in self.server.calls]
        if handlers:
            await asyncio.wait(handlers, timeout=STOP_WITHIN_S)
        self.crash(keep_unsynced=True)
