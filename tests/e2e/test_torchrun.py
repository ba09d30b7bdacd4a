"""torch's own agent with our rendezvous: real torchrun processes, and a real coordinator."""

from __future__ import annotations

import os
import signal

import pytest

from .cluster import Cluster
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
