"""Replacement groups and segments on real agents, as a Slurm array or a block topology makes them."""

from __future__ import annotations

import signal

import pytest

from .cluster import Cluster
from .programs import Program

ARRAY = {"SLURM_ARRAY_JOB_ID": "700", "SLURM_NNODES": "2"}


def array_node(cluster: Cluster, task: int, procid: int, *options: str) -> Program:
    env = ARRAY | {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_PROCID": str(procid)}
    return cluster.join(f"t{task}p{procid}", *options, "--last-call", "20", env=env)


@pytest.mark.rule("B6", "C2", "B3", "D2")
def test_array_units_are_replaced_whole(cluster: Cluster) -> None:
    """C071, C073, C002: an array with a hole (tasks 1, 2, 5); a node of one unit dies, the spare unit takes over."""
    cluster.serve()
    agents = {
        (task, procid): array_node(cluster, task, procid, "--nnodes", "4:6") for task in (1, 2, 5) for procid in (0, 1)
    }
    cluster.wait_for("CycleRunning", 0)
    assert cluster.world(0) == ["t1p0", "t1p1", "t2p0", "t2p1"]
    first = cluster.rank_map(0)
    assert [(one.infra_rank, one.replacement_group_id) for one in first.nodes] == [
        (2, "1"),
        (3, "1"),
        (4, "2"),
        (5, "2"),
    ]
    agents[2, 1].send(signal.SIGKILL)
    cluster.wait_for("CycleRunning", 1)
    assert cluster.world(1) == ["t1p0", "t1p1", "t5p0", "t5p1"]
    shown = cluster.rank_map(1)
    assert {one.node_id: one.reason for one in shown.standbys} == {
        "t2p0": "its group 2 has 1 of 2 nodes here (t2p1 lost)"
    }
    agents[1, 0].send(signal.SIGKILL)
    cluster.wait_for("NodeLost", node="t1p0")
    status = cluster.board.until(lambda: cluster.run().waiting_reason or None, "a reason to wait")
    assert "group 1 has 1 of 2 (t1p0 lost)" in status
    array_node(cluster, 2, 1, "--nnodes", "4:6")
    cluster.wait_for("CycleRunning", 2)
    assert cluster.world(2) == ["t2p0", "t2p1", "t5p0", "t5p1"]


@pytest.mark.rule("B7", "C3", "C6", "A7")
def test_segments_stay_in_their_block(cluster: Cluster) -> None:
    """Two blocks of three nodes, segments of two: one node of each block stands by, and takes over in its own block."""
    cluster.serve()
    agents = {}
    for block in ("b1", "b2"):
        for number in range(3):
            name = f"{block}n{number}"
            topology = {"SLURM_TOPOLOGY_ADDR": f"{block}.n{number}", "SLURM_TOPOLOGY_ADDR_PATTERN": "block.node"}
            options = ("--nnodes", "4:6", "--segment-size", "2", "--last-call", "20")
            agents[name] = cluster.join(name, *options, env=topology)
    cluster.wait_for("CycleRunning", 0)
    assert cluster.world(0) == ["b1n0", "b1n1", "b2n0", "b2n1"]
    assert [one.domain_id for one in cluster.rank_map(0).nodes] == ["b1", "b1", "b2", "b2"]
    agents["b1n0"].send(signal.SIGKILL)
    cluster.wait_for("CycleRunning", 1)
    assert cluster.world(1) == ["b1n1", "b1n2", "b2n0", "b2n1"]
    refused = cluster.join("odd", "--nnodes", "3:6", "--segment-size", "2", env={"NVRX_DOMAIN_ID": "x"})
    assert refused.ended() == 2
    assert "MIN 3 is no multiple of the segment size 2" in refused.err[-1]


@pytest.mark.rule("C6")
def test_sticky_ranks_stay_with_their_nodes(cluster: Cluster) -> None:
    cluster.serve()
    options = ("--nnodes", "3:4", "--rank-policy", "sticky", "--last-call", "20")
    agents = cluster.join_all("n0 n1 n2 n3", *options)
    cluster.wait_for("CycleRunning", 0)
    agents[0].send(signal.SIGKILL)
    cluster.wait_for("CycleRunning", 1)
    assert cluster.world(1) == ["n3", "n1", "n2"]
