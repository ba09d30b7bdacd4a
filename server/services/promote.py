"""PromoteService: what an operator asks of a run (rule F1). Decodes, submits, shows the world that results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from nvrx.core import commands
from nvrx.core.ids import NodeId
from nvrx.core.refused import Reason, Refused
from nvrx.v1 import common_pb2, promote_pb2, promote_pb2_grpc
from nvrx.wire import views

from ..engine import Engine
from .answering import MAX_PAGE_BYTES, Context, answering

_Change: TypeAlias = promote_pb2.PromoteRequest | promote_pb2.DrainRequest


@dataclass(frozen=True)
class _Result:
    rank_map: common_pb2.RankMap
    revision: int


class PromoteService(promote_pb2_grpc.PromoteServiceServicer):
    """Changes the world by hand."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @answering
    async def Promote(self, request: promote_pb2.PromoteRequest, context: Context) -> promote_pb2.PromoteResponse:
        _require_one_moment(request)
        replace = NodeId(request.replace_node_id) if request.replace_node_id else None
        command = commands.Promote(NodeId(request.node_id), replace, request.immediate)
        result = await self._change(request, command)
        return promote_pb2.PromoteResponse(rank_map=result.rank_map, revision=result.revision)

    @answering
    async def Drain(self, request: promote_pb2.DrainRequest, context: Context) -> promote_pb2.DrainResponse:
        _require_one_moment(request)
        result = await self._change(request, commands.Drain(NodeId(request.node_id), request.immediate))
        return promote_pb2.DrainResponse(rank_map=result.rank_map, revision=result.revision)

    @answering
    async def Undrain(self, request: promote_pb2.UndrainRequest, context: Context) -> promote_pb2.UndrainResponse:
        hosted = self._engine.find(request.run_id)
        await self._engine.submit(hosted.run.run_id, commands.Undrain(NodeId(request.node_id)))
        return promote_pb2.UndrainResponse(revision=hosted.revision)

    @answering
    async def StopRun(self, request: promote_pb2.StopRunRequest, context: Context) -> promote_pb2.StopRunResponse:
        hosted = self._engine.find(request.run_id)
        await self._engine.submit(hosted.run.run_id, commands.StopRun())
        return promote_pb2.StopRunResponse(revision=hosted.revision)

    async def _change(self, request: _Change, command: commands.Promote | commands.Drain) -> _Result:
        hosted = self._engine.find(request.run_id)
        after = self._engine.preview(hosted, command)
        assert after.cycle is not None
        rank_map = views.whole_rank_map(after, after.cycle)
        if rank_map.ByteSize() > MAX_PAGE_BYTES:
            for row in (*rank_map.nodes, *rank_map.standbys):
                row.ClearField("devices")
        if not request.dry_run:
            await self._engine.submit(hosted.run.run_id, command)
        return _Result(rank_map, hosted.revision)


def _require_one_moment(request: _Change) -> None:
    if request.wait and request.immediate:
        raise Refused(
            Reason.INVALID_FIELD,
            "wait and immediate are both set; set immediate to change the world now, else neither",
            {"field": "wait"},
        )
