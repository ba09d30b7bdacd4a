"""torch's own agent with our rendezvous: real torchrun processes, and a real coordinator."""

from __future__ import annotations

import os
import re
import signal

import pytest

from nvrx.v1 import common_pb2

from .cluster import RUN_ID, Cluster
from .hall import Worker
from .torch_agents import torchrun

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
TORCH_S = 90.0


def _places(workers: list[Worker]) -> list[tuple[str, int, int]]:
    """(node, group rank, rank) of each worker, in order of rank."""
    return [(one.node, int(one.env["GROUP_RANK"]), one.rank) for one in workers]


@pytest.mark.rule("B3", "C6", "G1", "D8")
def test_ranks_follow_the_infra_order_and_all_end_well(cluster: Cluster) -> None:
    cluster.serve()
    options = ("--nproc-per-node", "2")
    agents = [
        torchrun(cluster, node, nnodes="2", options=options, env={"GROUP_RANK": rank})
        for node, rank in (("a", "1"), ("b", "0"))
    ]
    cluster.wait_for("CycleRunning", 0, timeout_s=TORCH_S)
    workers = cluster.workers(0, 4)
    assert _places(workers) == [("b", 0, 0), ("b", 0, 1), ("a", 1, 2), ("a", 1, 3)]
    for one in workers:
        one.tell("_exit", code=0)
    assert [one.ended() for one in agents] == [0, 0]
    cluster.wait_for("RunClosed")
    for agent in agents:
        noise = [line for line in agent.err if re.search(r"Traceback|Error|warning", line)]
        assert noise == [], agent.tail()
    assert "GRPC_ENABLE_FORK_SUPPORT" not in workers[0].env
    assert workers[0].env["TORCH_ELASTIC_WORKER_IDENTICAL"] == "1"
    assert {
        name: workers[2].env[name] for name in ("NVRX_RUN_ID", "NVRX_CYCLE", "NVRX_NODE_ID", "NVRX_INFRA_RANK")
    } == {
        "NVRX_RUN_ID": RUN_ID,
        "NVRX_CYCLE": "0",
        "NVRX_NODE_ID": "a",
        "NVRX_INFRA_RANK": "1",
    }
    assert (cluster.logs / RUN_ID / "a" / "cycle-0" / "rank-map.json").exists()


@pytest.mark.rule("A5", "C5", "D2", "E1", "I1", "I2", "D8")
def test_a_standby_takes_the_place_of_a_node_that_is_killed(cluster: Cluster) -> None:
    """Real gloo before and after."""
    cluster.serve()
    agents = {node: torchrun(cluster, node, nnodes="2:3", script="reduce") for node in ("n0", "n1", "n2")}
    workers = cluster.workers(0, 2)
    assert [one.said("reduced", TORCH_S)["total"] for one in workers] == [3, 3]
    cluster.wait_for("CycleRunning", 0)
    (standby,) = set(agents) - {one.node for one in workers}
    survivor, lost = workers[1].node, workers[0].node

    agents[lost].send(signal.SIGKILL)
    os.kill(workers[0].pid, signal.SIGKILL)

    anew = cluster.workers(1, 2)
    assert sorted(one.node for one in anew) == sorted((survivor, standby))
    assert [one.said("reduced", TORCH_S)["total"] for one in anew] == [3, 3]
    assert [(one.rank, one.env["WORLD_SIZE"]) for one in anew] == [(0, "2"), (1, "2")]
    assert anew[0].env["MASTER_PORT"] != workers[0].env["MASTER_PORT"]
    assert cluster.rank_map(0).failure.node_id == lost
    for one in anew:
        one.tell("_exit", code=0)
    assert [agents[node].ended() for node in (survivor, standby)] == [0, 0]


@pytest.mark.rule("D2", "D4", "D8", "G5")
def test_a_worker_that_fails_restarts_all_nodes_and_is_on_record(cluster: Cluster) -> None:
    """And who stands by until the run ends well without it ends well, too."""
    cluster.serve()
    two = ("--nproc-per-node", "2")
    agents = {node: torchrun(cluster, node, nnodes="2:3", options=two) for node in ("n0", "n1", "n2")}
    cluster.wait_for("CycleRunning", 0, timeout_s=TORCH_S)
    workers = cluster.workers(0, 4)
    workers[3].tell("_exit", code=7)
    anew = cluster.workers(1, 4)
    assert {one.node for one in anew} == {one.node for one in workers}
    failure = cluster.rank_map(0).failure
    assert (failure.node_id, failure.rank, failure.local_rank, failure.exit_code) == (workers[3].node, 3, 1, 7)
    assert all(one.ended() <= new.at for one in workers for new in anew if one.node == new.node)
    cluster.wait_for("CycleRunning", 1)
    os.kill(anew[0].pid, signal.SIGSEGV)
    last = cluster.workers(2, 4)
    assert cluster.rank_map(1).failure.signal == "SIGSEGV"
    shown = "\n".join(cluster.view("cycles").out)
    assert "failed with exit 7" in shown
    assert "failed with SIGSEGV" in shown
    causes = [cluster.rank_map(cycle).failure.cause for cycle in (0, 1)]
    assert causes == [common_pb2.CAUSE_WORKER_FAILED] * 2

    # One node's workers finish, and then the other's fail: torch's agent starts finished ones no more, and ends well.
    for one in last[:2]:
        one.tell("_exit", code=0)
        one.ended()
    last[2].tell("_exit", code=3)
    assert agents[last[0].node].ended() == 0
    cluster.wait_for("NodeLeft", node=last[0].node)
    for one in cluster.workers(cluster.running_cycle(above=2), 4):
        assert one.node != last[0].node
        one.tell("_exit", code=0)
    assert [one.ended() for one in agents.values()] == [0, 0, 0]


@pytest.mark.rule("E2", "D2")
def test_a_torchrun_told_to_end_leaves_at_once_whatever_its_workers_do(cluster: Cluster) -> None:
    """A standby that never had a worker; then an active one, whose worker does not heed SIGTERM."""
    cluster.serve()
    agents = {node: torchrun(cluster, node, nnodes="1:2", script="stubborn") for node in ("n0", "n1")}
    cluster.wait_for("CycleRunning", 0, timeout_s=TORCH_S)
    (active,) = cluster.world(0)
    (standby,) = set(agents) - {active}
    cluster.wait_for("NodeJoined", node=standby, timeout_s=TORCH_S)
    agents[standby].send(signal.SIGTERM)
    assert "received SIGTERM" in cluster.wait_for("NodeLeft", node=standby).text
    assert agents[standby].ended() != 0
    worker = cluster.worker(active)
    agents[active].send(signal.SIGTERM)
    assert "received SIGTERM" in cluster.wait_for("NodeLeft", node=active).text
    assert worker.ended_at is None
    os.kill(worker.pid, signal.SIGKILL)
    cluster.wait_for("NodeStopped", node=active)
    assert agents[active].ended() != 0
    (exited,) = cluster.rank_map(0).nodes[0].outcome.exits
    assert (exited.signal, exited.stopped_by_agent) == ("SIGKILL", True)


@pytest.mark.rule("D4", "D5")
def test_a_torchrun_that_gives_up_says_how_its_workers_ended(cluster: Cluster) -> None:
    """Its own count of restarts is torch's, and 0 unless told: that is said beforehand."""
    cluster.serve()
    agent = torchrun(cluster, "n0", nnodes="1", options=("--max-restarts", "0", "--tee", "3"))
    worker = cluster.board.until(lambda: next(iter(cluster.hall.workers), None), "a worker", TORCH_S)
    agent.said("torchrun --max-restarts 0 is less than the run's own 3")
    worker.tell("raise", text="no such layer")
    assert agent.ended() == 1
    failure = cluster.rank_map(0).failure
    assert (failure.exit_code, failure.message) == (1, "RuntimeError: no such layer")
    assert failure.stderr_tail.startswith("Traceback")
    assert "its --max-restarts" in cluster.wait_for("NodeLeft", node="n0").text
