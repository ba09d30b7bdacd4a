"""Nodes that come, wait, go, vanish and return."""

from __future__ import annotations

import re
import signal
import socket

import grpc
import pytest

from nvrx.v1 import common_pb2, join_pb2, join_pb2_grpc

from .cluster import Cluster, signal_all, supervisor_of, worker_script
from .programs import NODE, Program

THREE = ("--nnodes", "2:3", "--last-call", "20")


def free_port() -> int:
    """A port that nobody listens at now; the coordinator binds it a moment later."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def running(cluster: Cluster, names: str, *options: str) -> dict[str, Program]:
    """Start agents and wait for the workers of the first cycle."""
    agents = dict(zip(names.split(), cluster.join_all(names, *options), strict=True))
    cluster.worker(cycle=0)
    cluster.workers(0, len(cluster.world(0)))
    return agents


@pytest.mark.rule("E3")
def test_agents_start_before_the_coordinator(cluster: Cluster) -> None:
    """C052: both join soon after its start, and say little until then; one that finds none gives up in time."""
    address = f"127.0.0.1:{free_port()}"
    early = [cluster.join(name, "--nnodes", "2", address=address) for name in "ab"]
    hopeless = cluster.join("c", "--join-timeout", "0.5", address="127.0.0.1:9")
    for one in early:
        one.said(f"coordinator {address} not reached: connection refused; trying again for at most 600 s")
    assert hopeless.ended() == 4
    assert re.search(r"127\.0\.0\.1:9 not reached.*gave up after 0\.5 s \(--join-timeout\)", hopeless.err[-1])
    cluster.serve(listen=address)
    assert [one.node for one in cluster.workers(0, 2)] == ["a", "b"]
    for one in early:
        assert len([line for line in one.err if "not reached" in line]) <= 2


@pytest.mark.rule("E3")
def test_a_name_that_does_not_resolve(cluster: Cluster) -> None:
    """C053: after the join timeout the words are `cannot resolve`, with the name."""
    agent = cluster.join("a", "--join-timeout", "0.5", address="coordinator.invalid:5000")
    assert agent.ended() == 4
    assert "coordinator.invalid:5000 not reached: cannot resolve" in agent.err[-1]


@pytest.mark.rule("D9")
def test_not_enough_nodes(cluster: Cluster) -> None:
    """C055: both end with 1 after the join timeout, with the count and the names in order of arrival."""
    cluster.serve()
    agents = []
    for procid, name in enumerate(("ash", "elm")):
        agents.append(cluster.join(name, "--nnodes", "3:3", "--join-timeout", "1.5", env={"SLURM_PROCID": str(procid)}))
        agents[-1].said("joined run")
    assert cluster.run().waiting_reason == "2 of 3 joined: ash(0), elm(1)"
    assert [one.ended() for one in agents] == [1, 1]
    for one in agents:
        assert [line for line in one.err if "2 of 3 joined: ash(0), elm(1); after waiting 1.5 s" in line], one.tail()
    assert cluster.run().state == common_pb2.RUN_STATE_FAILED
    assert not cluster.find("WorldChosen")


@pytest.mark.rule("C1", "E1")
def test_a_node_leaves_between_join_and_start(cluster: Cluster) -> None:
    """C057: the world is the three that are there."""
    cluster.serve()
    leaver = cluster.join("b", "--nnodes", "3")
    cluster.join("a", "--nnodes", "3")
    cluster.wait_for("NodeJoined", node="a")
    cluster.wait_for("NodeJoined", node="b")
    leaver.send(signal.SIGTERM)
    cluster.wait_for("NodeLeft", node="b")
    cluster.join_all("c d", "--nnodes", "3")
    assert [one.node for one in cluster.workers(0, 3)] == ["a", "c", "d"]
    cluster.wait_for("CycleRunning", 0)


@pytest.mark.rule("E2")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_waiting(cluster: Cluster, number: signal.Signals) -> None:
    """C058: the waiting agent exits within 3 s with 128+n, and is gone from the list at once."""
    cluster.serve()
    agent = cluster.join("a", "--nnodes", "2")
    cluster.wait_for("NodeJoined", node="a")
    agent.send(number)
    assert agent.ended(3.0) == 128 + number
    cluster.wait_for("NodeLeft", node="a")
    assert cluster.nodes()["a"].state == common_pb2.NODE_STATE_LEFT
    unheard = cluster.join("b", address="127.0.0.1:9")
    unheard.said("not reached")
    unheard.send(number)
    assert unheard.ended(3.0) == 128 + number


@pytest.mark.rule("A5")
def test_more_agents_than_max(cluster: Cluster) -> None:
    """C059: the fourth is told and waits; a failure is recovered from with two nodes; it ends with the run."""
    cluster.serve()
    agents = running(cluster, "a b c", *THREE)
    beyond = cluster.join("d", *THREE)
    beyond.said("run run has 3 nodes and allows 3; d would be one more; waiting for a place")
    cluster.worker("b").tell("exit", code=1)
    for one in cluster.workers(1, 2):
        one.tell("exit", code=0)
    assert [one.ended() for one in (*agents.values(), beyond)] == [0, 0, 0, 0]
    assert len([line for line in beyond.err if "would be one more" in line]) == 1


@pytest.mark.rule("A5")
def test_a_place_that_becomes_free_is_taken(cluster: Cluster) -> None:
    """An agent beyond MAX joins once a standby has left."""
    cluster.serve()
    agents = running(cluster, "a b c", *THREE)
    beyond = cluster.join("d", *THREE)
    beyond.said("waiting for a place")
    agents["c"].send(signal.SIGTERM)
    cluster.wait_for("NodeJoined", node="d")


@pytest.mark.rule("A2", "B2")
def test_what_the_coordinator_refuses(cluster: Cluster) -> None:
    """Another shape or setting, with every differing field and both values: exit 3. The others go on."""
    cluster.serve()
    running(cluster, "a b", "--nnodes", "2:4")
    other = cluster.join("c", "--nnodes", "2:3", "--nproc-per-node", "2", "--max-restarts", "9")
    assert other.ended() == 3
    for part in ("max_nodes: run has 4, this node gives 3", "workers_per_node: run has 1", "max_restarts: run has 3"):
        assert part in other.err[-1]
    same = cluster.join("a", "--nnodes", "2:4")
    same.said(r"node a has already joined from 127\.0\.0\.1 \(pid \d+\).*--node-id")
    assert len(cluster.find("WorldChosen")) == 1


@pytest.mark.rule("B4")
def test_two_nodes_with_the_same_place(cluster: Cluster) -> None:
    """All started by ssh, SLURM_PROCID 0: the second is told what is wrong, the first goes on."""
    cluster.serve()
    cluster.join("a", "--nnodes", "2", env={"SLURM_PROCID": "0"}).said("joined run")
    twin = cluster.join("b", "--nnodes", "2", env={"SLURM_PROCID": "0"})
    twin.said("nodes a and b both have SLURM_PROCID=0.*srun")
    cluster.join("c", "--nnodes", "2", env={"SLURM_PROCID": "1"})
    assert [one.node for one in cluster.workers(0, 2)] == ["a", "c"]


@pytest.mark.rule("C5", "E1")
def test_the_standby_died_first(cluster: Cluster) -> None:
    """C062: a dead standby is not picked, the living one is."""
    cluster.serve()
    agents = running(cluster, "a b c d", "--nnodes", "2:4", "--last-call", "20")
    agents["c"].send(signal.SIGKILL)
    cluster.wait_for("NodeLost", node="c")
    agents["a"].send(signal.SIGKILL)
    cluster.wait_for("NodeLost", node="a")
    assert [one.node for one in cluster.workers(1, 2)] == ["b", "d"]


@pytest.mark.rule("D9", "D10")
def test_two_losses_and_one_standby(cluster: Cluster) -> None:
    """C063: never fewer than three; waits, then ends with the count and who is gone."""
    cluster.serve()
    options = ("--nnodes", "3:4", "--last-call", "20", "--join-timeout", "2")
    agents = running(cluster, "a b c d", *options)
    signal_all([agents["a"], agents["b"]], signal.SIGKILL)
    assert [agents[name].ended() for name in "cd"] == [1, 1]
    assert re.match(r"2 of 3 joined: (c, d|d, c); gone: a .*, b .*; after waiting 2 s", cluster.run().reason)
    assert len(cluster.find("WorldChosen")) == 1
    assert cluster.rank_map(0).failure.cause == common_pb2.CAUSE_NODE_LOST


@pytest.mark.rule("D9")
def test_a_replacement_in_time(cluster: Cluster) -> None:
    """Too few nodes, then a fresh one: the run goes on, with the next cycle's number."""
    cluster.serve()
    agents = running(cluster, "a b", "--nnodes", "2")
    agents["a"].send(signal.SIGKILL)
    cluster.wait_for("CycleEnded", 0)
    assert cluster.run().phase == common_pb2.CYCLE_STATE_FORMING
    cluster.join("c", "--nnodes", "2")
    assert [one.node for one in cluster.workers(1, 2)] == ["b", "c"]


@pytest.mark.rule("E2")
def test_ctrl_c_on_one_agent_and_back_later(cluster: Cluster) -> None:
    """C067: it leaves cleanly, the rest continue; when back it is a standby."""
    cluster.serve()
    agents = running(cluster, "a b c", *THREE)
    agents["b"].send(signal.SIGINT)
    assert [one.node for one in cluster.workers(1, 2)] == ["a", "c"]
    assert agents["b"].ended() == 128 + signal.SIGINT
    cluster.join("b", *THREE).said("standby of cycle 1")
    assert cluster.nodes()["b"].state == common_pb2.NODE_STATE_STANDBY
    assert len(cluster.find("WorldChosen")) == 2


@pytest.mark.rule("E1", "E3", "E4")
@pytest.mark.parametrize("on_partition", ["keep", "stop"])
def test_a_silent_node_is_replaced_and_told_when_it_wakes(cluster: Cluster, on_partition: str) -> None:
    """C068: agent, supervisor and worker are suspended for longer than the lease."""
    cluster.serve(timing=("--heartbeat-interval", "0.3", "--lease-ttl", "2", "--reconnect-grace", "1"))
    agents = running(cluster, "a b c", *THREE, "--on-partition", on_partition)
    old, other = cluster.worker("a"), cluster.worker("b")
    frozen = [agents["a"].pid, supervisor_of(old.pid), old.pid]
    for pid in frozen:
        signal.pidfd_send_signal(cluster.handle(pid), signal.SIGSTOP)
    cluster.wait_for("NodeLost", node="a")
    assert other.ended()
    assert [one.node for one in cluster.workers(1, 2)] == ["b", "c"]
    for pid in frozen:
        signal.pidfd_send_signal(cluster.handle(pid), signal.SIGCONT)
    agents["a"].said("joining anew: .*(declared lost|--on-partition stop)")
    assert old.ended()
    again = cluster.wait_for("NodeJoined", node="a", after=cluster.find("NodeLost", node="a")[0].revision)
    assert again.detail["node"]["incarnation"] != cluster.find("NodeJoined", node="a")[0].detail["node"]["incarnation"]
    agents["a"].said("standby of cycle 1")
    cluster.run()
    assert len(cluster.find("WorldChosen")) == 2
    assert not cluster.hall.find("a", 1)


@pytest.mark.rule("C5", "D3")
def test_standbys_take_over_and_ranks_stay_in_order(cluster: Cluster) -> None:
    """C022, C061 without torch: rank 0's agent is killed; rank 1 becomes rank 0 and all meet at its new address."""
    cluster.serve("--store", "rank0")
    agents = []
    for procid in range(3):
        agents.append(
            cluster.join(
                f"n{procid}",
                *THREE,
                *("--nproc-per-node", "2"),
                command=worker_script("meet"),
                env={"SLURM_PROCID": str(procid)},
            )
        )
    for one in cluster.workers(0, 4):
        one.said("met")
    agents[0].send(signal.SIGKILL)
    workers = cluster.workers(1, 4)
    assert [(one.node, one.rank) for one in workers] == [("n1", 0), ("n1", 1), ("n2", 2), ("n2", 3)]
    assert {one.said("met")["answer"] for one in workers} == {"cycle 1"}
    assert len({one.env["MASTER_PORT"] for one in cluster.hall.workers}) == 2
    assert cluster.rank_map(0).failure.node_id == "n0"


@pytest.mark.rule("J2")
def test_a_wrong_token(cluster: Cluster) -> None:
    """Exit code 3, one line, and neither token in it."""
    for name, text in (("right", "a" * 40), ("wrong", "b" * 40)):
        (cluster.directory / name).write_text(text + "\n")
        (cluster.directory / name).chmod(0o600)
    cluster.serve("--token-file", str(cluster.directory / "right"))
    agent = cluster.join("a", "--token-file", str(cluster.directory / "wrong"))
    without = cluster.start(
        "none", [*NODE, "join", "--coordinator", cluster.address, "--log-dir", str(cluster.logs), "--", "true"]
    )
    assert (agent.ended(), without.ended()) == (3, 3)
    for one in (agent, without):
        assert "token" in one.err[-1]
        assert not re.search("a{40}|b{40}", one.tail())


@pytest.mark.rule("B1", "J3")
def test_names_on_the_wire_are_checked(cluster: Cluster) -> None:
    """C143: a Join by hand with names that are paths, or hold line breaks, is refused; one event stays one line."""
    coordinator = cluster.serve()
    stub = join_pb2_grpc.JoinServiceStub(cluster.channel)
    shape = common_pb2.Shape(min_nodes=1, max_nodes=1, workers_per_node=1)
    for run_id, node_id in (("../../x", "n0"), ("a/b", "n0"), ("run", "a/b"), ("run", "a\nb"), ("run", "\x1b[31m")):
        request = join_pb2.JoinRequest(run_id=run_id, node_id=node_id, incarnation="i", address="h", shape=shape)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Join(request, timeout=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (caught.value.details() or "").isprintable()
    coordinator.said("INVALID_FIELD.*31m")
    assert all(line.isprintable() for line in [*coordinator.out, *coordinator.err])
