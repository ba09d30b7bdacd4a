"""Nodes and programs that fail again and again, nodes that are kept out, nodes that come back too soon."""

from __future__ import annotations

import signal

import pytest

from .cluster import Cluster

OFTEN = ("--max-restarts", "50")


def _fail(cluster: Cluster, node: str, cycle: int) -> None:
    """A node's worker fails, in a cycle that runs."""
    cluster.wait_for("CycleRunning", cycle)
    cluster.worker(node, cycle).tell("exit", code=9)
    cluster.wait_for("CycleEnded", cycle)


@pytest.mark.rule("D6")
def test_a_run_without_progress_is_not_to_be_started_again(cluster: Cluster) -> None:
    cluster.serve()
    iterations = cluster.directory / "latest_checkpointed_iteration.txt"
    iterations.write_text("10\n")
    options = ("--nnodes", "2", "--max-node-failures", "0", "--max-no-progress-cycles", "2", *OFTEN)
    reads = ("--checkpoint-iteration-file", str(iterations))
    first = cluster.join("a", *options, *reads, "--no-restart-exit-code", "77")
    second = cluster.join("b", *options, *reads)
    assert cluster.wait_for("ProgressMade", 0).detail["step"] == 10
    for cycle in range(3):
        _fail(cluster, "b", cycle)
    assert (first.ended(), second.ended()) == (77, 93)
    first.said(r"made no progress beyond step 10 \(max_no_progress_cycles\)")
    run = cluster.run()
    assert (run.exit_code, run.step) == (93, 10)


@pytest.mark.rule("D7", "E8")
def test_a_node_that_always_fails_first_is_replaced_and_its_agent_may_end(cluster: Cluster) -> None:
    cluster.serve()
    options = ("--nnodes", "2:3", "--max-node-failures", "2", "--last-call", "20", *OFTEN)
    a, b, c = (cluster.join(one, *options, "--exit-when-excluded") for one in "abc")
    for cycle in range(2):
        _fail(cluster, "b", cycle)
    assert cluster.wait_for("NodeQuarantined", node="b").text.endswith("its workers failed first in 2 cycles in a row")
    assert b.ended() == 5
    b.said("excluded: in quarantine")
    assert cluster.world(2) == ["a", "c"]
    cluster.wait_for("CycleRunning", 2)
    assert not cluster.find("CycleEnded", 2)
    for worker in cluster.workers(2, 2):
        worker.tell("exit", code=0)
    assert (a.ended(), c.ended()) == (0, 0)


@pytest.mark.rule("E8", "F1")
def test_a_drained_node_stays_without_workers_and_can_return(cluster: Cluster) -> None:
    cluster.serve()
    options = ("--nnodes", "2:3", "--last-call", "20")
    agents = cluster.join_all("a b c", *options)
    cluster.wait_for("CycleRunning", 0)
    assert cluster.view("drain", "b", "--immediate").exit_code == 0
    assert cluster.world(1) == ["a", "c"]
    agents[1].said("waiting: excluded: drained by an operator")
    assert cluster.view("undrain", "b").exit_code == 0
    for worker in cluster.workers(1, 2):
        worker.tell("exit", code=0)
    assert [one.ended() for one in agents] == [0, 0, 0]


@pytest.mark.rule("E3")
def test_workers_that_are_not_to_run_on_without_a_coordinator(cluster: Cluster) -> None:
    """Stopped when the lease is over; the nodes join anew when the coordinator is back."""
    coordinator = cluster.serve()
    agents = cluster.join_all("a b", "--nnodes", "2", "--on-partition", "stop")
    before = cluster.workers(0, 2)
    cluster.wait_for("CycleRunning", 0)
    coordinator.send(signal.SIGKILL)
    coordinator.ended()
    for worker in before:
        worker.ended()
    for agent in agents:
        agent.said(r"joining anew: .* longer than the lease of 4 s \(--on-partition stop\)")
        assert agent.exit_code is None
    cluster.serve(listen=cluster.address)
    cluster.workers(1, 2)
    cluster.wait_for("CycleRunning", 1)
    assert cluster.run().restarts_used == 0


@pytest.mark.rule("E2")
def test_an_agent_told_to_end_while_it_joins_anew_ends(cluster: Cluster) -> None:
    """Its Join was under way, and made it a member: it leaves at once."""
    coordinator = cluster.serve()
    agents = cluster.join_all("a b", "--nnodes", "2", "--on-partition", "stop")
    cluster.wait_for("CycleRunning", 0)
    coordinator.send(signal.SIGSTOP)
    for agent in agents:
        agent.said(r"joining anew: .* longer than the lease of 4 s")
        agent.send(signal.SIGTERM)
        agent.said("received SIGTERM")
    coordinator.send(signal.SIGCONT)
    for agent in agents:
        assert agent.ended() == 128 + signal.SIGTERM


@pytest.mark.rule("B2")
def test_an_agent_started_again_on_its_host_need_not_wait_for_the_dead_ones_lease(cluster: Cluster) -> None:
    timing = ("--heartbeat-interval", "0.3", "--lease-ttl", "600", "--reconnect-grace", "600")
    cluster.serve(timing=timing)
    options = ("--nnodes", "2")
    cluster.join("a", *options)
    first = cluster.join("b", *options)
    cluster.wait_for("CycleRunning", 0)
    first.send(signal.SIGKILL)
    first.ended()
    again = cluster.join("b", *options)
    again.said(r"the agent of this node that joined before \(pid \d+\) is dead")
    assert "replaced by incarnation" in cluster.wait_for("NodeLost", node="b").text
    cluster.wait_for("CycleRunning", 1)
    assert cluster.world(1) == ["a", "b"]


@pytest.mark.rule("B2")
def test_a_living_agent_keeps_its_place(cluster: Cluster) -> None:
    cluster.serve()
    cluster.join("a", "--nnodes", "1")
    cluster.wait_for("CycleRunning", 0)
    other = cluster.join("a", "--nnodes", "1", "--coordinator", cluster.address.replace("127.0.0.1", "localhost"))
    other.said("node a has already joined from")
    assert other.ended() == 3
    assert not cluster.find("NodeLost")
