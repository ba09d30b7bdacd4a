"""A node's membership beside torch's agent, which these tests play; the coordinator is real, and torch is not here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from nvrx.client.config import resolve
from nvrx.client.torchrun_agent import HOW_UNKNOWN, TorchrunAgent
from nvrx.client.torchrun_launch import Launch, Rendezvous, join_options
from nvrx.client.torchrun_seat import Ended, Given, Parting, Seat
from nvrx.client.torchrun_thread import MembershipThread, grpc_environment
from nvrx.core.facts import WorkerExit
from nvrx.core.ids import CycleNumber, LocalRank
from tests.server.coordination import RUN, WAIT_S, Served, serving


class Node:
    """One torchrun, without torch."""

    def __init__(self, name: str, endpoint: str, nnodes: tuple[int, int], log_dir: Path) -> None:
        conf = {"node_id": name, "log_dir": str(log_dir), "last_call": "0.1", "restart_backoff": "0"}
        wish = Rendezvous(endpoint, RUN, *nnodes, None, conf)
        config = resolve(join_options(wish, Launch(2, ("true",), 100)), {"PATH": os.environ["PATH"]})
        self.seat = Seat()
        self.thread = MembershipThread(config, self.seat, "0.0-test")

    async def take(self) -> Given:
        given = await self.end_of_waiting()
        assert given is not None
        return given

    async def end_of_waiting(self) -> Given | None:
        try:
            async with asyncio.timeout(WAIT_S):
                return await asyncio.to_thread(self.seat.take)
        except TimeoutError:
            self.seat.end(Ended(1, "the test is over"))  # else its thread waits for ever
            raise

    async def heard(self, tell: Callable[[TorchrunAgent], None]) -> None:
        """Tell the membership something, and wait until it has taken it in."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()

        def told(agent: TorchrunAgent) -> None:
            tell(agent)
            loop.call_soon_threadsafe(done.set)

        self.thread.post(told)
        async with asyncio.timeout(WAIT_S):
            await done.wait()

    async def part(self, parting: Parting) -> None:
        await asyncio.to_thread(self.thread.part, parting)
        assert not self.thread.is_alive


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving() as served:
        yield served


async def offered(node: Node) -> None:
    async with asyncio.timeout(WAIT_S):
        while node.seat.offered_cycle is None:  # noqa: ASYNC110 - another thread offers it
            await asyncio.sleep(0.01)


async def test_a_place_is_kept_where_torchs_agent_is_slow_to_ask_for_the_first(served: Served, tmp_path: Path) -> None:
    """It asks for one while it holds none: whatever was offered meanwhile is not what it is done with."""
    node = Node("a", str(served.address), (1, 1), tmp_path)
    await offered(node)
    await node.heard(lambda agent: agent.came_for_next(None))
    assert (await node.take()).assignment.cycle == 0
    await node.heard(lambda agent: agent.came_for_next(None))
    assert not node.seat.is_unwanted
    await node.part(Parting("test", succeeded=True))
    run = await served.run_state()
    assert [one.kind for one in await served.facts()][-1] == "RunClosed", run
    ended = node.seat.ended
    assert ended is not None
    assert ended.exit_code == 0


@pytest.mark.rule("D2", "D4")
async def test_a_place_that_was_not_taken_is_taken_back(served: Served, tmp_path: Path) -> None:
    """Its cycle ended first: torch's agent hears of the next one only; no port waits for workers that never were."""
    slow, failing = (Node(name, str(served.address), (2, 2), tmp_path) for name in ("a", "b"))
    await offered(slow)
    first = await failing.take()
    await failing.heard(lambda agent: agent.are_healthy(first.assignment.cycle))
    await failing.heard(lambda agent: agent.came_for_next(first.assignment.cycle))
    assert (await failing.take()).assignment.cycle == 1
    await served.until_fact("WorldChosen", beyond=(await served.until_fact("CycleEnded")).revision)
    async with asyncio.timeout(WAIT_S):
        while slow.seat.offered_cycle != 1:  # noqa: ASYNC110 - another thread offers it
            await asyncio.sleep(0.01)
    given = await slow.take()
    assert given.assignment.cycle == 1
    assert (given.assignment.group_rank, given.assignment.world_size) == (0, 4)
    assert given.environment["NVRX_CYCLE"] == "1"
    assert given.environment["NVRX_FAILED_RANK_MAP"].endswith("a/cycle-0/failed-rank-map.json")
    for node in (slow, failing):
        await node.part(Parting("test"))
    rank_map = await served.rank_map(0)
    ends = {one.node_id: [each.stopped_by_agent for each in one.outcome.exits] for one in rank_map.nodes}
    assert ends == {"a": [True, True], "b": [False, True]}
    assert rank_map.failure.message == HOW_UNKNOWN
    assert [one.kind for one in await served.facts()].count("NodeLeft") == 2


@pytest.mark.rule("D8")
async def test_the_last_success_is_told_when_torchs_agents_have_met(served: Served, tmp_path: Path) -> None:
    """Told before, it would close the store that they meet in: all their workers have ended then."""
    node = Node("a", str(served.address), (1, 1), tmp_path)
    cycle = (await node.take()).assignment.cycle
    await node.heard(lambda agent: agent.are_healthy(cycle))
    for rank in (1, 0):
        await node.heard(lambda agent, rank=rank: agent._on_exit(cycle, WorkerExit(LocalRank(rank), 0)))  # type: ignore[misc]
    await served.until_fact("WorkersExited")
    assert [one.kind for one in await served.facts()].count("WorkersExited") == 1
    await node.part(Parting("test", succeeded=True))
    kinds = [one.kind for one in await served.facts()]
    assert kinds.count("WorkersExited") == 2
    assert kinds[-1] == "RunClosed"


@pytest.mark.rule("E2")
async def test_an_end_while_no_coordinator_answers_is_not_held_up(tmp_path: Path) -> None:
    node = Node("a", "127.0.0.1:1", (1, 1), tmp_path)
    async with asyncio.timeout(WAIT_S):
        await node.part(Parting("test"))
    ended = node.seat.ended
    assert ended is not None
    assert ended.exit_code == 1
    node.thread.post(lambda agent: agent.came_for_next(CycleNumber(0)))  # nobody hears it, and nothing breaks


def test_workers_do_not_inherit_what_grpc_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    monkeypatch.setenv("GRPC_VERBOSITY", "ERROR")
    with grpc_environment():
        assert (os.environ["GRPC_ENABLE_FORK_SUPPORT"], os.environ["GRPC_VERBOSITY"]) == ("0", "ERROR")
        os.environ["GRPC_VERBOSITY"] = "NONE"
    assert "GRPC_ENABLE_FORK_SUPPORT" not in os.environ
    assert os.environ["GRPC_VERBOSITY"] == "ERROR"


@pytest.mark.rule("E2")
async def test_a_signal_that_comes_before_the_answer_to_the_join_is_why_the_node_leaves(
    served: Served, tmp_path: Path
) -> None:
    node = Node("a", str(served.address), (1, 1), tmp_path)
    node.thread.post(lambda agent: agent.signalled(15, "SIGTERM"))
    assert await node.end_of_waiting() is None
    ended = node.seat.ended
    assert ended is not None
    assert (ended.exit_code, ended.reason) == (143, "received SIGTERM")
    assert [one.text for one in await served.facts() if one.kind == "NodeLeft"] == [
        "node a left: its agent received SIGTERM"
    ]


@pytest.mark.rule("D4")
@pytest.mark.parametrize("were_seen", [True, False])
async def test_how_workers_ended_is_told_before_the_node_leaves(
    served: Served, tmp_path: Path, were_seen: bool
) -> None:
    """torch's agent gives up and says it: also of workers that ended before they were seen here."""
    node = Node("a", str(served.address), (1, 1), tmp_path)
    cycle = (await node.take()).assignment.cycle
    if were_seen:
        await node.heard(lambda agent: agent.are_healthy(cycle))
    await node.part(Parting("gave up", exits=(WorkerExit(LocalRank(1), 7, message="no such layer"),)))
    failure = (await served.rank_map(0)).failure
    assert (failure.local_rank, failure.exit_code, failure.message) == (1, 7, "no such layer")
    assert [one.text for one in await served.facts() if one.kind == "NodeLeft"] == ["node a left: gave up"]
