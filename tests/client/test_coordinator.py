"""An agent among several coordinators, played by the test: it goes to whom it is sent, and learns of others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from grpc_status import rpc_status

from nvrx.client.coordinator import Coordinator, GivenUp, admission
from nvrx.core.commands import Join
from nvrx.core.endpoint import HostPort, parse_endpoint
from nvrx.core.facts import NodeInfo
from nvrx.core.ids import Incarnation, NodeId
from nvrx.core.refused import Reason, Refused
from nvrx.core.shape import SettingsWish, Shape
from nvrx.errors import to_status
from nvrx.v1 import join_pb2, join_pb2_grpc

WAIT_S = 20.0


class Played(join_pb2_grpc.JoinServiceServicer):
    """A coordinator: it leads, or names who does (`leader`), or knows nobody (`leader` is empty)."""

    def __init__(self) -> None:
        self.leads = False
        self.leader = ""
        self.others: list[str] = []
        self.asked = 0
        self.was_asked = asyncio.Event()
        self.address = ""

    async def Join(self, request: join_pb2.JoinRequest, context: Any) -> join_pb2.JoinResponse:
        self.asked += 1
        self.was_asked.set()
        if self.leads:
            return join_pb2.JoinResponse(run_id="r", journal_id="j", coordinators=self.others)
        details = {"leader": self.leader} if self.leader else {}
        await context.abort_with_status(rpc_status.to_status(to_status(Refused(Reason.NOT_LEADER, "no", details))))
        raise AssertionError("unreachable: abort raises")

    async def Leave(self, request: join_pb2.LeaveRequest, context: Any) -> join_pb2.LeaveResponse:
        raise AssertionError("no node of these tests leaves")


@contextlib.asynccontextmanager
async def played(count: int) -> AsyncIterator[list[Played]]:
    """So many coordinators, each on a port of its own."""
    async with contextlib.AsyncExitStack() as stack:
        coordinators = []
        for _ in range(count):
            one = Played()
            server = grpc.aio.server()
            join_pb2_grpc.add_JoinServiceServicer_to_server(one, server)
            one.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            stack.push_async_callback(server.stop, None)
            coordinators.append(one)
        yield coordinators


def command(address: str, replaces: Incarnation | None) -> Join:
    node = NodeInfo(NodeId("n0"), Incarnation("life"), address, 1)
    return Join(node, Shape(1, 1, 1), SettingsWish(), False)


async def admitted(coordinator: Coordinator, patience_s: float = WAIT_S) -> None:
    async with asyncio.timeout(2 * WAIT_S):
        assert await admission(coordinator, "r", command, None, patience_s, asyncio.Event()) is not None


@contextlib.asynccontextmanager
async def towards(*addresses: str) -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(tuple(parse_endpoint(one) for one in addresses), None)
    yield coordinator
    await coordinator.close()


@pytest.mark.rule("E6")
async def test_it_goes_to_the_leader_that_it_was_told_of() -> None:
    """Past one that is in between on its list, and to one that is not on it at all."""
    async with played(4) as (first, between, leader, unlisted):
        leader.leads = True
        first.leader = leader.address
        async with towards(first.address, between.address, leader.address) as coordinator:
            await admitted(coordinator)
            assert str(coordinator.endpoint) == leader.address
        assert (first.asked, between.asked, leader.asked) == (1, 0, 1)
        first.leader, unlisted.leads = unlisted.address, True
        async with towards(first.address) as coordinator:
            await admitted(coordinator)
            assert str(coordinator.endpoint) == unlisted.address


@pytest.mark.rule("E6")
async def test_it_goes_round_where_nobody_knows_a_leader() -> None:
    async with played(3) as (first, second, leader):
        leader.leads = True
        async with towards(first.address, second.address, leader.address) as coordinator:
            await admitted(coordinator)
        assert (first.asked, second.asked, leader.asked) == (1, 1, 1)


@pytest.mark.rule("E6")
@pytest.mark.parametrize("named", ["127.0.0.1:1", "no address", ""])
async def test_it_is_not_held_up_by_a_leader_that_cannot_be_had(named: str) -> None:
    """As just after the leader's death, when the others still name it."""
    async with played(2) as (first, second):
        first.leader = named
        async with towards(first.address, second.address) as coordinator:
            going = asyncio.create_task(admitted(coordinator))
            async with asyncio.timeout(WAIT_S):
                await second.was_asked.wait()
            second.leads = True
            await going


@pytest.mark.rule("E6")
async def test_without_any_leader_it_gives_up_after_its_join_timeout() -> None:
    async with played(2) as (first, second), towards(first.address, second.address) as coordinator:
        with pytest.raises(GivenUp, match="does not lead") as seen:
            await admitted(coordinator, patience_s=0.3)
        assert seen.value.exit_code == 4


@pytest.mark.rule("E6")
async def test_it_learns_of_other_coordinators_as_it_joins() -> None:
    async with played(2) as (leader, other):
        leader.leads = True
        leader.others = [leader.address, other.address, "no address", other.address]
        async with towards(leader.address) as coordinator:
            await admitted(coordinator)
            seen = []
            for _ in range(3):
                await coordinator.next_endpoint()
                seen.append(str(coordinator.endpoint))
            assert seen == [other.address, leader.address, other.address]
            coordinator.learn([HostPort("127.0.0.1", 1)])
            await coordinator.next_endpoint()
            assert str(coordinator.endpoint) == "127.0.0.1:1"
