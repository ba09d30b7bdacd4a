"""What must not end a healthy training: others that speak in a node's name, a coordinator of another run, a short
join timeout."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from nvrx.v1 import common_pb2, heartbeat_pb2, heartbeat_pb2_grpc

from .cluster import RUN_ID, Cluster


@pytest.mark.rule("B2", "E3")
def test_a_stream_in_the_name_of_a_node_stops_no_worker(cluster: Cluster) -> None:
    """Heartbeat by hand with an active node's own incarnation: its agent opens its stream again."""
    cluster.serve()
    agents = cluster.join_all("a b", "--nnodes", "2")
    workers = cluster.workers(0, 2)
    known = cluster.wait_for("CycleRunning", 0).revision
    word = heartbeat_pb2.HeartbeatRequest(
        run_id=RUN_ID, node_id="a", incarnation=cluster.nodes()["a"].incarnation, sequence=10**6
    )
    stub = heartbeat_pb2_grpc.HeartbeatServiceStub(cluster.channel)
    list(stub.Heartbeat(iter([word]), timeout=30))
    agents[0].said("lost the coordinator .*: a newer stream of node a took over; workers run on")
    agents[0].said("the coordinator .* is back")
    cluster.all_back()
    assert len(cluster.facts) == known
    for worker in workers:
        worker.tell("exit", code=0)
    assert [one.ended() for one in agents] == [0, 0]


@pytest.mark.rule("A3", "E5")
def test_a_coordinator_that_was_restarted_for_another_run_stops_no_worker(cluster: Cluster) -> None:
    """A slip in its --run-id: agents say so and wait, and go on once it is put right."""
    first = cluster.serve()
    agents = cluster.join_all("a b", "--nnodes", "2")
    workers = cluster.workers(0, 2)
    known = cluster.wait_for("CycleRunning", 0).revision
    first.send(signal.SIGKILL)
    first.ended()
    second = cluster.serve("--run-id", "other", listen=cluster.address)
    for one in agents:
        one.said("lost the coordinator .*: this coordinator serves run other only, not 'run'; .*; workers run on")
    second.send(signal.SIGKILL)
    second.ended()
    cluster.serve(listen=cluster.address)
    cluster.all_back()
    assert len(cluster.facts) == known
    for worker in workers:
        worker.tell("exit", code=0)
    assert [one.ended() for one in agents] == [0, 0]


@pytest.mark.rule("E3", "E4")
def test_who_joins_anew_is_as_patient_as_its_coordinator_grace(cluster: Cluster) -> None:
    """The join timeout is for the first time: a node that ended its workers for want of a coordinator waits on."""
    coordinator = cluster.serve()
    agent = cluster.join("a", "--on-partition", "stop", "--join-timeout", "0.1", "--coordinator-grace", "60")
    cluster.worker("a")
    cluster.wait_for("CycleRunning", 0)
    coordinator.send(signal.SIGKILL)
    coordinator.ended()
    agent.said("joining anew: .* longer than the lease")
    agent.said("not reached: connection refused; trying again for at most 60 s")
    cluster.serve(listen=cluster.address)
    cluster.worker("a", cycle=1).tell("exit", code=0)
    assert agent.ended() == 0


@pytest.mark.rule("E3")
def test_who_joins_anew_gives_up_after_its_coordinator_grace(cluster: Cluster) -> None:
    coordinator = cluster.serve()
    agent = cluster.join("a", "--on-partition", "stop", "--join-timeout", "600", "--coordinator-grace", "5")
    cluster.worker("a")
    coordinator.send(signal.SIGKILL)
    assert agent.ended() == 4
    assert "gave up after 5 s (--coordinator-grace)" in agent.err[-1]


@pytest.mark.rule("E5")
def test_a_journal_that_is_deleted_in_use_ends_the_coordinator_and_no_worker(cluster: Cluster) -> None:
    """Nothing is told that is not on the disk; agents join anew where the next coordinator begins from nothing."""
    coordinator = cluster.serve()
    agents = cluster.join_all("a b", "--nnodes", "2")
    workers = cluster.workers(0, 2)
    cluster.wait_for("CycleRunning", 0)
    shutil.rmtree(cluster.state_dir)
    workers[0].tell("exit", code=3)
    assert coordinator.ended() == 1
    assert "was deleted or replaced while it was in use" in coordinator.err[-1]
    assert not [line for line in coordinator.err if "Traceback" in line]
    agents[1].said("lost the coordinator .*; workers run on")
    assert workers[1].ended_at is None
    cluster.forget_facts()
    cluster.serve(listen=cluster.address)
    assert [one.node for one in cluster.workers(1, 2)] == ["a", "b"]


@pytest.mark.rule("D4", "D5")
def test_a_node_that_is_killed_whole_uses_up_no_last_restart(cluster: Cluster) -> None:
    """Worker first, then agent, as a scheduler does it: the loss is the cause, and costs no restart."""
    cluster.serve()
    options = ("--nnodes", "2:3", "--last-call", "20", "--max-restarts", "1", "--settle", "0")
    agents = cluster.join_all("a b c", *options)
    cluster.workers(0, 2)[0].tell("exit", code=3)
    workers = cluster.workers(1, 2)
    cluster.wait_for("CycleRunning", 1)
    os.kill(workers[1].pid, signal.SIGKILL)
    cluster.wait_for("CycleEnded", 1)
    agents[1].send(signal.SIGKILL)
    after = cluster.workers(2, 2)
    assert [one.node for one in after] == ["a", "c"]
    assert cluster.rank_map(1).failure.cause == common_pb2.CAUSE_NODE_LOST
    run = cluster.run()
    assert (run.restarts_used, run.replacements_used) == (1, 1)
    for worker in after:
        worker.tell("exit", code=0)
    assert [agents[0].ended(), agents[2].ended()] == [0, 0]
