"""PromoteService over gRPC: what an operator is shown, what is refused, what the nodes are told."""

from __future__ import annotations

import grpc
import pytest

from nvrx.v1 import common_pb2, promote_pb2, run_pb2

from .coordination import EXIT, RUN, STOP, STOPPED, WAIT_S, HandAgent, Served, exited, refused, serving, world

Code = grpc.StatusCode


async def promote(served: Served, node: str, **more: object) -> promote_pb2.PromoteResponse:
    request = promote_pb2.PromoteRequest(run_id=RUN, node_id=node, **more)  # type: ignore[arg-type]
    return await served.promotes.Promote(request, timeout=WAIT_S)  # type: ignore[no-any-return]


async def drain(served: Served, node: str, **more: object) -> promote_pb2.DrainResponse:
    request = promote_pb2.DrainRequest(run_id=RUN, node_id=node, **more)  # type: ignore[arg-type]
    return await served.promotes.Drain(request, timeout=WAIT_S)  # type: ignore[no-any-return]


def names(rank_map: common_pb2.RankMap) -> list[str]:
    return [one.node_id for one in rank_map.nodes]


async def stop_workers(agent: HandAgent) -> None:
    """Told to stop, it says that nothing is left."""
    await agent.until(STOP)
    await agent.report(
        exited(0, signal="SIGTERM", by_agent=True), exited(1, signal="SIGTERM", by_agent=True), phase=STOPPED
    )


@pytest.mark.rule("F1")
async def test_a_dry_run_shows_the_world_and_changes_nothing() -> None:
    async with serving() as served:
        await world(served)
        before = len(await served.facts())
        shown = await promote(served, "n2", replace_node_id="n0", immediate=True, dry_run=True)
        assert names(shown.rank_map) == ["n1", "n2"]
        assert [one.node_id for one in shown.rank_map.standbys] == ["n0"]
        assert shown.rank_map.cycle == 1
        assert shown.revision == before
        assert names((await drain(served, "n1", dry_run=True)).rank_map) == ["n0", "n2"]
        assert len(await served.facts()) == before
        assert names(await served.rank_map()) == ["n0", "n1"]


@pytest.mark.rule("F1", "D2")
async def test_a_promotion_now() -> None:
    async with serving() as served:
        agents = await world(served)
        shown = await promote(served, "n2", replace_node_id="n0", immediate=True)
        assert names(shown.rank_map) == ["n1", "n2"]
        assert shown.revision == len(await served.facts())
        await stop_workers(agents[0])
        given = await agents[2].started(1)
        assert given.group_rank == 1
        failed = await served.rank_map(0)
        assert (failed.failure.cause, failed.failure.node_id) == (common_pb2.CAUSE_PROMOTED, "n2")
        assert names(await served.rank_map()) == ["n1", "n2"]
        assert (await served.run_state()).restarts_used == 0


@pytest.mark.rule("F1", "E8")
async def test_a_drained_node_is_shown_and_may_return() -> None:
    async with serving() as served:
        agents = await world(served)
        await drain(served, "n1", immediate=True)
        await stop_workers(agents[1])
        await agents[2].started(1)
        nodes = {one.node_id: one for one in (await served.runs.ListNodes(run_pb2.ListNodesRequest(run_id=RUN))).nodes}
        assert nodes["n1"].state == common_pb2.NODE_STATE_DRAINING
        assert nodes["n2"].state == common_pb2.NODE_STATE_ACTIVE
        await refused(promote(served, "n1"), Code.FAILED_PRECONDITION, "ILLEGAL_WORLD")
        await served.promotes.Undrain(promote_pb2.UndrainRequest(run_id=RUN, node_id="n1"), timeout=WAIT_S)
        await served.promotes.Undrain(promote_pb2.UndrainRequest(run_id=RUN, node_id="n1"), timeout=WAIT_S)
        assert names((await promote(served, "n1", dry_run=True)).rank_map) == ["n0", "n1"]


@pytest.mark.rule("F1")
async def test_what_is_refused() -> None:
    async with serving() as served:
        await world(served, 2, nnodes=(2, 2))
        before = len(await served.facts())
        await refused(drain(served, "n1"), Code.FAILED_PRECONDITION, "ILLEGAL_WORLD")
        await refused(promote(served, "n1"), Code.INVALID_ARGUMENT, "INVALID_FIELD")
        await refused(promote(served, "n9"), Code.NOT_FOUND, "UNKNOWN_NODE")
        await refused(drain(served, "n1", wait=True, immediate=True), Code.INVALID_ARGUMENT, "INVALID_FIELD")
        missing = promote_pb2.DrainRequest(run_id="nowhere", node_id="n1")
        await refused(served.promotes.Drain(missing), Code.NOT_FOUND, "UNKNOWN_RUN")
        assert len(await served.facts()) == before


@pytest.mark.rule("F1", "D1")
async def test_a_stopped_run_ends_its_agents() -> None:
    async with serving() as served:
        agents = await world(served)
        await served.promotes.StopRun(promote_pb2.StopRunRequest(run_id=RUN), timeout=WAIT_S)
        for agent in agents:
            assert (await agent.until(EXIT)).desired.exit_code == 1
        run = await served.run_state()
        assert (run.state, run.reason) == (common_pb2.RUN_STATE_STOPPED, "stopped by an operator")
        again = served.promotes.StopRun(promote_pb2.StopRunRequest(run_id=RUN))
        await refused(again, Code.FAILED_PRECONDITION, "RUN_CLOSED")
