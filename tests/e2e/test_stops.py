"""How agents are stopped, and what their workers may do before they are gone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from nvrx.v1 import common_pb2, join_pb2, join_pb2_grpc

from .cluster import Cluster, signal_all, worker_script
from .programs import is_alive

CHECKPOINT = worker_script("checkpoint")
THREE = ("--nnodes", "2:3", "--last-call", "20")


@pytest.mark.rule("D2", "E2")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_leaving_nodes_checkpoint_is_finished_first(cluster: Cluster, number: signal.Signals) -> None:
    """C119: the worker of the leaving node writes for a second; only then do new workers start, anywhere."""
    cluster.serve()
    agents = cluster.join_all("a b c", *THREE, command=CHECKPOINT)
    for one in cluster.workers(0, 2):
        one.said("ready")
    leaving = cluster.worker("a")
    agents[0].send(number)
    saved = leaving.said("saved")
    assert saved["at"] - leaving.said("saving")["at"] >= 1.0
    following = cluster.workers(1, 2)
    assert [one.node for one in following] == ["b", "c"]
    assert all(one.at > saved["at"] for one in following)
    assert agents[0].ended() == 128 + number
    cluster.wait_for("CycleRunning", 1)
    failure = cluster.rank_map(0).failure
    assert (failure.cause, failure.node_id) == (common_pb2.CAUSE_NODE_LEFT, "a")
    assert cluster.run().restarts_used == 0
    assert cluster.find("NodeStopped", node="a")


@pytest.mark.rule("D2")
def test_a_leaving_node_is_waited_for_no_longer_than_its_grace(cluster: Cluster) -> None:
    """Its worker ignores SIGTERM: SIGKILL after the stop grace, and then the standby's turn."""
    cluster.serve()
    command = worker_script("stubborn")
    agents = [cluster.join(one, *THREE, command=command, stop_grace="1") for one in "abc"]
    old = cluster.workers(0, 2)
    agents[0].send(signal.SIGTERM)
    assert agents[0].ended() == 128 + signal.SIGTERM
    ended = {one.node: one.ended() for one in old}
    following = {one.node: one for one in cluster.workers(1, 2)}
    assert set(following) == {"b", "c"}
    assert following["b"].at > ended["b"]
    assert following["c"].at > ended["a"]


@pytest.mark.rule("E2")
def test_a_second_signal_kills_at_once(cluster: Cluster) -> None:
    """The worker ignores SIGTERM and the grace is long."""
    cluster.serve()
    agent = cluster.join("a", command=worker_script("stubborn"), stop_grace="100")
    worker = cluster.worker("a")
    agent.send(signal.SIGTERM)
    agent.said("stopping the workers")
    agent.send(signal.SIGINT)
    assert worker.ended(10.0)
    assert agent.ended(10.0) == 128 + signal.SIGTERM


@pytest.mark.rule("E2")
def test_sigterm_to_all_agents(cluster: Cluster) -> None:
    """C119: workers get SIGTERM, agents end with 143, nothing is started anew, and the run did not succeed."""
    cluster.serve()
    agents = cluster.join_all("a b c", *THREE, command=CHECKPOINT)
    workers = cluster.workers(0, 2)
    for one in workers:
        one.said("ready")
    signal_all(agents, signal.SIGTERM)
    assert [one.ended() for one in agents] == [128 + signal.SIGTERM] * 3
    for one in workers:
        one.said("saved")
    assert len(cluster.hall.workers) == 2
    assert len(cluster.find("WorldChosen")) == 1
    assert cluster.run().state == common_pb2.RUN_STATE_OPEN
    assert {one.state for one in cluster.nodes().values()} == {common_pb2.NODE_STATE_LEFT}


@pytest.mark.rule("E2", "D8")
def test_exit_0_after_sigterm_is_no_success(cluster: Cluster) -> None:
    """C119: every worker answers SIGTERM with exit code 0, at once; the coordinator hears of all only later."""
    coordinator = cluster.serve()
    agents = cluster.join_all("a b", "--nnodes", "2", command=worker_script("polite"))
    for one in cluster.workers(0, 2):
        one.said("ready")
    cluster.wait_for("CycleRunning", 0)
    coordinator.send(signal.SIGSTOP)
    signal_all(agents, signal.SIGTERM)
    for one in cluster.hall.workers:
        one.ended()
    coordinator.send(signal.SIGCONT)
    assert [one.ended() for one in agents] == [128 + signal.SIGTERM] * 2
    for name in "ab":
        cluster.wait_for("NodeLeft", node=name)
    assert cluster.run().state == common_pb2.RUN_STATE_OPEN


@pytest.mark.rule("E2")
def test_sigterm_to_a_standby(cluster: Cluster) -> None:
    """It leaves at once and harms nobody."""
    cluster.serve()
    agents = cluster.join_all("a b c", *THREE)
    cluster.workers(0, 2)
    agents[2].send(signal.SIGTERM)
    assert agents[2].ended(3.0) == 128 + signal.SIGTERM
    cluster.wait_for("NodeLeft", node="c")
    assert not cluster.find("CycleEnded")


@pytest.mark.rule("E2", "E3")
def test_a_signal_while_the_coordinator_is_away(cluster: Cluster) -> None:
    """The agent ends all the same, and its worker with it."""
    coordinator = cluster.serve()
    agent = cluster.join("a")
    worker = cluster.worker("a")
    coordinator.send(signal.SIGKILL)
    coordinator.ended()
    agent.send(signal.SIGTERM)
    assert agent.ended(10.0) == 128 + signal.SIGTERM
    worker.ended()
    cluster.board.until(lambda: not is_alive(worker.pid) or None, "the worker to be gone", 1.0)


class _SlowCoordinator(join_pb2_grpc.JoinServiceServicer):
    """Admits a node, but its answer takes until `release`."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.release = threading.Event()
        self.left: list[str] = []

    def Join(self, request: join_pb2.JoinRequest, context: grpc.ServicerContext) -> join_pb2.JoinResponse:
        self.asked.set()
        self.release.wait(10.0)
        response = join_pb2.JoinResponse(run_id=request.run_id, journal_id="j")
        response.lease_ttl.FromSeconds(10)
        response.heartbeat_interval.FromSeconds(1)
        return response

    def Leave(self, request: join_pb2.LeaveRequest, context: grpc.ServicerContext) -> join_pb2.LeaveResponse:
        self.left.append(request.node_id)
        return join_pb2.LeaveResponse()


@pytest.fixture
def slow() -> Iterator[tuple[_SlowCoordinator, str]]:
    service = _SlowCoordinator()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    join_pb2_grpc.add_JoinServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"127.0.0.1:{port}"
    service.release.set()
    server.stop(None).wait(10.0)


@pytest.mark.rule("E2")
def test_a_signal_during_the_join(cluster: Cluster, slow: tuple[_SlowCoordinator, str]) -> None:
    """C057, C058: the coordinator has admitted the node while the signal came: the node leaves, no ghost stays."""
    service, address = slow
    agent = cluster.join("a", address=address)
    assert service.asked.wait(30.0)
    agent.send(signal.SIGTERM)
    agent.said("received SIGTERM")
    service.release.set()
    assert agent.ended() == 128 + signal.SIGTERM
    assert service.left == ["a"]


@pytest.mark.rule("E2")
def test_a_signal_while_the_coordinator_does_not_answer(cluster: Cluster, slow: tuple[_SlowCoordinator, str]) -> None:
    """C058: within 3 s all the same."""
    service, address = slow
    agent = cluster.join("a", address=address)
    assert service.asked.wait(30.0)
    agent.send(signal.SIGINT)
    assert agent.ended(3.0) == 128 + signal.SIGINT
