"""RankMapService: which worker was where, of every cycle, both ways."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from nvrx.core.ids import CycleNumber, GlobalRank, NodeId
from nvrx.core.ranks import WorkerPlace, find_gpu, find_node, find_rank, mapped_nodes
from nvrx.core.refused import Reason, Refused
from nvrx.core.run import Cycle, Run
from nvrx.v1 import common_pb2, rank_map_pb2, rank_map_pb2_grpc
from nvrx.wire import views

from ..engine import Engine
from .answering import Context, answer_later, answering, fill, page_of

BEFORE_CURRENT = -1


def pick_cycle(run: Run, asked: int | None) -> Cycle:
    """The cycle asked for; None is the current one, -1 the one before. Raises Refused UNKNOWN_CYCLE."""
    if asked == BEFORE_CURRENT:
        found = run.cycles[-2] if len(run.cycles) > 1 else None
    elif asked is None:
        found = run.cycle
    else:
        found = run.find_cycle(CycleNumber(asked))
    if found is None:
        what = (
            "a cycle before the current one"
            if asked == BEFORE_CURRENT
            else f"cycle {asked if asked is not None else 0}"
        )
        last = f"cycles 0 to {run.cycles[-1].number}" if run.cycles else "no cycle yet"
        raise Refused(
            Reason.UNKNOWN_CYCLE,
            f"run {run.run_id} does not have {what}; it has {last}",
            {"run_id": run.run_id, "cycle": str(asked)},
        )
    return found


class RankMapService(rank_map_pb2_grpc.RankMapServiceServicer):
    """Answers from durable state only."""

    WatchRankMap = answer_later  # type: ignore[assignment]  # a stub answers no stream

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @answering
    async def GetRankMap(
        self, request: rank_map_pb2.GetRankMapRequest, context: Context
    ) -> rank_map_pb2.GetRankMapResponse:
        run = self._engine.find(request.run_id).run
        cycle = pick_cycle(run, request.cycle if request.HasField("cycle") else None)
        page = page_of(request.page_size, request.page_token)
        response = rank_map_pb2.GetRankMapResponse(rank_map=views.rank_map(run, cycle))
        then = run.as_of(cycle)
        nodes = (views.rank_map_node(then, one) for one in mapped_nodes(then, cycle))
        standbys = (views.standby_node(one) for one in cycle.standbys)
        rows = itertools.islice(itertools.chain(nodes, standbys), page.begin, None)
        on_page = common_pb2.RankMap()
        response.next_page_token = fill(page, rows, on_page.nodes)
        active = max(0, len(cycle.seats) - page.begin)
        response.rank_map.nodes.extend(on_page.nodes[:active])
        response.rank_map.standbys.extend(on_page.nodes[active:])
        return response

    @answering
    async def ListCycles(
        self, request: rank_map_pb2.ListCyclesRequest, context: Context
    ) -> rank_map_pb2.ListCyclesResponse:
        run = self._engine.find(request.run_id).run
        page = page_of(request.page_size, request.page_token)
        response = rank_map_pb2.ListCyclesResponse()
        latest_first = itertools.islice(reversed(run.cycles), page.begin, None)
        rows = (views.cycle_summary(run, cycle) for cycle in latest_first)
        response.next_page_token = fill(page, rows, response.cycles)
        return response

    @answering
    async def LookupRank(
        self, request: rank_map_pb2.LookupRankRequest, context: Context
    ) -> rank_map_pb2.LookupRankResponse:
        run = self._engine.find(request.run_id).run
        page = page_of(request.page_size, request.page_token)
        found = itertools.islice(_find(run, request), page.begin, None)
        response = rank_map_pb2.LookupRankResponse()
        rows = (views.lookup_match(run, place) for place in found)
        response.next_page_token = fill(page, rows, response.matches)
        return response


def _find(run: Run, request: rank_map_pb2.LookupRankRequest) -> Iterable[WorkerPlace]:
    only = pick_cycle(run, request.cycle) if request.HasField("cycle") else None
    subject = request.WhichOneof("subject")
    if subject == "rank":
        cycle = only or pick_cycle(run, None)
        place = find_rank(run, cycle, GlobalRank(request.rank))
        if place is None:
            raise Refused(
                Reason.INVALID_FIELD,
                f"rank {request.rank} is not in the world; ranks are 0 to {cycle.shape.world_size - 1}",
                {"rank": str(request.rank), "world_size": str(cycle.shape.world_size)},
            )
        return [place]
    if subject == "gpu_uuid":
        places = find_gpu(run, request.gpu_uuid)
    elif subject == "node_id":
        if NodeId(request.node_id) not in run.members:
            raise Refused(
                Reason.UNKNOWN_NODE,
                f"node {request.node_id[:128]!a} has never been a member of run {run.run_id}",
                {"node_id": request.node_id[:128]},
            )
        places = find_node(run, NodeId(request.node_id))
    else:
        raise Refused(Reason.INVALID_FIELD, "nothing to look up; give one of rank, gpu_uuid, node_id", {})
    return [place for place in places if only is None or place.cycle is only]
