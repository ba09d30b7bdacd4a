"""The journal fails, is damaged, or loses its writer at any moment: nothing that was told is untrue."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from nvrx.core.narrate import tell
from nvrx.server.journals.codec import kind_of
from nvrx.server.journals.sqlite import SqliteJournal
from nvrx.server.journals.state_dir import FILE_NAME, WAL_SUFFIX

from .cluster import RUN_ID, Cluster
from .hall import Worker
from .programs import COORDINATOR, Program
from .stream import Fact

KILLS = 100 if os.environ.get("NVRX_SOAK") else 10
SEED = 20
DISK_BYTES = 1024 * 1024
WORLD = 2
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
    after = cluster.workers(2, 2)
    assert cluster.run().journal_id != journal_id
    kept = told(cluster.facts)[: chosen.revision - 1]
    assert kept == told(seen)[: chosen.revision - 1]
    assert not cluster.find("WorldChosen", 1)
    for worker in after:
        worker.tell("exit", code=0)
    assert [one.ended() for one in agents] == [0, 0]


class SmallDisk:
    """A file system of its own, in a mount namespace of its own, which a process holds."""

    def __init__(self, cluster: Cluster) -> None:
        where = cluster.state_dir
        where.mkdir(mode=0o700)
        unshare = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount"]
        script = f"mount -t tmpfs -o size={DISK_BYTES} tmpfs {where} && echo mounted && exec sleep infinity"
        tried = subprocess.run([*unshare, "sh", "-c", script.partition(" && echo")[0]], capture_output=True, text=True)
        if tried.returncode != 0:
            why = f"no file system of its own can be had here: {tried.stderr.strip()}"
            if os.environ.get("CI") == "true":
                pytest.fail(why)
            pytest.skip(why)
        holder = cluster.start("disk", [*unshare, "sh", "-c", script])
        holder.said("^mounted$")
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        self.enter = ["nsenter", "--target", str(holder.pid), *user, "--mount", "--"]
        self.path = Path(f"/proc/{holder.pid}/root{where}")

    def fill(self, but: int) -> None:
        """Take all room but some."""
        free = os.statvfs(self.path)
        (self.path / "filler").write_bytes(bytes(max(0, free.f_bavail * free.f_bsize - but)))

    def empty(self) -> None:
        (self.path / "filler").unlink()


@pytest.mark.rule("E5", "E3")
def test_a_full_disk_ends_the_coordinator_and_no_worker(cluster: Cluster) -> None:
    """Whatever anybody was told is on the disk; agents carry on, and go on with the next coordinator."""
    disk = SmallDisk(cluster)
    coordinator = cluster.serve("--store", "rank0", wrapped=disk.enter)
    agents = cluster.join_all("a b", "--nnodes", "2", "--max-restarts", "1000")
    cluster.workers(0, 2)
    cluster.wait_for("CycleRunning", 0)
    disk.fill(but=LEFT_BYTES)
    failures = 0
    while coordinator.exit_code is None:
        workers = _running(cluster, coordinator, failures)
        if workers:
            workers[0].tell("exit", code=1)
            failures += 1
            _follows(cluster, coordinator, failures)
    assert coordinator.exit_code == 1
    assert "cannot write the journal" in coordinator.err[-1]
    assert "full" in coordinator.err[-1]
    assert not [line for line in coordinator.err if "Traceback" in line]
    kept = on_disk(cluster, disk.path)
    assert told(cluster.facts) == kept[: len(cluster.facts)]
    for one in agents:
        one.said("lost the coordinator .*; workers run on")
    assert [one.exit_code for one in agents] == [None, None]

    disk.empty()
    cluster.serve("--store", "rank0", listen=cluster.address, wrapped=disk.enter)
    cluster.wait_for("CycleRunning", failures)
    last = cluster.workers(failures, 2)
    assert cluster.run().restarts_used == failures
    assert not cluster.find("NodeLost")
    cluster.board.until(lambda: len(cluster.facts) >= len(kept) or None, "all facts from the disk")
    assert told(cluster.facts)[: len(kept)] == kept
    for worker in last:
        worker.tell("exit", code=0)
    assert [one.ended() for one in agents] == [0, 0]


def _running(cluster: Cluster, coordinator: Program, cycle: int) -> list[Worker]:
    """The workers of a cycle once it runs; none when the coordinator has ended before that."""

    def found() -> list[Worker] | None:
        if coordinator.exit_code is not None:
            return []
        workers = cluster.hall.find(None, cycle, None)
        return workers if len(workers) == WORLD and cluster.find("CycleRunning", cycle) else None

    return cluster.board.until(found, f"cycle {cycle} to run, or the coordinator's end")


def _follows(cluster: Cluster, coordinator: Program, cycle: int) -> None:
    """Wait until a cycle begins, or the coordinator has ended."""
    cluster.board.until(
        lambda: coordinator.exit_code is not None or bool(cluster.hall.find(None, cycle)) or None,
        f"cycle {cycle}, or the coordinator's end",
    )


def _seen(cluster: Cluster, count: int, cycle: int) -> None:
    """Wait until that many facts were told, or a cycle runs."""
    cluster.board.until(
        lambda: len(cluster.facts) >= count or bool(cluster.find("CycleRunning", cycle)) or None,
        f"{count} facts, or cycle {cycle}",
    )


@pytest.mark.rule("E5")
@pytest.mark.timeout(60 + KILLS * 20)
def test_a_coordinator_killed_at_any_moment_told_nothing_that_is_lost(cluster: Cluster) -> None:
    """Again and again, in the middle of whatever it does: no worker stops for it, and no restart is charged."""
    dice = random.Random(SEED)
    coordinator = cluster.serve("--store", "rank0")
    agents = cluster.join_all("a b c", "--nnodes", "2:3", "--last-call", "20", "--max-restarts", "1000")
    failures = 0
    for _ in range(KILLS):
        workers = cluster.workers(failures, 2)
        pids = [one.pid for one in workers]
        is_quiet = dice.random() < 0.3
        revision = cluster.run().revision
        seen = len(cluster.facts)
        if not is_quiet:
            dice.choice(workers).tell("exit", code=3)
            failures += 1
            _seen(cluster, seen + dice.randrange(SOME_FACTS), failures)
        coordinator.send(signal.SIGKILL)
        coordinator.ended()
        coordinator = cluster.serve("--store", "rank0", listen=cluster.address)
        cluster.all_back()
        assert cluster.run().revision >= revision
        if is_quiet:
            assert [one.pid for one in cluster.workers(failures, 2)] == pids
    last = cluster.workers(failures, 2)
    cluster.wait_for("CycleRunning", failures)
    assert cluster.run().restarts_used == failures
    assert not cluster.find("NodeLost")
    assert [one.cycle for one in cluster.find("WorldChosen")] == list(range(failures + 1))
    for worker in last:
        worker.tell("exit", code=0)
    assert [one.ended() for one in agents] == [0, 0, 0]
    coordinator.send(signal.SIGTERM)
    coordinator.ended()
    kept = on_disk(cluster, cluster.state_dir)
    assert [revision for revision, _, _ in kept] == list(range(1, len(kept) + 1))
    assert told(cluster.facts) == kept[: len(cluster.facts)]
