"""A coordinator that is killed while many talk to it: whatever it answered is in its journal (rule E5)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from nvrx.core.facts import Fact, NodeJoined, NodeLeft
from nvrx.core.narrate import tell
from nvrx.server.journals import Row
from nvrx.server.journals.sqlite import SqliteJournal
from nvrx.v1 import run_pb2

from .coordination import HandAgent, Remote
from .programs import coordinator

KILLS = 100 if os.environ.get("NVRX_SOAK") else 10
RUNS = [f"run-{number}" for number in range(4)]
CLIENTS = 40
NNODES = (1000, 1000)
"""No world is ever chosen: nodes only come and go."""
SEED = 5


@dataclass
class Told:
    """What a coordinator answered and showed: of each run the nodes by id, and the facts by revision."""

    joined: dict[str, set[str]] = field(default_factory=lambda: {one: set() for one in RUNS})
    left: dict[str, set[str]] = field(default_factory=lambda: {one: set() for one in RUNS})
    shown: dict[str, dict[int, str]] = field(default_factory=lambda: {one: {} for one in RUNS})
    answers: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def add(self, answers: dict[str, set[str]], run_id: str, node_id: str) -> None:
        answers[run_id].add(node_id)
        async with self.changed:
            self.answers += 1
            self.changed.notify_all()


async def come_and_go(remote: Remote, told: Told, run_id: str, names: AsyncIterator[str]) -> None:
    """One light client: joins as one node after the other, and leaves, until nobody answers."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for name in names:
            agent = HandAgent(remote, name, nnodes=NNODES, run_id=run_id)
            await agent.join()
            await told.add(told.joined, run_id, name)
            await agent.leave(workers_stopped=True)
            await told.add(told.left, run_id, name)


async def watch(remote: Remote, told: Told, run_id: str) -> None:
    """Takes down every fact that is shown, until nobody shows any."""
    request = run_pb2.WatchFactsRequest(run_id=run_id, from_revision=1)
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for shown in remote.runs.WatchFacts(request):
            text = told.shown[run_id].setdefault(shown.fact.revision, shown.fact.text)
            assert text == shown.fact.text, "a revision was told twice, and not alike"


async def names(counter: itertools.count[int]) -> AsyncIterator[str]:
    while True:
        yield f"n{next(counter)}"


async def one_life(state: Path, told: Told, counter: itertools.count[int], answers: int) -> None:
    """A coordinator from its start until it is killed, after so many answers more."""
    with coordinator("--state-dir", str(state), "--store", "off") as program:
        remote = Remote(program.address)
        for run_id in RUNS:  # opens it, the first time
            agent = HandAgent(remote, await anext(names(counter)), nnodes=NNODES, run_id=run_id)
            await agent.join()
        talking = [
            asyncio.create_task(come_and_go(remote, told, RUNS[number % len(RUNS)], names(counter)))
            for number in range(CLIENTS)
        ]
        talking += [asyncio.create_task(watch(remote, told, run_id)) for run_id in RUNS]
        wanted = told.answers + answers
        async with told.changed:
            await told.changed.wait_for(lambda: told.answers >= wanted)
        program.process.send_signal(signal.SIGKILL)
        await asyncio.gather(*talking)
        await remote.channel.close()


@pytest.mark.rule("E5")
@pytest.mark.timeout(60 + 10 * KILLS)
async def test_whatever_was_answered_or_shown_is_in_the_journal(tmp_path: Path) -> None:
    dice = random.Random(SEED)
    told = Told()
    counter = itertools.count()
    for _ in range(KILLS):
        await one_life(tmp_path, told, counter, dice.randrange(1, 200))
    journal = SqliteJournal(tmp_path)
    rows = list(journal.load())
    journal.close()
    assert told.answers >= KILLS
    for run_id in RUNS:
        mine = [one for one in rows if one.run_id == run_id]
        assert [one.revision for one in mine] == list(range(1, len(mine) + 1))
        kept = {int(one.revision): tell(one.fact) for one in mine}
        assert told.shown[run_id].items() <= kept.items()
        assert told.joined[run_id] <= set(map(_who, of(mine, NodeJoined)))
        assert told.left[run_id] <= set(map(_who, of(mine, NodeLeft)))


def of(rows: list[Row], kind: type[Fact]) -> list[Fact]:
    return [one.fact for one in rows if isinstance(one.fact, kind)]


def _who(fact: Fact) -> str:
    assert isinstance(fact, NodeJoined | NodeLeft)
    return str(fact.node.node_id if isinstance(fact, NodeJoined) else fact.node_id)
