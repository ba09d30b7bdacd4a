"""JoinService: nodes become members, and leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nvrx.core.commands import Leave
from nvrx.core.ids import Incarnation, NodeId
from nvrx.v1 import join_pb2, join_pb2_grpc
from nvrx.wire import membership
from nvrx.wire.units import duration, seconds

from ..engine import Engine
from .answering import Context, answering


class JoinService(join_pb2_grpc.JoinServiceServicer):
    """Admits nodes to a run and lets them go."""

    def __init__(self, engine: Engine, version: str, coordinators: Callable[[], Sequence[str]] = tuple) -> None:
        """`coordinators` tells all addresses to come back to, the leader's first; none where there is one only."""
        self._engine = engine
        self._version = version
        self._coordinators = coordinators

    @answering
    async def Join(self, request: join_pb2.JoinRequest, context: Context) -> join_pb2.JoinResponse:
        run_id = self._engine.resolve(request.run_id)
        await self._engine.submit(run_id, membership.join_command(request))
        hosted = self._engine.runs[run_id]
        timing = self._engine.timing
        cycle = hosted.run.cycle
        return join_pb2.JoinResponse(
            lease_ttl=duration(timing.lease_ttl_s),
            heartbeat_interval=duration(timing.heartbeat_interval_s),
            reconnect_grace=duration(timing.reconnect_grace_s),
            cycle=cycle.number if cycle is not None else None,
            revision=hosted.revision,
            run_id=run_id,
            journal_id=self._engine.journal_id,
            version=self._version,
            coordinators=self._coordinators(),
        )

    @answering
    async def Leave(self, request: join_pb2.LeaveRequest, context: Context) -> join_pb2.LeaveResponse:
        hosted = self._engine.find(request.run_id)
        await self._engine.submit(
            hosted.run.run_id,
            Leave(
                NodeId(request.node_id),
                Incarnation(request.incarnation),
                request.reason[:256] or "it said so",
                request.workers_stopped,
                seconds(request.stop_grace),
            ),
        )
        return join_pb2.LeaveResponse()
