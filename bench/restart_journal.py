"""A journal as a long run of many nodes leaves it. Facts are the core's own; nothing is measured here.

Every cycle but the last ends by one failed worker; with `exits`, the others' workers are then stopped by their agents,
each node telling so in a row of its own, which is most of the rows of a real journal.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nvrx.core.facts import (
    Cause,
    CycleEnded,
    CycleRunning,
    Device,
    Fact,
    Failure,
    NodeInfo,
    NodeJoined,
    RunOpened,
    WorkerExit,
    WorkersExited,
    WorldChosen,
)
from nvrx.core.ids import CycleNumber, Incarnation, LocalRank, NodeId, Revision, RunId
from nvrx.core.presence import AgentPhase, Presence, StoreMode, Word
from nvrx.core.run import Run, evolve
from nvrx.core.shape import Settings, Shape
from nvrx.core.topology import OrderSource
from nvrx.core.world import next_world
from nvrx.server.journals import Row
from nvrx.server.journals.sqlite import SqliteJournal

RUN_ID = RunId("bench")
WORKERS_PER_NODE = 8
_BATCH_ROWS = 5000


def _node(number: int) -> NodeInfo:
    node_id = NodeId(f"node-{number:05}")
    return NodeInfo(
        node_id=node_id,
        incarnation=Incarnation(f"{number:032x}"),
        address=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}",
        pid=1000 + number,
        version="0.1.0",
        order_sources={OrderSource.PROCID: str(number), OrderSource.NODE_ID: node_id},
        devices=tuple(Device(LocalRank(rank)) for rank in range(WORKERS_PER_NODE)),
    )


def _opened(members: int) -> Iterator[Fact]:
    shape = Shape(members, members, WORKERS_PER_NODE, fingerprint={"NCCL_DEBUG": "INFO"})
    yield RunOpened(0.0, RUN_ID, shape, Settings(max_restarts=100_000))
    for number in range(members):
        yield NodeJoined(0.01 * number, _node(number))


def _ended(run: Run, number: CycleNumber, at: float, exits: bool) -> Iterator[Fact]:
    """A worker fails, which ends the cycle; the agents stop the others."""
    cycle = run.cycle
    assert cycle is not None
    first, *others = cycle.seats
    failed = WorkerExit(LocalRank(0), 1, message="CUDA error", stderr_tail="Traceback (most recent call last)\n" * 20)
    yield WorkersExited(at, number, first.node.node_id, (failed,))
    yield CycleEnded(at, number, Failure(Cause.WORKER_FAILED, first.node.node_id, first.group_rank, LocalRank(0), 1))
    if exits:
        ranks = [LocalRank(rank) for rank in range(WORKERS_PER_NODE)]
        stopped = tuple(WorkerExit(rank, None, "SIGTERM", stopped_by_agent=True) for rank in ranks)
        yield WorkersExited(at, number, first.node.node_id, stopped[1:])
        for seat in others:
            yield WorkersExited(at, number, seat.node.node_id, stopped)


def facts(members: int, cycles: int, *, exits: bool) -> Iterator[Fact]:
    """The facts of a run that is in its last cycle."""
    opening = list(_opened(members))
    yield from opening
    run: Run | None = None
    for fact in opening:
        run = evolve(run, fact)
    assert run is not None
    presence = Presence(store=StoreMode.OFF)
    at = run.last_at
    for one in run.live_members():
        presence.joined(one.info.node_id, one.info.incarnation, at)
    for number in range(cycles):
        at += 10.0
        for one in run.live_members():
            presence.connected(one.info.node_id, at)
            presence.heard(one.info.node_id, Word(AgentPhase.RUNNING, CycleNumber(number)), at)
        chosen = next_world(run, presence, at)
        assert isinstance(chosen, WorldChosen), chosen
        running = CycleRunning(at, CycleNumber(number))
        for fact in (chosen, running):
            yield fact
            run = evolve(run, fact)
        if number < cycles - 1:
            for ending in _ended(run, CycleNumber(number), at, exits):
                yield ending
                run = evolve(run, ending)


def write(directory: Path, members: int, cycles: int, *, exits: bool) -> int:
    """Write such a journal; how many rows it has."""
    journal = SqliteJournal(directory, allow_network_file_system=True)
    revision, batch = 0, []
    for fact in facts(members, cycles, exits=exits):
        revision += 1
        batch.append(Row(RUN_ID, Revision(revision), fact))
        if len(batch) == _BATCH_ROWS:
            journal.append(batch)
            batch = []
    journal.append(batch)
    journal.close()
    return revision
