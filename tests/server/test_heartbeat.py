"""The heartbeat stream: what is said down it, what is kept of what comes up, and who may speak."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from nvrx.core.ids import Incarnation, NodeId, RunId
from nvrx.core.presence import MAX_CHECK, MAX_REASON, AgentPhase, StoreMode, Word
from nvrx.core.refused import Refused
from nvrx.v1 import common_pb2, heartbeat_pb2, run_pb2

from .coordination import (
    EXIT,
    FAILED,
    QUICK,
    RUN,
    RUN_WORKERS,
    RUNNING,
    STOP,
    STOPPED,
    WAIT,
    WAIT_S,
    HandAgent,
    Served,
    exited,
    info_of,
    serving,
    world,
)

PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
NOT_FOUND = grpc.StatusCode.NOT_FOUND


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as served:
        yield served


def reason_of(error: grpc.aio.AioRpcError, code: grpc.StatusCode) -> str:
    assert error.code() is code, error.details()
    return str(info_of(error).reason)


async def refusal(served: Served, request: heartbeat_pb2.HeartbeatRequest) -> grpc.aio.AioRpcError:
    """What a stream that begins with `request` is refused with."""
    agent = HandAgent(served, "n0")
    agent.call = served.heartbeats.Heartbeat()
    await agent.call.write(request)
    return await agent.ended()


@pytest.mark.rule("C1")
async def test_a_world_of_two_gets_its_assignments(served: Served) -> None:
    agents = [HandAgent(served, f"n{one}") for one in range(3)]
    for agent in agents:
        await agent.join()
    first = await agents[0].open()
    assert first.desired.action == WAIT
    assert not first.desired.HasField("cycle")
    assert first.journal_id == served.engine.journal_id
    assert first.lease_ttl.seconds == 60
    assert first.heartbeat_interval.seconds == 30
    await agents[1].open()
    await agents[2].open()
    given = [(await agent.until(RUN_WORKERS, 0)).desired.assignment for agent in agents[:2]]
    for rank, one in enumerate(given):
        assert one.HasField("group_rank")
        assert one.HasField("first_rank")
        assert (one.group_rank, one.first_rank, one.infra_rank) == (rank, 2 * rank, rank)
        assert (one.world_size, one.group_world_size, one.workers_per_node) == (4, 2, 2)
        assert one.max_restarts == 3
        assert (one.master_address, one.master_port) == ("10.0.0.0", 40001)
    spare = await agents[2].until(WAIT, 0)
    assert spare.desired.reason == "standby of cycle 0"
    assert not spare.desired.HasField("assignment")


@pytest.mark.rule("I1")
async def test_without_a_store_there_is_no_master_and_no_wait_for_a_port() -> None:
    async with serving(store=StoreMode.OFF) as served:
        agent = await HandAgent(served, "n0", nnodes=(1, 1)).enter()
        given = (await agent.until(RUN_WORKERS, 0)).desired.assignment
        assert (given.master_address, given.master_port) == ("", 0)


@pytest.mark.rule("E1")
async def test_every_word_is_acknowledged_in_order_and_a_late_lower_one_takes_nothing_back(served: Served) -> None:
    agent = HandAgent(served, "n0")
    agent.sequence = 5000
    await agent.join()
    await agent.open()
    assert (await agent.acknowledged(5001)).acknowledged == 5001
    assert (await agent.acknowledged(await agent.say())).acknowledged == 5002
    agent.sequence = 0
    await agent.say()
    assert (await agent.read()).acknowledged == 5002


@pytest.mark.rule("B2", "E1")
async def test_a_new_incarnation_begins_to_count_at_one(served: Served) -> None:
    """C049."""
    old = HandAgent(served, "n0")
    old.sequence = 5000
    await old.enter()
    await old.acknowledged(5001)
    await old.leave()
    young = await HandAgent(served, "n0", incarnation="second").enter()
    assert (await young.acknowledged(1)).acknowledged == 1
    assert (await young.acknowledged(await young.say())).acknowledged == 2


@pytest.mark.rule("D2", "D4")
async def test_a_failure_stops_all_and_the_same_report_again_changes_nothing(served: Served) -> None:
    agents = await world(served)
    await agents[1].report(exited(1, 3, message="ValueError: x"), exited(0, None, signal="SIGABRT"))
    before = await served.facts()
    await agents[1].report(exited(1, 3, message="ValueError: x"), exited(0, None, signal="SIGABRT"))
    await agents[1].report(exited(1, 9))
    assert await served.facts() == before
    kinds = [one.kind for one in before]
    assert kinds.count("WorkersExited") == 1
    assert kinds.count("CycleEnded") == 1
    ending = next(one for one in before if one.kind == "CycleEnded")
    assert ending.cycle == 0
    assert ending.node_id == "n1"


@pytest.mark.rule("D2")
async def test_nodes_of_an_ended_run_are_told_to_exit_with_its_code(served: Served) -> None:
    agents = [HandAgent(served, f"n{one}", nnodes=(2, 2)) for one in range(2)]
    for agent in agents:
        request = agent.join_request()
        request.settings.max_restarts = 0
        await served.joins.Join(request, timeout=WAIT_S)
        await agent.open()
    for agent in agents:
        await agent.started(0)
    await agents[0].report(exited(0, 1))
    for agent in agents:
        told = (await agent.until(EXIT)).desired
        assert told.exit_code == 1
        assert "max_restarts 0 is used up" in told.reason
        assert agent.last is not None
        assert agent.last.failed_cycle == 0


@pytest.mark.rule("D2", "D9")
async def test_a_cycle_that_ends_short_of_nodes_stops_its_workers() -> None:
    async with serving(timing=QUICK) as served:
        agents = [await HandAgent(served, f"n{one}", nnodes=(2, 2)).enter() for one in range(2)]
        for agent in agents:
            await agent.started(0)
        await served.until_fact("CycleRunning")
        await agents[1].break_stream()
        told = await agents[0].until(STOP, 0)
        assert told.failed_cycle == 0
        assert "1 of 2 joined: n0" in (await served.run_state()).waiting_reason
        await agents[0].acknowledged(await agents[0].say(STOPPED, 0))
        assert (await served.run_state()).phase == 1


@pytest.mark.rule("B2", "E1")
async def test_who_has_not_joined_is_refused_and_becomes_no_member(served: Served) -> None:
    """C112."""
    unknown = HandAgent(served, "n7").heartbeat()
    assert reason_of(await refusal(served, unknown), NOT_FOUND) == "UNKNOWN_RUN"
    assert reason_of(await refusal(served, heartbeat_pb2.HeartbeatRequest()), NOT_FOUND) == "UNKNOWN_RUN"
    await HandAgent(served, "n0").join()
    assert reason_of(await refusal(served, unknown), NOT_FOUND) == "UNKNOWN_NODE"
    assert reason_of(await refusal(served, heartbeat_pb2.HeartbeatRequest()), NOT_FOUND) == "UNKNOWN_NODE"
    long = heartbeat_pb2.HeartbeatRequest(run_id=RUN, node_id="é" * 500_000, incarnation="x" * 1_000_000)
    assert reason_of(await refusal(served, long), NOT_FOUND) == "UNKNOWN_NODE"
    stale = HandAgent(served, "n0", incarnation="another").heartbeat()
    assert reason_of(await refusal(served, stale), PRECONDITION) == "STALE_INCARNATION"
    assert list(served.engine.runs[RunId(RUN)].run.members) == ["n0"]


@pytest.mark.rule("B2")
async def test_a_refused_heartbeat_is_one_short_log_line(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    await HandAgent(served, "n0").join()
    caplog.set_level("INFO", "nvrx.coord")
    await refusal(served, heartbeat_pb2.HeartbeatRequest(run_id=RUN, node_id="x" * 1_000_000, incarnation="y"))
    lines = [one.getMessage() for one in caplog.records if "refused" in one.getMessage()]
    assert len(lines) == 1
    assert len(lines[0]) < 4096


@pytest.mark.rule("B2")
async def test_a_stream_speaks_for_one_node_only(served: Served) -> None:
    agent = await HandAgent(served, "n0").enter()
    await HandAgent(served, "n1").join()
    await agent.call.write(HandAgent(served, "n1").heartbeat())
    assert reason_of(await agent.ended(), grpc.StatusCode.INVALID_ARGUMENT) == "INVALID_FIELD"


@pytest.mark.rule("B2", "E1")
async def test_a_second_stream_takes_over_from_the_first(served: Served) -> None:
    agents = await world(served)
    first = agents[0].call
    await agents[0].open()
    assert (await agents[0].until(RUN_WORKERS, 0)).desired.assignment.group_rank == 0
    second, agents[0].call = agents[0].call, first
    error = await agents[0].ended()
    assert error.code() is PRECONDITION
    assert "a newer stream of node n0 took over" in str(error.details())
    agents[0].call = second
    assert served.engine.runs[RunId(RUN)].presence.nodes[NodeId("n0")].connected
    await agents[0].acknowledged(await agents[0].say())
    assert (await served.run_state()).cycle == 0


@pytest.mark.rule("B2", "E1")
async def test_a_stream_that_was_given_up_takes_nothing_over_when_it_comes_late(served: Served) -> None:
    """Both had been cut off: what was sent on the older one's connection arrived after the newer one."""
    agents = await world(served)
    given_up = agents[0].heartbeat()
    await agents[0].open()
    error = await refusal(served, given_up)
    assert error.code() is PRECONDITION
    assert "a newer stream of node n0 took over" in str(error.details())
    await agents[0].acknowledged(await agents[0].say())
    assert served.engine.runs[RunId(RUN)].presence.nodes[NodeId("n0")].connected


@pytest.mark.rule("E1", "B2")
async def test_a_broken_stream_that_comes_back_within_the_grace_costs_nothing(served: Served) -> None:
    agents = await world(served)
    before = await served.facts()
    await agents[1].break_stream()
    await agents[1].join()
    again = await agents[1].open()
    assert again.desired.action == RUN_WORKERS
    assert again.desired.assignment.group_rank == 1
    assert await served.facts() == before


@pytest.mark.rule("E1", "E4")
async def test_a_broken_stream_that_stays_away_makes_the_node_lost_and_it_is_told_so() -> None:
    async with serving(timing=QUICK) as served:
        agents = await world(served)
        await agents[1].break_stream()
        lost = await served.until_fact("NodeLost")
        assert lost.node_id == "n1"
        assert "its stream broke" in lost.text
        assert reason_of(await refusal(served, agents[1].heartbeat()), PRECONDITION) == "STALE_INCARNATION"
        again = HandAgent(served, "n1", incarnation="second")
        await again.enter()
        assert (await again.until(WAIT, 1)).desired.action == WAIT


@pytest.mark.rule("B2", "E1")
async def test_late_words_of_an_incarnation_whose_seat_was_taken_change_nothing(served: Served) -> None:
    """The old stream may still be open, and its words under way, when the new incarnation is in."""
    old = await HandAgent(served, "n0").enter()
    hosted = served.engine.runs[RunId(RUN)]
    session = hosted.sessions[NodeId("n0")]
    await HandAgent(served, "n0", incarnation=old.incarnation).leave()
    young = HandAgent(served, "n0", incarnation="second")
    await young.join()
    assert hosted.presence.nodes[NodeId("n0")].incarnation == Incarnation("second")
    before = hosted.presence.nodes[NodeId("n0")].lease_until
    with pytest.raises(Refused, match="second"):
        served.engine.heard(session, Word(AgentPhase.RUNNING))
    assert hosted.presence.nodes[NodeId("n0")].lease_until == before
    assert hosted.presence.nodes[NodeId("n0")].phase.value == "IDLE"
    assert reason_of(await old.ended(), PRECONDITION) == "STALE_INCARNATION"


@pytest.mark.rule("E1")
async def test_words_of_a_later_version_are_borne(served: Served) -> None:
    agent = await HandAgent(served, "n0").enter()
    strange = agent.heartbeat([heartbeat_pb2.WorkerReport(outcome=77, cycle=4, local_rank=-3, exit_code=1)])  # type: ignore[arg-type]
    strange.phase = 99  # type: ignore[assignment]
    await agent.call.write(strange)
    await agent.acknowledged(strange.sequence)
    assert len(await served.facts()) == 2


@pytest.mark.rule("D1")
async def test_a_cycle_runs_once_all_its_nodes_say_so(served: Served) -> None:
    agents = [await HandAgent(served, f"n{one}", nnodes=(2, 2)).enter() for one in range(2)]
    await agents[0].started(0)
    assert (await served.run_state()).phase == 2
    await agents[1].acknowledged(await agents[1].say(RUNNING, 7))
    assert (await served.run_state()).phase == 2
    await agents[1].started(0)
    await served.until_fact("CycleRunning")
    run = await served.run_state()
    assert (run.phase, run.cycle_state, run.active_nodes, run.standby_nodes) == (3, 3, 2, 0)


@pytest.mark.rule("J4")
async def test_many_streams_take_no_thread_each(served: Served) -> None:
    """Streams that are open and silent keep nobody from being answered."""
    calls = [served.heartbeats.Heartbeat() for _ in range(200)]
    agents = await asyncio.gather(*(HandAgent(served, f"n{one}", nnodes=(1, 100)).enter() for one in range(80)))
    assert len(agents) == 80
    nodes = (await served.runs.ListNodes(run_pb2.ListNodesRequest(run_id=RUN), timeout=WAIT_S)).nodes
    assert len(nodes) == 80
    for call in calls:
        call.cancel()


@pytest.mark.rule("D4")
async def test_late_exits_become_consequences(served: Served) -> None:
    agents = await world(served)
    await agents[0].report(exited(0, 1))
    await agents[1].until(RUN_WORKERS, 1)
    await agents[1].acknowledged(
        await agents[1].say(FAILED, 0, [exited(0, None, signal="SIGSEGV"), exited(1, None, by_agent=True)])
    )
    failure = (await served.rank_map(0)).failure
    assert (failure.node_id, failure.rank, failure.exit_code) == ("n0", 0, 1)
    assert [(one.node_id, one.rank, one.signal) for one in failure.consequences] == [("n1", 2, "SIGSEGV")]
    assert (await served.run_state()).restarts_used == 1


@pytest.mark.rule("G11")
async def test_what_a_node_says_of_its_health_is_shown_in_one_line(served: Served) -> None:
    """What a check printed is of any kind and length; a state of a later version says nothing."""
    agents = await world(served)
    reason = "first\nsecond \x1b[31m" + "x" * 10_000
    told = common_pb2.Health(state=common_pb2.HEALTH_STATE_DEGRADED, check="c" * 200, reason=reason)
    for health in (told, common_pb2.Health(state=99)):  # type: ignore[arg-type]
        request = agents[0].heartbeat()
        request.health.CopyFrom(health)
        await agents[0].call.write(request)
        await agents[0].acknowledged(request.sequence)
    nodes = (await served.runs.ListNodes(run_pb2.ListNodesRequest(run_id=RUN))).nodes
    shown = {one.node_id: one.health for one in nodes}
    assert shown["n0"].state == common_pb2.HEALTH_STATE_DEGRADED
    assert shown["n0"].reason.startswith("first second [31mxxx")
    assert (len(shown["n0"].reason), len(shown["n0"].check)) == (MAX_REASON, MAX_CHECK)
    assert [one.HasField("health") for one in nodes if one.node_id != "n0"] == [False, False]
    notices = (await served.run_state()).health_notices
    assert len(notices) == 1
    assert notices[0].startswith("degraded, and chosen last for the next world: n0 (c")


@pytest.mark.rule("G11", "E8")
async def test_a_node_that_fails_a_check_is_told_that_it_is_excluded(served: Served) -> None:
    agents = await world(served)
    request = agents[2].heartbeat()
    request.health.CopyFrom(common_pb2.Health(state=common_pb2.HEALTH_STATE_FAILED, check="disk", reason="is full"))
    await agents[2].call.write(request)
    told = await agents[2].read()
    while not told.desired.excluded:
        told = await agents[2].read()
    assert told.desired.reason == "excluded: unhealthy, disk: is full"
    await served.until_fact("NodeFailedCheck")
    nodes = (await served.runs.ListNodes(run_pb2.ListNodesRequest(run_id=RUN))).nodes
    assert {one.node_id: one.state for one in nodes}["n2"] == common_pb2.NODE_STATE_UNHEALTHY
    assert (await served.run_state()).standby_nodes == 0


@pytest.mark.rule("G11", "C1")
async def test_what_a_node_says_first_counts_before_it_may_be_chosen() -> None:
    """Its stream alone makes it a candidate: where the store asks nothing of nodes, a world could be chosen at once."""
    async with serving(store=StoreMode.OFF) as served:
        agents = [HandAgent(served, f"n{number}", nnodes=(2, 3)) for number in range(3)]
        for agent in agents:
            await agent.join()
        for agent in agents[1:]:
            await agent.open()
        agents[0].call = served.heartbeats.Heartbeat()
        request = agents[0].heartbeat()
        request.health.CopyFrom(common_pb2.Health(state=common_pb2.HEALTH_STATE_FAILED, check="disk", reason="is full"))
        await agents[0].call.write(request)
        await served.until_fact("NodeFailedCheck")
        assert "WorldChosen" not in {one.kind for one in await served.facts()}
