"""What must not end a healthy training: others that speak in a node's name, a coordinator of another run, a short
join timeout."""

from __future__ import annotations

import signal

import pytest

from nvrx.v1 import heartbeat_pb2, heartbeat_pb2_grpc

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
    options = ("--on-partition", "stop", "--join-timeout", "1", "--coordinator-grace")
    patient = cluster.join("a", "--nnodes", "2", *options, "60")
    hasty = cluster.join("b", "--nnodes", "2", *options, "5")
    cluster.workers(0, 2)
    cluster.wait_for("CycleRunning", 0)
    coordinator.send(signal.SIGKILL)
    coordinator.ended()
    assert hasty.ended() == 4
    assert "gave up after 5 s (--coordinator-grace)" in hasty.err[-1]
    patient.said("not reached: connection refused; trying again for at most 60 s")
    cluster.serve(listen=cluster.address)
    cluster.join("c", "--nnodes", "2", "--join-timeout", "1")
    cluster.running_cycle(0)
