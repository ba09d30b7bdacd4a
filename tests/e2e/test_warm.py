"""Warm workers through whole agents: on active nodes and on standbys, and nothing left of either."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from .cluster import Cluster, supervisor_of, worker_script
from .programs import Program

READY = "the warm process is ready"
START_S = 60.0
"""Until a zygote is ready: it starts ten seconds after workers did, so that their own start goes first."""


def _of_supervisors(cluster: Cluster) -> list[int]:
    """Workers and zygotes that are left: they carry the mark of their supervisor."""
    return [pid for pid in cluster.alive() if b"\0NVRX_SUPERVISOR=" in Path(f"/proc/{pid}/environ").read_bytes()]


@pytest.mark.rule("G10", "G4")
def test_workers_of_active_nodes_and_of_promoted_standbys_are_warm(cluster: Cluster) -> None:
    cluster.serve()
    options = ("--nnodes", "1:2", "--nproc-per-node", "2", "--prewarm=decimal,json", "--max-restarts", "9")
    agents = {name: cluster.join(name, *options) for name in ("n0", "n1")}
    first = cluster.workers(0, 2)[0].node
    active, standby = agents.pop(first), next(iter(agents.values()))
    for agent in (active, standby):
        agent.said(READY, START_S)
    cluster.workers(0, 2)[1].tell("exit", code=3)
    workers = cluster.workers(1, 2)
    active.said("cycle 1: 2 of 2 workers forked warm")
    assert {one.env["RANK"] for one in workers} == {"0", "1"}
    assert {one.env["NVRX_CYCLE"] for one in workers} == {"1"}
    supervisor = supervisor_of(workers[0].pid)
    active.send(signal.SIGKILL)
    workers = cluster.workers(2, 2)
    standby.said("cycle 2: 2 of 2 workers forked warm")
    assert supervisor_of(workers[0].pid) != supervisor
    for one in workers:
        one.tell("exit", code=0)
    assert standby.ended() == 0
    assert _of_supervisors(cluster) == []


@pytest.mark.rule("G10")
def test_a_name_that_is_none_is_refused_before_joining(cluster: Cluster) -> None:
    cluster.address = "127.0.0.1:9"
    agent = cluster.join("n0", "--prewarm=torch, numpy,a-b")
    assert agent.ended() == 2
    agent.said("--prewarm 'a-b' is no module's name; give names with commas, as torch,numpy")


def _join_torch(cluster: Cluster, node: str) -> Program:
    return cluster.join(
        node,
        *("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "9"),
        command=worker_script("chance"),
        env={"GLOO_SOCKET_IFNAME": "lo", "NVRX_PREWARM": "1"},
        wrapped=[sys.executable, "-m", "tests.e2e.files_only", str(cluster.directory)],
    )


@pytest.mark.torch
@pytest.mark.timeout(300)
@pytest.mark.rule("G10", "D2")
def test_torch_is_imported_once_and_its_workers_differ_in_chance(cluster: Cluster) -> None:
    cluster.serve()
    agents = [_join_torch(cluster, name) for name in ("n0", "n1")]
    for agent in agents:
        agent.said(f"{READY} .*torch", 200.0)
    cluster.workers(0, 4)[2].said("reduced", 100.0)
    cluster.workers(0, 4)[2].tell("exit", code=1)
    said = [one.said("reduced", 100.0) for one in cluster.workers(1, 4)]
    assert [(words["rank"], words["total"], words["loaded"]) for words in said] == [
        (rank, 10, True) for rank in range(4)
    ]
    drawn = list(zip(*(words["drawn"] for words in said), strict=True))
    assert [len(set(column)) for column in drawn] == [4, 4, 4, 4]
    for agent in agents:
        agent.said("cycle 1: 2 of 2 workers forked warm")
    for one in cluster.workers(1, 4):
        one.tell("_exit", code=0)
    assert [agent.ended() for agent in agents] == [0, 0]
