"""Real torch workers: they find each other in every cycle, whoever is rank 0."""

from __future__ import annotations

import contextlib
import signal
import sys
from pathlib import Path

import pytest

from .cluster import Cluster, worker_script
from .hall import Worker
from .programs import Program

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]
TORCH_S = 90.0
"""How long torch may take to be imported by all workers of a world on a busy machine."""


def _join(cluster: Cluster, procid: int, script: str, *options: str) -> Program:
    return cluster.join(
        f"n{procid}",
        *options,
        command=worker_script(script),
        env={"SLURM_PROCID": str(procid), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        wrapped=[sys.executable, "-m", "tests.e2e.files_only", str(cluster.directory)],
    )


def _reduced(workers: list[Worker]) -> list[tuple[str, int, int]]:
    """(node, rank, total) of every worker, in order of rank."""
    said = [one.said("reduced", TORCH_S) for one in workers]
    return [(one.node, words["rank"], words["total"]) for one, words in zip(workers, said, strict=True)]


@pytest.mark.rule("C6", "I1", "G2", "D2")
def test_gloo_meets_again_wherever_rank_0_is(cluster: Cluster) -> None:
    """C021, C022, C061: infra rank 0 joins last; then its agent is killed, and a survivor turns from rank 1 to 0."""
    options = ("--nnodes", "2:3", "--last-call", "60", "--nproc-per-node", "2")
    cluster.serve()
    agents = {}
    for procid in (2, 1, 0):
        agents[procid] = _join(cluster, procid, "reduce", *options)
        agents[procid].said("joined run")
    total = 1 + 2 + 3 + 4
    assert _reduced(cluster.workers(0, 4)) == [("n0", 0, total), ("n0", 1, total), ("n1", 2, total), ("n1", 3, total)]
    agents[0].send(signal.SIGKILL)
    workers = cluster.workers(1, 4)
    assert _reduced(workers) == [("n1", 0, total), ("n1", 1, total), ("n2", 2, total), ("n2", 3, total)]
    assert {one.env["LOCAL_RANK"] for one in workers} == {"0", "1"}
    assert [(one.first_rank, one.node_id) for one in cluster.rank_map().nodes] == [(0, "n1"), (2, "n2")]
    for worker in workers:
        worker.tell("_exit", code=0)
    assert [agents[procid].ended() for procid in (1, 2)] == [0, 0]


def _listens(pid: int, port: int) -> bool:
    """Whether a process listens on a port."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(entry.readlink()).removeprefix("socket:[").rstrip("]"))
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    # The second field is ADDRESS:PORT in hexadecimal, the fourth the state (0A: listening), the tenth the inode.
    return any(one[3] == "0A" and one[9] in inodes and int(one[1].rpartition(":")[2], 16) == port for one in lines)


@pytest.mark.rule("I1", "I2")
def test_torchs_store_binds_the_port_that_the_agent_holds(cluster: Cluster) -> None:
    """In each of several cycles rank 0's store listens on MASTER_PORT, held until then, and new each time."""
    cluster.serve("--store", "rank0")
    agents = [_join(cluster, procid, "store", "--nnodes", "2", "--max-restarts", "9") for procid in (0, 1)]
    ports = []
    for cycle in range(3):
        workers = cluster.workers(cycle, 2)
        for one in workers:
            words = one.said("read", TORCH_S)
            assert (words["cycle"], one.cycle) == (cycle, cycle)
        ports.append(int(workers[0].env["MASTER_PORT"]))
        assert workers[0].said("read")["held"]
        assert _listens(workers[0].pid, ports[-1])
        if cycle < 2:
            workers[cycle].tell("exit", code=1)
    assert len(set(ports)) == 3
    for one in cluster.workers(2, 2):
        one.tell("_exit", code=0)
    assert [one.ended() for one in agents] == [0, 0]
