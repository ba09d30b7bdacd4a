"""A rank map of 4,096 nodes with long names reaches a default client (rule H4)."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest

from nvrx.core.facts import (
    Cause,
    CycleEnded,
    Device,
    Fact,
    Failure,
    NodeInfo,
    NodeJoined,
    Placed,
    RunOpened,
    Seat,
    Standby,
    WorldChosen,
)
from nvrx.core.ids import CycleNumber, GroupId, GroupRank, Incarnation, InfraRank, LocalRank, NodeId, Revision, RunId
from nvrx.core.shape import Settings, Shape
from nvrx.core.topology import OrderSource
from nvrx.server.journals import Row
from nvrx.server.journals.memory import MemoryJournal
from nvrx.v1 import common_pb2, rank_map_pb2, rank_map_pb2_grpc, run_pb2, run_pb2_grpc

from .coordination import RUN, serving

NODES, STANDBYS = 4096, 64
LIMIT = 4 * 1024 * 1024


def placed(number: int) -> Placed:
    name = NodeId(f"trainer-{number:05}".ljust(60, "x"))
    devices = tuple(
        Device(LocalRank(one), f"GPU-{number:08}-1111-2222-3333-{one:012}", "00000000:3B:00.0", 0) for one in range(8)
    )
    return Placed(
        name, Incarnation("i" * 32), f"{name}.example", InfraRank(number), name, GroupId("g" * 60), None, devices
    )


def journal() -> MemoryJournal:
    everyone = [placed(one) for one in range(NODES + STANDBYS)]
    facts: list[Fact] = [RunOpened(0.0, RunId(RUN), Shape(NODES, NODES + STANDBYS, 8), Settings())]
    facts += [NodeJoined(0.0, NodeInfo(one.node_id, one.incarnation, one.address, 1)) for one in everyone]
    seats = tuple(Seat(one, GroupRank(rank)) for rank, one in enumerate(everyone[:NODES]))
    spare = tuple(Standby(one, "not needed for the world of 4096 nodes") for one in everyone[NODES:])
    facts.append(WorldChosen(1.0, CycleNumber(0), OrderSource.NODE_ID, seats, spare, None, time=time.time()))
    failure = Failure(Cause.WORKER_FAILED, everyone[0].node_id, GroupRank(0), LocalRank(0), 1, message="x" * 1024)
    facts.append(CycleEnded(2.0, CycleNumber(0), failure))
    kept = MemoryJournal()
    kept.append([Row(RunId(RUN), Revision(place), fact) for place, fact in enumerate(facts, start=1)])
    return kept


@pytest.mark.rule("H4")
async def test_the_map_of_4096_nodes_fits_a_default_client() -> None:
    async with serving(journal()) as served, grpc.aio.insecure_channel(str(served.address)) as plain:
        maps: rank_map_pb2_grpc.RankMapServiceAsyncStub = rank_map_pb2_grpc.RankMapServiceStub(plain)  # type: ignore[assignment]
        runs: run_pb2_grpc.RunServiceAsyncStub = run_pb2_grpc.RunServiceStub(plain)  # type: ignore[assignment]
        nodes: list[common_pb2.RankMapNode] = []
        standbys: list[common_pb2.RankMapNode] = []
        request = rank_map_pb2.GetRankMapRequest(run_id=RUN, cycle=0)
        while True:
            page = await maps.GetRankMap(request, timeout=60)
            assert page.ByteSize() < LIMIT
            assert page.rank_map.failure.message == "x" * 1024
            nodes += page.rank_map.nodes
            standbys += page.rank_map.standbys
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        assert [one.group_rank for one in nodes] == list(range(NODES))
        assert [one.first_rank for one in nodes] == list(range(0, NODES * 8, 8))
        assert len(standbys) == STANDBYS
        assert all(len(one.node_id) == 60 and len(one.devices) == 8 for one in nodes)
        facts = await runs.ListFacts(run_pb2.ListFactsRequest(run_id=RUN, from_revision=NODES + STANDBYS), timeout=60)
        assert [one.kind for one in facts.facts] == ["NodeJoined", "NodeJoined", "WorldChosen", "CycleEnded"]
        assert "omitted" in facts.facts[2].detail
        watch: Any = served.runs.WatchFacts(
            run_pb2.WatchFactsRequest(run_id=RUN, from_revision=facts.facts[2].revision), timeout=60
        )
        assert [(await watch.read()).fact.kind for _ in range(2)] == ["WorldChosen", "CycleEnded"]
