"""Joining over gRPC: who may be a member, and how a refusal looks on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from nvrx.core.commands import Join
from nvrx.core.facts import NodeInfo
from nvrx.core.ids import ArrayRank, DomainId, GroupId, Incarnation, NodeId, RunId
from nvrx.core.parallel import ParallelSizes
from nvrx.core.shape import SettingsWish, Shape
from nvrx.core.topology import OrderSource
from nvrx.v1 import common_pb2, heartbeat_pb2, join_pb2
from nvrx.wire.membership import join_command, join_request

from .coordination import QUICK, RUN, WAIT_S, HandAgent, Served, exited, refused, serving, world

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PRECONDITION = grpc.StatusCode.FAILED_PRECONDITION
NOT_FOUND = grpc.StatusCode.NOT_FOUND
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as served:
        yield served


@pytest.mark.rule("B2", "E1")
async def test_join_tells_how_to_stay_a_member(served: Served) -> None:
    answer = await HandAgent(served, "n0").join()
    assert answer.lease_ttl.seconds == 60
    assert answer.heartbeat_interval.seconds == 30
    assert answer.reconnect_grace.seconds == 30
    assert not answer.HasField("cycle")
    assert answer.run_id == RUN
    assert answer.journal_id == served.engine.journal_id
    assert answer.revision == 2
    assert answer.version


@pytest.mark.rule("B2")
async def test_join_is_idempotent_also_at_the_same_time(served: Served) -> None:
    agent = HandAgent(served, "n0")
    first, second, third = await asyncio.gather(agent.join(), agent.join(), agent.join())
    assert first == second == third
    again = await agent.join()
    assert again == first
    assert [one.kind for one in await served.facts()] == ["RunOpened", "NodeJoined"]
    run = await served.run_state()
    assert run.standby_nodes == 1
    assert "1 of 2 joined" in run.waiting_reason


@pytest.mark.rule("A2")
async def test_another_shape_is_refused_with_every_differing_field(served: Served) -> None:
    await HandAgent(served, "n0").join(fingerprint={"NCCL_DEBUG": "INFO", "same": "x"})
    other = HandAgent(served, "n1", nnodes=(3, 4), workers=8)
    request = other.join_request(fingerprint={"NCCL_DEBUG": "WARN", "same": "x", "TORCH_X": "1"})
    request.shape.checkpoint_path = "/ckpt"
    request.settings.max_restarts = 7
    request.settings.join_timeout.FromSeconds(5)
    told = await refused(served.joins.Join(request), INVALID, "SHAPE_MISMATCH")
    assert told == {
        "run_id": RUN,
        "min_nodes.run": "2",
        "min_nodes.node": "3",
        "max_nodes.run": "3",
        "max_nodes.node": "4",
        "workers_per_node.run": "2",
        "workers_per_node.node": "8",
        "checkpoint_path.run": "",
        "checkpoint_path.node": "/ckpt",
        "NCCL_DEBUG.run": "INFO",
        "NCCL_DEBUG.node": "WARN",
        "TORCH_X.run": "(unset)",
        "TORCH_X.node": "1",
        "max_restarts.run": "3",
        "max_restarts.node": "7",
        "join_timeout_s.run": "600.0",
        "join_timeout_s.node": "5.0",
    }
    assert len(await served.facts()) == 2


@pytest.mark.rule("A2", "J4")
@pytest.mark.parametrize("text", ["x" * 300, "é" * 300, "\n\x1b[31m" * 100], ids=["long", "unicode", "control"])
async def test_a_refusal_with_many_long_values_still_reaches_a_default_client(served: Served, text: str) -> None:
    await HandAgent(served, "n0").join(fingerprint={f"NCCL_{one}": text for one in range(100)})
    request = HandAgent(served, "n1", workers=8).join_request(fingerprint={"NCCL_0": "other"})
    async with grpc.aio.insecure_channel(str(served.address)) as plain:
        call = plain.unary_unary(
            "/nvrx.v1.JoinService/Join",
            request_serializer=join_pb2.JoinRequest.SerializeToString,
            response_deserializer=join_pb2.JoinResponse.FromString,
        )
        told = await refused(call(request), INVALID, "SHAPE_MISMATCH")
    assert told["workers_per_node.node"] == "8"


@pytest.mark.rule("B2")
async def test_a_second_agent_with_the_same_node_id_is_refused_while_the_first_lives(served: Served) -> None:
    await HandAgent(served, "n0").enter()
    other = HandAgent(served, "n0", incarnation="other")
    told = await refused(
        served.joins.Join(other.join_request(address="10.9.9.9", pid=77)), PRECONDITION, "NODE_ALREADY_JOINED"
    )
    assert float(told.pop("free_in_s")) <= served.engine.timing.lease_ttl_s
    assert told == {
        "node_id": "n0",
        "joined_address": "10.0.0.0",
        "joined_pid": "1000",
        "joined_host": "",
        "joined_incarnation": "n0-life-1",
        "address": "10.9.9.9",
        "pid": "77",
        "lease_ttl_s": str(served.engine.timing.lease_ttl_s),
    }


@pytest.mark.rule("B2")
async def test_a_new_incarnation_takes_the_place_of_one_that_left(served: Served) -> None:
    first = HandAgent(served, "n0")
    await first.join()
    await first.leave(reason="asked to")
    await first.leave(reason="asked to")
    await HandAgent(served, "n0", incarnation="second").join()
    assert [one.kind for one in await served.facts()] == ["RunOpened", "NodeJoined", "NodeLeft", "NodeJoined"]
    await refused(served.joins.Join(first.join_request()), PRECONDITION, "NODE_ALREADY_JOINED")


@pytest.mark.rule("B2", "E1")
async def test_the_incarnation_that_was_declared_lost_must_join_as_a_new_one() -> None:
    async with serving(timing=QUICK) as served:
        agent = await HandAgent(served, "n0").enter()
        await agent.break_stream()
        lost = await served.until_fact("NodeLost")
        assert lost.node_id == "n0"
        await refused(served.joins.Join(agent.join_request()), PRECONDITION, "STALE_INCARNATION")
        await HandAgent(served, "n0", incarnation="second").join()


@pytest.mark.rule("B4")
async def test_two_nodes_with_one_place_in_order_are_refused(served: Served) -> None:
    await HandAgent(served, "n0").join(order_sources={"PROCID": "4"})
    request = HandAgent(served, "n1").join_request(order_sources={"PROCID": "4"})
    told = await refused(served.joins.Join(request), PRECONDITION, "DUPLICATE_INFRA_RANK")
    assert told == {
        "node_id": "n1",
        "other_node_id": "n0",
        "variable": "SLURM_PROCID",
        "value": "4",
        "lease_ttl_s": str(served.engine.timing.lease_ttl_s),
    }


@pytest.mark.rule("A5")
async def test_a_node_beyond_max_is_refused_and_harms_nobody(served: Served) -> None:
    agents = await world(served)
    request = HandAgent(served, "n3").join_request()
    told = await refused(served.joins.Join(request), EXHAUSTED, "RUN_FULL")
    assert told == {"run_id": RUN, "nodes": "3", "max_nodes": "3"}
    assert (await agents[0].acknowledged(await agents[0].say())).desired.cycle == 0


@pytest.mark.rule("A3", "D8")
async def test_a_closed_run_is_refused_with_its_outcome_unless_reopened(served: Served) -> None:
    agents = await world(served)
    for agent in agents[:2]:
        await agent.report(exited_well(0), exited_well(1), phase=common_pb2.AGENT_PHASE_SUCCEEDED)
    for agent in agents:
        ending = await agent.until(common_pb2.DESIRED_ACTION_EXIT)
        assert ending.desired.HasField("exit_code")
        assert ending.desired.exit_code == 0
    request = HandAgent(served, "n0", incarnation="next").join_request()
    told = await refused(served.joins.Join(request), PRECONDITION, "RUN_CLOSED")
    assert told == {"run_id": RUN, "state": "SUCCEEDED", "exit_code": "0"}
    request.reopen = True
    answer = await served.joins.Join(request, timeout=WAIT_S)
    assert answer.cycle == 0
    assert (await served.run_state()).state == common_pb2.RUN_STATE_OPEN


def exited_well(local_rank: int) -> heartbeat_pb2.WorkerReport:
    return exited(local_rank, 0)


@pytest.mark.rule("A3")
async def test_a_declared_run_is_served_alone() -> None:
    async with serving(run_id=RunId("mine")) as served:
        told = await refused(served.joins.Join(HandAgent(served, "n0").join_request()), NOT_FOUND, "UNKNOWN_RUN")
        assert told == {"run_id": RUN, "served_run_id": "mine"}
        answer = await HandAgent(served, "n0", run_id="").join()
        assert answer.run_id == "mine"


@pytest.mark.rule("A8")
async def test_another_wire_version_is_refused_with_both(served: Served) -> None:
    request = HandAgent(served, "n0").join_request(wire_version=2)
    told = await refused(served.joins.Join(request), PRECONDITION, "WIRE_VERSION_MISMATCH")
    assert told == {"agent_wire_version": "2", "coordinator_wire_version": "1"}


@pytest.mark.rule("B1", "G8", "J4")
@pytest.mark.parametrize(
    "name", ["", "a/b", "..", "a\nb", "\x1b[31m", "é", "x" * 129, "x" * 3_900_000], ids=lambda name: ascii(name[:8])
)
@pytest.mark.parametrize("field", ["node_id", "incarnation", "address", "run_id"])
async def test_a_name_that_could_do_harm_is_refused(served: Served, name: str, field: str) -> None:
    request = HandAgent(served, "n0").join_request()
    setattr(request, field, name)
    if field == "run_id" and not name:
        assert (await served.joins.Join(request, timeout=WAIT_S)).run_id == "default"
        return
    await refused(served.joins.Join(request), INVALID, "INVALID_FIELD")
    assert not served.engine.runs


@pytest.mark.rule("J4")
@pytest.mark.parametrize("last_cycle", [2**31 - 1, -1])
async def test_a_cycle_that_no_run_reaches_is_refused(served: Served, last_cycle: int) -> None:
    request = HandAgent(served, "n0").join_request(last_cycle=last_cycle)
    await refused(served.joins.Join(request), INVALID, "INVALID_FIELD")
    assert not served.engine.runs


@pytest.mark.rule("J4")
async def test_texts_that_the_run_keeps_have_a_limit(served: Served) -> None:
    request = HandAgent(served, "n0").join_request(fingerprint={"command": "x" * 300_000})
    await refused(served.joins.Join(request), INVALID, "INVALID_FIELD")
    request = HandAgent(served, "n0").join_request()
    request.shape.checkpoint_path = "x" * 3_900_000
    await refused(served.joins.Join(request), INVALID, "INVALID_FIELD")
    assert not served.engine.runs


@pytest.mark.rule("A5")
@pytest.mark.parametrize("nnodes", [(0, 0), (3, 2), (-1, 2), (1, 200_000)])
async def test_an_impossible_world_is_refused(served: Served, nnodes: tuple[int, int]) -> None:
    request = HandAgent(served, "n0", nnodes=nnodes).join_request()
    await refused(served.joins.Join(request), INVALID, "ILLEGAL_WORLD")
    assert not served.engine.runs


@pytest.mark.rule("B2")
async def test_leaving_names_what_is_unknown(served: Served) -> None:
    unknown = HandAgent(served, "n9")
    await refused(unknown.leave(), NOT_FOUND, "UNKNOWN_RUN")
    await HandAgent(served, "n0").join()
    await refused(unknown.leave(), NOT_FOUND, "UNKNOWN_NODE")
    await refused(HandAgent(served, "n0", incarnation="late").leave(), PRECONDITION, "STALE_INCARNATION")


@pytest.mark.rule("A2", "A6", "A8", "B6")
@pytest.mark.parametrize(
    "parallel", [ParallelSizes(), ParallelSizes(2, 3, 4, 5, 6, 7), ParallelSizes(micro_batch_size=1)], ids=str
)
def test_a_join_is_read_as_it_was_sent(parallel: ParallelSizes) -> None:
    """What is as good as not given is not sent, so that an older coordinator and an older agent say the same."""
    info = NodeInfo(
        NodeId("n0"),
        Incarnation("x"),
        "10.0.0.1",
        1,
        order_sources={OrderSource.NODE_ID: "n0"},
        array_rank=ArrayRank(0),
        replacement_group_id=GroupId("3"),
        domain_id=DomainId("D1"),
        group_array_job_id="36",
    )
    command = Join(
        info, Shape(2, 3, 8, "/c", {"command": "python {node:n0}"}, parallel=parallel), SettingsWish(max_restarts=0)
    )
    request = join_request(RunId("r"), command)
    assert join_command(join_pb2.JoinRequest.FromString(request.SerializeToString())) == command
    assert request.shape.HasField("parallel_sizes") == (parallel != ParallelSizes())


@pytest.mark.rule("A6")
async def test_an_illegal_world_is_refused_with_the_arithmetic(served: Served) -> None:
    request = HandAgent(served, "n0", nnodes=(2, 2), workers=8).join_request()
    request.shape.parallel_sizes.tensor_parallel = 3
    with pytest.raises(grpc.aio.AioRpcError, match="16 = 2 nodes x 8 workers is not a multiple of 3 = tensor 3"):
        await served.joins.Join(request)
    await refused(served.joins.Join(request), INVALID, "ILLEGAL_WORLD")
    assert not served.engine.runs
