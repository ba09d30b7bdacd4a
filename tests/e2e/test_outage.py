"""The coordinator goes away and comes back; workers run on."""

from __future__ import annotations

import signal

import pytest

from .cluster import Cluster
from .programs import COORDINATOR, Program


def _back(cluster: Cluster) -> Program:
    """Start the coordinator again, on its address and state."""
    return cluster.serve(listen=cluster.address)


def _pids(cluster: Cluster, cycle: int, count: int) -> list[int]:
    return [one.pid for one in cluster.workers(cycle, count)]


@pytest.mark.rule("E5", "E3")
def test_a_killed_coordinator_comes_back(cluster: Cluster) -> None:
    """C070: same pids, same cycle, no restart spent; a failure meanwhile is told and starts the next cycle."""
    coordinator = cluster.serve()
    agents = cluster.join_all("a b c", "--nnodes", "2:3", "--last-call", "20", "--max-restarts", "1")
    before = _pids(cluster, 0, 2)
    running = cluster.wait_for("CycleRunning", 0)
    coordinator.send(signal.SIGKILL)
    coordinator.ended()
    for one in agents:
        one.said("lost the coordinator .*; workers run on")
    _back(cluster).said("run run resumed at revision")
    cluster.all_back()
    assert _pids(cluster, 0, 2) == before
    assert len(cluster.facts) == running.revision
    assert cluster.run().restarts_used == 0

    second = cluster.programs[-1]
    second.send(signal.SIGKILL)
    second.ended()
    cluster.worker("b").tell("exit", code=6)
    cluster.worker("b").ended()
    agents[1].said("failed: exit 6")
    _back(cluster)
    workers = cluster.workers(1, 2)
    assert [one.node for one in workers] == ["a", "b"]
    assert cluster.rank_map(0).failure.exit_code == 6
    assert cluster.rank_map(0).failure.node_id == "b"
    assert cluster.run().restarts_used == 1
    assert not cluster.find("NodeLost")
    for worker in workers:
        worker.tell("exit", code=0)
    assert [one.ended() for one in agents] == [0, 0, 0]


@pytest.mark.rule("E7")
def test_sigterm_to_the_coordinator(cluster: Cluster) -> None:
    """It exits 0 within 5 s and tells its watchers; workers run on, and all is as it was when it is back."""
    coordinator = cluster.serve()
    agents = cluster.join_all("a b", "--nnodes", "2")
    before = _pids(cluster, 0, 2)
    cluster.wait_for("CycleRunning", 0)
    watching = cluster.start(
        "nvrx-coord events", [*COORDINATOR, "events", "--follow", "--coordinator", cluster.address]
    )
    watching.said("cycle 0 running")
    coordinator.send(signal.SIGTERM)
    assert coordinator.ended(5.0) == 0
    assert watching.ended() == 1
    assert "the coordinator goes down" in watching.err[-1]
    for one in agents:
        one.said("the coordinator goes down; come back to it")
    _back(cluster)
    cluster.all_back()
    assert _pids(cluster, 0, 2) == before
    for worker in cluster.hall.workers:
        worker.tell("exit", code=0)
    assert [one.ended() for one in agents] == [0, 0]
    assert len(cluster.find("WorldChosen")) == 1


@pytest.mark.rule("E5", "D8")
def test_a_run_that_finishes_during_the_outage(cluster: Cluster) -> None:
    """Workers exit 0 while nobody listens: told afterwards, and the run succeeded."""
    coordinator = cluster.serve()
    agents = cluster.join_all("a b", "--nnodes", "2")
    workers = cluster.workers(0, 2)
    cluster.wait_for("CycleRunning", 0)
    coordinator.send(signal.SIGKILL)
    coordinator.ended()
    for worker in workers:
        worker.tell("exit", code=0)
    for one in workers:
        one.ended()
    _back(cluster)
    assert [one.ended() for one in agents] == [0, 0]


@pytest.mark.rule("E3")
def test_a_coordinator_that_stays_away(cluster: Cluster) -> None:
    """After --coordinator-grace the workers are stopped and the agent exits 4."""
    coordinator = cluster.serve()
    agent = cluster.join("a", "--coordinator-grace", "1.5")
    worker = cluster.worker("a")
    coordinator.send(signal.SIGKILL)
    assert agent.ended() == 4
    assert worker.ended()
    assert [line for line in agent.err if "out of reach" in line and "--coordinator-grace" in line]


@pytest.mark.rule("E1")
def test_a_suspended_coordinator_judges_nobody(cluster: Cluster) -> None:
    """Suspended for longer than the lease: nobody is declared lost."""
    timing = ("--heartbeat-interval", "0.1", "--lease-ttl", "1", "--reconnect-grace", "1")
    coordinator = cluster.serve(timing=timing)
    agents = cluster.join_all("a b", "--nnodes", "2")
    workers = cluster.workers(0, 2)
    cluster.wait_for("CycleRunning", 0)
    coordinator.send(signal.SIGSTOP)
    for one in agents:
        one.said("lost the coordinator .*: nothing heard for 3 s")
    coordinator.send(signal.SIGCONT)
    coordinator.said("the coordinator was stalled")
    cluster.all_back()
    for worker in workers:
        worker.tell("exit", code=0)
    assert [one.ended() for one in agents] == [0, 0]
    assert not cluster.find("NodeLost")


@pytest.mark.rule("E5")
def test_a_node_lost_during_the_outage(cluster: Cluster) -> None:
    """An agent that dies while the coordinator is away is replaced once it had its time to come back."""
    coordinator = cluster.serve()
    agents = cluster.join_all("a b c", "--nnodes", "2:3", "--last-call", "20")
    cluster.workers(0, 2)
    cluster.wait_for("CycleRunning", 0)
    coordinator.send(signal.SIGKILL)
    coordinator.ended()
    agents[1].send(signal.SIGKILL)
    agents[1].ended()
    back = _back(cluster)
    back.said("resumed at revision")
    lost = cluster.wait_for("NodeLost", node="b", timeout_s=40.0)
    assert lost.revision > 0
    assert [one.node for one in cluster.workers(1, 2)] == ["a", "c"]
