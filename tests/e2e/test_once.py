"""`serve --once`: the coordinator ends with its run, and with nobody left who does not know how that ended."""

from __future__ import annotations

import signal

import pytest

from .cluster import Cluster


@pytest.mark.rule("D8", "A5")
def test_a_node_beyond_max_learns_how_the_run_ended(cluster: Cluster) -> None:
    """It is no member: it asks every two seconds, and the coordinator stays until it has."""
    coordinator = cluster.serve("--once")
    agents = cluster.join_all("a b", "--nnodes", "2")
    workers = cluster.workers(0, 2)
    agents.append(cluster.join("c", "--nnodes", "2"))
    agents[-1].said("waiting for a place as long as the run lives")
    cluster.wait_for("CycleRunning", 0)
    for one in workers:
        one.tell("exit", code=0)
    assert [one.ended() for one in agents] == [0, 0, 0]
    assert coordinator.ended() == 0


@pytest.mark.rule("D9", "E5")
def test_a_coordinator_that_died_when_its_run_closed_tells_it_after_all(cluster: Cluster) -> None:
    """One of two agents had not heard it yet: the next coordinator waits for both, and ends."""
    cluster.serve("--once").said("listening")
    first = cluster.programs[0]
    a, b = cluster.join_all("a b", "--nnodes", "2")
    workers = {one.node: one for one in cluster.workers(0, 2)}
    cluster.wait_for("CycleRunning", 0)
    workers["a"].tell("exit", code=0)
    cluster.wait_for("WorkersExited", 0, "a")
    a.send(signal.SIGSTOP)
    workers["b"].tell("exit", code=0)
    cluster.wait_for("RunClosed")
    first.send(signal.SIGKILL)
    first.ended()
    second = cluster.serve("--once", listen=cluster.address)
    second.said("all runs are closed; waiting for nodes that may not know")
    a.send(signal.SIGCONT)
    assert [a.ended(), b.ended()] == [0, 0]
    assert second.ended() == 0


@pytest.mark.rule("A3")
def test_a_state_directory_with_a_closed_run_serves_the_next(cluster: Cluster) -> None:
    """The same script once more: `--once` is over with the run that is opened now, not with the one before."""
    for life in range(2):
        coordinator = cluster.serve("--once", listen=cluster.address or "127.0.0.1:0")
        agent = cluster.join("a", *(["--reopen"] if life else []))
        cluster.worker("a", cycle=life).tell("exit", code=0)
        assert agent.ended() == 0
        assert coordinator.ended() == 0
