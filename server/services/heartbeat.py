"""HeartbeatService: health and workers' ends come up, the desired state goes down, over one stream per node."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import grpc

from nvrx.core.commands import Report
from nvrx.core.ids import CycleNumber, Incarnation, NodeId, RunId
from nvrx.core.ranks import Desired
from nvrx.core.refused import Reason, Refused
from nvrx.v1 import heartbeat_pb2, heartbeat_pb2_grpc
from nvrx.wire import membership, views
from nvrx.wire.units import duration

from ..engine import Engine, superseded
from ..hosted import Said, Session
from .answering import Context, refuse

MAX_SENT_MAP_BYTES = 3 * 1024 * 1024
"""A larger rank map is fetched in pages: a default client refuses messages above 4 MiB."""


@dataclass(frozen=True)
class _SentMap:
    """A cycle's rank map, made once for all its nodes; `response` is None where it is too large."""

    cycle: CycleNumber
    response: heartbeat_pb2.HeartbeatResponse | None


class HeartbeatService(heartbeat_pb2_grpc.HeartbeatServiceServicer):
    """Hears nodes and tells them what to do. `closing` is set when the coordinator goes down (rule E7)."""

    def __init__(self, engine: Engine, closing: asyncio.Event) -> None:
        self._engine = engine
        self._closing = closing
        self._sessions: dict[Session, None] = {}  # a dict: told in the order in which they came
        self._maps: dict[RunId, _SentMap] = {}

    def close(self) -> None:
        """Have every stream end with a reason that means: come back."""
        self._closing.set()
        for session in self._sessions:
            session.news.set()

    async def Heartbeat(  # type: ignore[override]  # writes to the context, so that its cleanup runs at once
        self, request_iterator: object, context: Context
    ) -> None:
        try:
            await self._talk(context)
        except Refused as refused:
            await refuse(context, refused)

    async def _talk(self, context: Context) -> None:
        first = await context.read()
        if not isinstance(first, heartbeat_pb2.HeartbeatRequest):
            return
        engine = self._engine
        session = engine.open_session(
            first.run_id, NodeId(first.node_id), Incarnation(first.incarnation), first.sequence
        )
        # Nothing is decided in between: connected, it may be chosen, unless it says in the same breath that it is ill.
        engine.heard(session, membership.word_of(first))
        self._sessions[session] = None
        reading = asyncio.create_task(self._read(context, session, first))
        try:
            await self._write(context, session, reading)
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.BaseError, Refused):
                await reading
            del self._sessions[session]
            engine.close_session(session)

    async def _read(self, context: Context, session: Session, first: heartbeat_pb2.HeartbeatRequest) -> None:
        request: object = first
        try:
            while isinstance(request, heartbeat_pb2.HeartbeatRequest):
                await self._take(session, request)
                request = await context.read()
        finally:
            session.news.set()

    async def _take(self, session: Session, request: heartbeat_pb2.HeartbeatRequest) -> None:
        if (request.node_id, request.incarnation) != (session.node_id, session.incarnation):
            raise Refused(
                Reason.INVALID_FIELD,
                f"a stream of node {session.node_id} carried a heartbeat of {request.node_id[:128]!a}; open one stream "
                "per node",
                {"node_id": session.node_id},
            )
        self._engine.heard(session, membership.word_of(request))
        ended = membership.cycle_exits(request)
        if ended:
            await self._engine.submit(session.run_id, Report(session.node_id, session.incarnation, ended))
        session.acknowledged = max(session.acknowledged, request.sequence)
        session.heard += 1
        session.news.set()

    async def _write(self, context: Context, session: Session, reading: asyncio.Task[None]) -> None:
        while True:
            await session.news.wait()
            session.news.clear()
            if reading.done():
                reading.result()
                return
            if self._closing.is_set():
                raise Refused(Reason.SHUTTING_DOWN, "the coordinator goes down; come back to it", {})
            if session.is_superseded:
                raise superseded(session.node_id)
            desired = self._engine.desired(session)
            said = Said(desired, session.heard)
            if said == session.said:
                # Facts about others, such as how each of thousands of workers ended, are no news to this node.
                continue
            new_map = self._map(session, desired) if desired.assignment is not None else None
            await context.write(self._response(session, desired, new_map))
            session.said = said
            # Its own row first: a node starts on that, and needs the whole map only after.
            if new_map is not None and new_map.cycle != session.map_sent_of:
                session.map_sent_of = new_map.cycle
                if new_map.response is not None:
                    await context.write(new_map.response)

    def _map(self, session: Session, desired: Desired) -> _SentMap:
        assert desired.cycle is not None
        known = self._maps.get(session.run_id)
        if known is None or known.cycle != desired.cycle:
            hosted = self._engine.runs[session.run_id]
            cycle = hosted.run.find_cycle(desired.cycle)
            assert cycle is not None
            response = heartbeat_pb2.HeartbeatResponse(
                revision=hosted.revision,
                journal_id=self._engine.journal_id,
                term=self._engine.term,
                rank_map=views.whole_rank_map(hosted.run, cycle),
            )
            fits = response.ByteSize() <= MAX_SENT_MAP_BYTES
            known = self._maps[session.run_id] = _SentMap(desired.cycle, response if fits else None)
        return known

    def _response(
        self, session: Session, desired: Desired, new_map: _SentMap | None
    ) -> heartbeat_pb2.HeartbeatResponse:
        engine = self._engine
        return heartbeat_pb2.HeartbeatResponse(
            revision=engine.runs[session.run_id].revision,
            journal_id=engine.journal_id,
            term=engine.term,
            desired=membership.desired_message(
                desired, fetch_rank_map=new_map is not None and new_map.response is None
            ),
            lease_ttl=duration(engine.timing.lease_ttl_s),
            heartbeat_interval=duration(engine.timing.heartbeat_interval_s),
            acknowledged=session.acknowledged,
            failed_cycle=desired.failed_cycle,
        )
