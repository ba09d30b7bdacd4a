"""A whole run over gRPC: a worker fails, a node is lost, a standby comes in; every cycle's map, asked in every way."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from google.protobuf import json_format

from nvrx.v1 import common_pb2, rank_map_pb2, run_pb2
from nvrx.wire.text import to_json

from .coordination import RUN, SUCCEEDED, WAIT, WAIT_S, HandAgent, Served, exited, refused, serving
from .story import Story

NOT_FOUND = grpc.StatusCode.NOT_FOUND
INVALID = grpc.StatusCode.INVALID_ARGUMENT
LOST = common_pb2.WORKER_OUTCOME_LOST
FAILED_OUTCOME = common_pb2.WORKER_OUTCOME_FAILED
STOPPED_OUTCOME = common_pb2.WORKER_OUTCOME_STOPPED_BY_AGENT


def placed(found: common_pb2.RankMap) -> list[tuple[str, int, int, int]]:
    assert all(one.HasField("group_rank") and one.HasField("first_rank") for one in found.nodes)
    return [(one.node_id, one.group_rank, one.first_rank, one.local_world_size) for one in found.nodes]


def outcomes(found: common_pb2.RankMap) -> list[int]:
    return [one.outcome.state for one in found.nodes]


@pytest.mark.rule("H1", "C1", "D3", "D5")
async def test_every_cycles_map_is_kept(story: Story) -> None:
    first = await story.served.rank_map(0)
    assert placed(first) == [("n0", 0, 0, 2), ("n1", 1, 2, 2)]
    assert [(one.node_id, one.HasField("group_rank")) for one in first.standbys] == [("n2", False)]
    assert first.standbys[0].reason
    assert first.state == common_pb2.CYCLE_STATE_ENDED
    assert (first.world_size, first.group_world_size, first.workers_per_node) == (4, 2, 2)
    assert outcomes(first) == [FAILED_OUTCOME, STOPPED_OUTCOME]
    exits = first.nodes[0].outcome.exits
    assert [(one.rank, one.local_rank, one.exit_code, one.stopped_by_agent) for one in exits] == [
        (0, 0, 7, False),
        (1, 1, 0, True),
    ]
    failure = first.failure
    assert failure.cause == common_pb2.CAUSE_WORKER_FAILED
    assert failure.HasField("rank")
    assert (failure.node_id, failure.rank, failure.exit_code, failure.message) == ("n0", 0, 7, "CUDA error")

    second = await story.served.rank_map(1)
    assert placed(second) == placed(first)
    assert outcomes(second) == [0, LOST]
    assert (second.failure.cause, second.failure.node_id) == (common_pb2.CAUSE_NODE_LOST, "n1")
    assert not second.failure.HasField("rank")

    third = await story.served.rank_map()
    assert third.cycle == 2
    assert placed(third) == [("n0", 0, 0, 2), ("n2", 1, 2, 2)]
    assert third.state == common_pb2.CYCLE_STATE_RUNNING
    assert not third.HasField("failure")
    assert not third.HasField("end_time")
    run = await story.served.run_state()
    assert (run.restarts_used, run.replacements_used, run.active_nodes, run.standby_nodes) == (1, 1, 2, 0)


@pytest.mark.rule("H1")
async def test_a_map_is_found_by_number_by_absence_and_before(story: Story) -> None:
    served = story.served
    assert await served.rank_map(-1) == await served.rank_map(1)
    assert await served.rank_map() == await served.rank_map(2)
    assert (await served.rank_map(run_id="")).run_id == RUN
    for wrong in (3, -2, 2**31 - 1):
        request = rank_map_pb2.GetRankMapRequest(run_id=RUN, cycle=wrong)
        told = await refused(served.maps.GetRankMap(request), NOT_FOUND, "UNKNOWN_CYCLE")
        assert told == {"run_id": RUN, "cycle": str(wrong)}


@pytest.mark.rule("H1", "H4")
async def test_pages_of_a_map_hold_nodes_then_standbys_and_the_rest_each_time(story: Story) -> None:
    request = rank_map_pb2.GetRankMapRequest(run_id=RUN, cycle=0, page_size=1)
    seen: list[str] = []
    for _ in range(3):
        page = await story.served.maps.GetRankMap(request, timeout=WAIT_S)
        assert page.rank_map.failure.node_id == "n0"
        seen += [f"active {one.node_id}" for one in page.rank_map.nodes]
        seen += [f"standby {one.node_id}" for one in page.rank_map.standbys]
        request.page_token = page.next_page_token
    assert not page.next_page_token
    assert seen == ["active n0", "active n1", "standby n2"]


async def look(served: Served, **subject: Any) -> list[tuple[int, int, str, int, str]]:
    answer = await served.maps.LookupRank(rank_map_pb2.LookupRankRequest(run_id=RUN, **subject), timeout=WAIT_S)
    return [(one.cycle, one.rank, one.node_id, one.local_rank, one.device.uuid) for one in answer.matches]


@pytest.mark.rule("H2")
async def test_a_rank_a_gpu_and_a_node_are_looked_up(story: Story) -> None:
    served = story.served
    assert await look(served, rank=0) == [(2, 0, "n0", 0, "GPU-n0-0")]
    assert await look(served, rank=3) == [(2, 3, "n2", 1, "GPU-n2-1")]
    assert await look(served, rank=3, cycle=0) == [(0, 3, "n1", 1, "GPU-n1-1")]
    assert await look(served, rank=3, cycle=-1) == [(1, 3, "n1", 1, "GPU-n1-1")]
    assert await look(served, gpu_uuid="GPU-n1-0") == [(1, 2, "n1", 0, "GPU-n1-0"), (0, 2, "n1", 0, "GPU-n1-0")]
    assert await look(served, gpu_uuid="GPU-n0-1", cycle=1) == [(1, 1, "n0", 1, "GPU-n0-1")]
    assert await look(served, gpu_uuid="GPU-nowhere") == []
    assert await look(served, node_id="n1") == [
        (1, 2, "n1", 0, "GPU-n1-0"),
        (1, 3, "n1", 1, "GPU-n1-1"),
        (0, 2, "n1", 0, "GPU-n1-0"),
        (0, 3, "n1", 1, "GPU-n1-1"),
    ]
    assert await look(served, node_id="n2", cycle=0) == []


@pytest.mark.rule("H2")
async def test_what_cannot_be_looked_up_is_refused(story: Story) -> None:
    maps = story.served.maps
    ask = rank_map_pb2.LookupRankRequest
    told = await refused(maps.LookupRank(ask(run_id=RUN, rank=4)), INVALID, "INVALID_FIELD")
    assert told == {"rank": "4", "world_size": "4"}
    await refused(maps.LookupRank(ask(run_id=RUN, rank=-1)), INVALID, "INVALID_FIELD")
    await refused(maps.LookupRank(ask(run_id=RUN)), INVALID, "INVALID_FIELD")
    await refused(maps.LookupRank(ask(run_id=RUN, node_id="n9")), NOT_FOUND, "UNKNOWN_NODE")
    await refused(maps.LookupRank(ask(run_id=RUN, rank=0, cycle=9)), NOT_FOUND, "UNKNOWN_CYCLE")


@pytest.mark.rule("H1", "H2")
async def test_cycles_are_listed_latest_first(story: Story) -> None:
    found = (await story.served.maps.ListCycles(rank_map_pb2.ListCyclesRequest(run_id=RUN), timeout=WAIT_S)).cycles
    assert [one.cycle for one in found] == [2, 1, 0]
    assert [one.state for one in found] == [3, 4, 4]
    assert [one.cause for one in found] == [0, common_pb2.CAUSE_NODE_LOST, common_pb2.CAUSE_WORKER_FAILED]
    assert found[2].cause_text == "rank 0 (local rank 0) on n0 failed with exit 7: CUDA error"
    assert found[2].HasField("rank")
    assert not found[2].HasField("recovery_time")
    assert found[1].HasField("recovery_time")
    pairs = [[(pair.left_node_id, pair.came_node_id) for pair in one.replacements] for one in found]
    assert pairs == [[("n1", "n2")], [], []]


@pytest.mark.rule("H1")
async def test_nodes_are_listed_active_ones_first(story: Story) -> None:
    young = HandAgent(story.served, "n1", incarnation="n1-life-2")
    await young.enter()
    await young.until(WAIT, 2)
    found = (await story.served.runs.ListNodes(run_pb2.ListNodesRequest(run_id=RUN), timeout=WAIT_S)).nodes
    state = common_pb2.NodeState
    assert [(one.node_id, state.Name(one.state)) for one in found] == [
        ("n0", "NODE_STATE_ACTIVE"),
        ("n2", "NODE_STATE_ACTIVE"),
        ("n1", "NODE_STATE_STANDBY"),
    ]
    assert [one.connected for one in found] == [True] * 3
    assert (found[0].group_rank, found[0].infra_rank, found[0].phase, found[0].cycle) == (0, 0, 3, 2)
    assert found[0].HasField("group_rank")
    assert not found[2].HasField("group_rank")
    await young.leave(reason="going home")
    found = (await story.served.runs.ListNodes(run_pb2.ListNodesRequest(run_id=RUN), timeout=WAIT_S)).nodes
    assert (found[2].state, found[2].reason) == (common_pb2.NODE_STATE_LEFT, "going home")
    assert not found[2].HasField("last_heard")


@pytest.mark.rule("H1")
@pytest.mark.parametrize("size", [1, 2, 0, 10_000_000])
async def test_every_list_comes_in_pages_without_gap_or_repetition(story: Story, size: int) -> None:
    served = story.served
    facts = await served.facts()
    assert [one.revision for one in facts] == list(range(1, len(facts) + 1))
    assert facts[0].kind == "RunOpened"
    assert all(one.text and one.time.seconds for one in facts)
    asked: list[tuple[Any, Any, str, int]] = [
        (served.runs.ListFacts, run_pb2.ListFactsRequest(run_id=RUN), "facts", len(facts)),
        (served.runs.ListNodes, run_pb2.ListNodesRequest(run_id=RUN), "nodes", 3),
        (served.runs.ListRuns, run_pb2.ListRunsRequest(), "runs", 1),
        (served.maps.ListCycles, rank_map_pb2.ListCyclesRequest(run_id=RUN), "cycles", 3),
        (served.maps.LookupRank, rank_map_pb2.LookupRankRequest(run_id=RUN, node_id="n0"), "matches", 6),
    ]
    for method, request, field, count in asked:
        whole = list(getattr(await method(request, timeout=WAIT_S), field))
        assert len(whole) == count
        request.page_size = size
        paged: list[Any] = []
        while not paged or request.page_token:
            page = await method(request, timeout=WAIT_S)
            rows = getattr(page, field)
            assert len(rows) <= (size or count)
            paged += rows
            request.page_token = page.next_page_token
        for row in (*whole, *paged):
            if field == "nodes":
                row.ClearField("last_heard")
        assert paged == whole


@pytest.mark.rule("H1")
async def test_facts_are_listed_from_a_revision(story: Story) -> None:
    runs = story.served.runs
    request = run_pb2.ListFactsRequest(run_id=RUN, from_revision=3, page_size=2)
    page = await runs.ListFacts(request, timeout=WAIT_S)
    assert [one.revision for one in page.facts] == [3, 4]
    request.page_token = page.next_page_token
    assert [one.revision for one in (await runs.ListFacts(request, timeout=WAIT_S)).facts] == [5, 6]
    beyond = await runs.ListFacts(run_pb2.ListFactsRequest(run_id=RUN, from_revision=10**9), timeout=WAIT_S)
    assert not beyond.facts
    assert not beyond.next_page_token
    first = (await story.served.facts())[1]
    assert first.kind == "NodeJoined"
    assert first.node_id == "n0"
    assert json_format.MessageToDict(first.detail)["node"]["address"] == "10.0.0.0"


@pytest.mark.rule("H1")
async def test_a_page_or_revision_that_cannot_be_is_refused(story: Story) -> None:
    served = story.served
    for method, kind in (
        (served.runs.ListFacts, run_pb2.ListFactsRequest),
        (served.runs.ListNodes, run_pb2.ListNodesRequest),
        (served.runs.ListRuns, run_pb2.ListRunsRequest),
        (served.maps.ListCycles, rank_map_pb2.ListCyclesRequest),
        (served.maps.GetRankMap, rank_map_pb2.GetRankMapRequest),
    ):
        assert (await refused(method(kind(page_size=-1)), INVALID, "INVALID_FIELD")) == {"field": "page_size"}
        for token in ("x", "-1", "9" * 40, "٣"):
            told = await refused(method(kind(page_token=token)), INVALID, "INVALID_FIELD")
            assert told == {"field": "page_token"}
    for call in (
        served.runs.ListFacts(run_pb2.ListFactsRequest(from_revision=-1)),
        served.runs.WatchFacts(run_pb2.WatchFactsRequest(from_revision=-1)).read(),
    ):
        assert (await refused(call, INVALID, "INVALID_FIELD")) == {"field": "from_revision"}


@pytest.mark.rule("H4")
async def test_zero_values_are_printed(story: Story) -> None:
    printed = json.loads(to_json(await story.served.rank_map(0)))
    assert printed["cycle"] == 0
    node = printed["nodes"][0]
    assert (node["group_rank"], node["first_rank"], node["infra_rank"]) == (0, 0, 0)
    assert node["devices"][0]["numa_node"] == 0
    assert node["outcome"]["exits"][0]["rank"] == 0
    assert node["outcome"]["exits"][0]["local_rank"] == 0
    assert printed["failure"]["rank"] == 0
    assert printed["failure"]["local_rank"] == 0
    run = json.loads(to_json(await story.served.run_state()))
    assert run["standby_nodes"] == 0


@pytest.mark.rule("D8")
async def test_the_story_ends_well(story: Story) -> None:
    for agent in (story.agents[0], story.agents[2]):
        await agent.report(exited(0, 0), exited(1, 0), phase=SUCCEEDED)
    run = await story.served.run_state()
    assert (run.state, run.phase) == (common_pb2.RUN_STATE_SUCCEEDED, common_pb2.CYCLE_STATE_ENDED)
    assert run.HasField("exit_code")
    assert outcomes(await story.served.rank_map(2)) == [common_pb2.WORKER_OUTCOME_SUCCEEDED] * 2


@pytest.mark.rule("A3", "H1", "H2")
async def test_maps_of_an_earlier_life_keep_the_shape_they_had() -> None:
    async with serving() as served:
        old = await HandAgent(served, "n0", nnodes=(1, 1), workers=2).enter()
        await old.started(0)
        await old.report(exited(0, 0), exited(1, 0), phase=SUCCEEDED)
        before = await served.rank_map(0)
        assert (before.world_size, before.nodes[0].local_world_size) == (2, 2)
        young = HandAgent(served, "n0", nnodes=(2, 2), workers=4, incarnation="next")
        await young.join(reopen=True)
        assert await served.rank_map(0) == before
        request = rank_map_pb2.LookupRankRequest(run_id=RUN, rank=5, cycle=0)
        assert (await refused(served.maps.LookupRank(request), INVALID, "INVALID_FIELD"))["world_size"] == "2"
        assert await look(served, node_id="n0") == [(0, 0, "n0", 0, "GPU-n0-0"), (0, 1, "n0", 1, "GPU-n0-1")]
        await young.open()
        other = await HandAgent(served, "n1", nnodes=(2, 2), workers=4).enter()
        assert (await other.started(1)).first_rank == 4
        assert await look(served, rank=7) == [(1, 7, "n1", 3, "GPU-n1-3")]
        assert await served.rank_map(0) == before


@pytest.mark.rule("H1")
async def test_unknown_runs_are_refused_by_name() -> None:
    async with serving() as served:
        calls: list[tuple[Any, Any]] = [
            (served.runs.GetRun, run_pb2.GetRunRequest),
            (served.runs.ListNodes, run_pb2.ListNodesRequest),
            (served.runs.ListFacts, run_pb2.ListFactsRequest),
            (served.maps.GetRankMap, rank_map_pb2.GetRankMapRequest),
            (served.maps.ListCycles, rank_map_pb2.ListCyclesRequest),
            (served.maps.LookupRank, rank_map_pb2.LookupRankRequest),
        ]
        for method, kind in calls:
            for name in ("nowhere", "", "x" * 100_000):
                told = await refused(method(kind(run_id=name)), NOT_FOUND, "UNKNOWN_RUN")
                assert told["run_id"] == (name[:128] or "default")
        watch = served.runs.WatchFacts(run_pb2.WatchFactsRequest(run_id="nowhere"))
        await refused(watch.read(), NOT_FOUND, "UNKNOWN_RUN")
        await HandAgent(served, "n0").join()
        for method, kind in calls[3:]:
            if kind is rank_map_pb2.GetRankMapRequest:
                await refused(method(kind()), NOT_FOUND, "UNKNOWN_CYCLE")
        listed = await served.maps.ListCycles(rank_map_pb2.ListCyclesRequest(run_id=RUN), timeout=WAIT_S)
        assert not listed.cycles


@pytest.mark.rule("F1")
async def test_what_this_version_has_not_is_unimplemented() -> None:
    async with serving() as served:
        later = [
            served.maps.WatchRankMap(rank_map_pb2.WatchRankMapRequest()).read(),
        ]
        for call in later:
            with pytest.raises(grpc.aio.AioRpcError) as seen:
                await call
            assert seen.value.code() is grpc.StatusCode.UNIMPLEMENTED
