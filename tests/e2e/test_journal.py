"""The journal fails, is damaged, or loses its writer at any moment: nothing that was told is untrue."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from nvrx.core.narrate import tell
from nvrx.server.journals.codec import kind_of
from nvrx.server.journals.sqlite import SqliteJournal
from nvrx.server.journals.state_dir import FILE_NAME, WAL_SUFFIX
from nvrx.v1 import promote_pb2, promote_pb2_grpc

from .board import PATIENCE_S
from .cluster import RUN_ID, Cluster
from .programs import COORDINATOR, Program
from .small_disk import SmallDisk
from .stream import Fact

KILLS = 100 if os.environ.get("NVRX_SOAK") else 10
SEED = 20
WORLD = 2
CHURNS = ("fail", "promote", "quiet", "promote")
"""Failures do not follow on each other: those would slow the run down, and shut a node out."""
SOME_FACTS = 8
"""More than a failure and the next cycle come to."""
LEFT_BYTES = 96 * 1024
"""Enough for a few transactions."""


def on_disk(cluster: Cluster, state: Path) -> list[tuple[int, str, str]]:
    """The facts in a state directory that nobody writes to, as people see them."""
    copy = cluster.directory / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for suffix in ("", WAL_SUFFIX):
        if (state / (FILE_NAME + suffix)).exists():
            shutil.copyfile(state / (FILE_NAME + suffix), copy / (FILE_NAME + suffix))
    journal = SqliteJournal(copy)
    try:
        return [(row.revision, kind_of(row.fact), tell(row.fact)) for row in journal.load() if row.run_id == RUN_ID]
    finally:
        journal.close()


def told(facts: Sequence[Fact]) -> list[tuple[int, str, str]]:
    return [(one.revision, one.kind, one.text) for one in facts]


def repair(cluster: Cluster, *options: str) -> Program:
    program = cluster.start("repair", [*COORDINATOR, "repair", "--state-dir", str(cluster.state_dir), *options])
    assert program.ended() == 0, program.tail()
    return program


@pytest.mark.rule("J6", "E4")
def test_a_damaged_journal_is_repaired_and_training_goes_on(cluster: Cluster) -> None:
    """Serve refuses in one line; after the repair agents join anew and train in a cycle above all that they saw."""
    coordinator = cluster.serve()
    agents = cluster.join_all("a b", "--nnodes", "2", "--max-restarts", "5")
    cluster.workers(0, 2)
    cluster.wait_for("CycleRunning", 0)
    cluster.worker("a").tell("exit", code=1)
    before = cluster.workers(1, 2)
    chosen = cluster.wait_for("WorldChosen", 1)
    cluster.wait_for("CycleRunning", 1)
    journal_id = cluster.run().journal_id
    coordinator.send(signal.SIGTERM)
    assert coordinator.ended() == 0
    seen = cluster.forget_facts()

    with closing(sqlite3.connect(cluster.state_dir / FILE_NAME)) as connection:
        connection.execute(
            "UPDATE facts SET body = replace(body, '\"b\"', '\"c\"') WHERE revision = ?", (chosen.revision,)
        )
        connection.commit()
    refused = cluster.start(
        "refused", [*COORDINATOR, "serve", "--listen", cluster.address, "--state-dir", str(cluster.state_dir)]
    )
    assert refused.ended() == 1
    assert refused.out == []
    assert len(refused.err) == 1
    assert f"run {RUN_ID} revision {chosen.revision}: the row does not match its check" in refused.err[0]
    assert f"nvrx-coord repair --state-dir {cluster.state_dir}" in refused.err[0]

    assert "nothing was changed" in repair(cluster, "--dry-run").out[-1]
    out = repair(cluster).out
    cut = seen[-1].revision - chosen.revision + 1
    assert out[0].startswith(f"run {RUN_ID}: kept up to revision {chosen.revision - 1}, {cut} rows cut")
    assert (cluster.state_dir / f"{FILE_NAME}.damaged-1").exists()

    cluster.serve(listen=cluster.address)
    for one in agents:
        one.said("the coordinator has another journal")
    for worker in before:
        worker.ended()
    # The first world may have been chosen while a node still spoke as the incarnation that it was.
    running = cluster.running_cycle(above=1)
    after = cluster.workers(running, WORLD)
    assert cluster.run().journal_id != journal_id
    kept = told(cluster.facts)[: chosen.revision - 1]
    assert kept == told(seen)[: chosen.revision - 1]
    assert not cluster.find("WorldChosen", 1)
    for worker in after:
        worker.tell("exit", code=0)
    assert [one.ended() for one in agents] == [0, 0]


def promote(cluster: Cluster, cycle: int) -> Any:
    """Ask for the standby of a cycle to become active now; the call under way."""
    standby = cluster.wait_for("WorldChosen", cycle).detail["standbys"][0]["node"]["node_id"]
    stub = promote_pb2_grpc.PromoteServiceStub(cluster.channel)
    request = promote_pb2.PromoteRequest(run_id=RUN_ID, node_id=standby, immediate=True)
    return stub.Promote.future(request, timeout=PATIENCE_S)


def was_answered(call: Any) -> bool:
    """Whether the coordinator said that it is done."""
    error = call.exception()
    assert error is None or error.code() is grpc.StatusCode.UNAVAILABLE, error
    return error is None


def finish(cluster: Cluster, agents: Sequence[Program], cycle: int) -> None:
    for worker in cluster.workers(cycle, WORLD):
        worker.tell("exit", code=0)
    assert [one.ended() for one in agents] == [0] * len(agents)


@pytest.mark.rule("E5", "E3")
def test_a_full_disk_ends_the_coordinator_and_no_worker(cluster: Cluster) -> None:
    """Whatever anybody was told is on the disk; agents carry on, and go on with the next coordinator."""
    disk = SmallDisk(cluster, cluster.state_dir)
    coordinator = cluster.serve("--store", "rank0", wrapped=disk.enter)
    agents = cluster.join_all("a b c", "--nnodes", "2:3", "--last-call", "20")
    cluster.workers(0, WORLD)
    cluster.wait_for("CycleRunning", 0)
    disk.fill(but=LEFT_BYTES)
    cycle, answered = 0, True
    while answered and _runs(cluster, coordinator, cycle):
        answered = was_answered(promote(cluster, cycle))
        cycle += answered
    assert coordinator.ended() == 1
    assert "cannot write the journal" in coordinator.err[-1]
    assert "full" in coordinator.err[-1]
    assert not [line for line in coordinator.err if "Traceback" in line]
    kept = on_disk(cluster, disk.path)
    assert told(cluster.facts) == kept[: len(cluster.facts)]
    promoted = [kind for _, kind, _ in kept].count("NodesPromoted")
    assert promoted in {cycle, cycle + 1}, "the last one may have been kept, and not answered"
    for one in agents:
        one.said("lost the coordinator .*; workers run on")
    assert [one.exit_code for one in agents] == [None] * len(agents)

    disk.empty()
    cluster.serve("--store", "rank0", listen=cluster.address, wrapped=disk.enter)
    cluster.wait_for("CycleRunning", promoted)
    assert cluster.run().restarts_used == 0
    assert not cluster.find("NodeLost")
    assert told(cluster.facts)[: len(kept)] == kept
    finish(cluster, agents, promoted)


def _runs(cluster: Cluster, coordinator: Program, cycle: int) -> bool:
    """Wait until a cycle runs; false when the coordinator has ended before."""
    cluster.board.until(
        lambda: coordinator.exit_code is not None or bool(cluster.find("CycleRunning", cycle)) or None,
        f"cycle {cycle} to run, or the coordinator's end",
    )
    return coordinator.exit_code is None


class Churn:
    """What happens to a run between two deaths of its coordinator."""

    def __init__(self, cluster: Cluster, dice: random.Random) -> None:
        self.failures = 0
        self.promotions = 0
        self._cluster = cluster
        self._dice = dice

    @property
    def cycle(self) -> int:
        return self.failures + self.promotions

    def fail(self) -> None:
        """A worker fails; its agent tells it until somebody has kept it."""
        self._dice.choice(self._cluster.workers(self.cycle, WORLD)).tell("exit", code=3)
        self.failures += 1

    def seen(self, count: int) -> None:
        """Wait until that many facts were told, or the next cycle runs."""
        cluster, running = self._cluster, len(self._cluster.find("CycleRunning"))
        cluster.board.until(
            lambda: len(cluster.facts) >= count or len(cluster.find("CycleRunning")) > running or None,
            f"{count} facts, or the next cycle",
        )

    def settle(self, call: Any) -> None:
        """After a promotion that was perhaps cut off: what was answered has happened, what was not may have."""
        cluster, revision = self._cluster, self._cluster.run().revision
        cluster.board.until(lambda: len(cluster.facts) >= revision or None, f"{revision} facts")
        happened = len(cluster.find("NodesPromoted")) - self.promotions
        assert happened in ({1} if was_answered(call) else {0, 1})
        self.promotions += happened


@pytest.mark.rule("E5")
@pytest.mark.timeout(60 + KILLS * 20)
def test_a_coordinator_killed_at_any_moment_told_nothing_that_is_lost(cluster: Cluster) -> None:
    """Again and again, in the middle of whatever it does: no worker stops for it, and no restart is charged."""
    dice = random.Random(SEED)
    coordinator = cluster.serve("--store", "rank0")
    agents = cluster.join_all("a b c", "--nnodes", "2:3", "--last-call", "20", "--max-restarts", "1000")
    churn = Churn(cluster, dice)
    for number in range(KILLS):
        cluster.wait_for("CycleRunning", churn.cycle)
        pids = [one.pid for one in cluster.workers(churn.cycle, WORLD)]
        revision, count = cluster.run().revision, len(cluster.facts) + dice.randrange(SOME_FACTS)
        what, call = CHURNS[number % len(CHURNS)], None
        if what == "fail":
            churn.fail()
            churn.seen(count)
        elif what == "promote":
            call = promote(cluster, churn.cycle)
            churn.seen(count)
        coordinator.send(signal.SIGKILL)
        coordinator.ended()
        coordinator = cluster.serve("--store", "rank0", listen=cluster.address)
        cluster.all_back()
        assert cluster.run().revision >= revision
        if what == "promote":
            churn.settle(call)
        if what == "quiet":
            assert [one.pid for one in cluster.workers(churn.cycle, WORLD)] == pids
    cluster.wait_for("CycleRunning", churn.cycle)
    assert cluster.run().restarts_used == churn.failures
    assert not cluster.find("NodeLost")
    assert [one.cycle for one in cluster.find("WorldChosen")] == list(range(churn.cycle + 1))
    finish(cluster, agents, churn.cycle)
    coordinator.send(signal.SIGTERM)
    coordinator.ended()
    kept = on_disk(cluster, cluster.state_dir)
    assert [revision for revision, _, _ in kept] == list(range(1, len(kept) + 1))
    assert told(cluster.facts) == kept[: len(cluster.facts)]
