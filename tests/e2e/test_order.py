"""Who is in the world, in which order, and what workers see of it."""

from __future__ import annotations

import itertools
import json
import re
import signal

import pytest
from google.protobuf import json_format

from nvrx.v1 import common_pb2

from .cluster import OBEY, Cluster, worker_script
from .programs import NODE, ROOT

NAMES = ["node-a", "node-b", "node-c"]


@pytest.mark.rule("B3", "C8")
def test_without_any_variable_nodes_are_ordered_by_name(cluster: Cluster) -> None:
    """C020: the same three names give the same ranks in all six orders of joining."""
    cluster.serve()
    orders = list(itertools.permutations(NAMES))
    for position in range(len(NAMES)):
        joining = [
            cluster.join(order[position], "--nnodes", "3", "--run-id", f"run-{number}")
            for number, order in enumerate(orders)
        ]
        for agent in joining:
            agent.said("joined run")
    everyone = cluster.workers(0, len(NAMES) * len(orders))
    for number in range(len(orders)):
        ranks = {one.node: one.rank for one in everyone if one.env["NVRX_RUN_ID"] == f"run-{number}"}
        assert ranks == {"node-a": 0, "node-b": 1, "node-c": 2}


@pytest.mark.rule("A5", "C6", "C7", "D10")
def test_max_is_not_a_bigger_world(cluster: Cluster) -> None:
    """C029: the world is MIN nodes; standbys run nothing, and their coming and going restarts nothing."""
    cluster.serve()
    agents = {
        name: cluster.join(name, "--nnodes", "2:4", "--nproc-per-node", "2", "--last-call", "20") for name in "abcd"
    }
    workers = cluster.workers(0, 4)
    assert [(one.node, one.local_rank, one.rank) for one in workers] == [
        ("a", 0, 0),
        ("a", 1, 1),
        ("b", 0, 2),
        ("b", 1, 3),
    ]
    assert {one.env["WORLD_SIZE"] for one in workers} == {"4"}
    assert {(one.env["GROUP_WORLD_SIZE"], one.env["LOCAL_WORLD_SIZE"]) for one in workers} == {("2", "2")}
    agents["d"].send(signal.SIGTERM)
    left = cluster.wait_for("NodeLeft", node="d")
    assert agents["d"].ended() == 128 + signal.SIGTERM
    cluster.join("d", "--nnodes", "2:4", "--nproc-per-node", "2", "--last-call", "20")
    cluster.wait_for("NodeJoined", node="d", after=left.revision)
    for one in workers:
        one.tell("exit", code=0)
    assert cluster.wait_for("RunClosed").detail["exit_code"] == 0
    assert len(cluster.find("WorldChosen")) == 1
    assert len(cluster.hall.workers) == 4


@pytest.mark.rule("G1")
def test_inherited_ranks_are_replaced_and_all_else_passes(cluster: Cluster) -> None:
    """C042: a container hook's RANK, WORLD_SIZE and MASTER_ADDR do not reach the workers."""
    cluster.serve()
    inherited = dict.fromkeys(["RANK", "LOCAL_RANK", "GROUP_RANK"], "7")
    inherited |= {"WORLD_SIZE": "99", "MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "5"}
    inherited |= {"OMP_NUM_THREADS": "3", "NCCL_DEBUG": "INFO", "ODD": "a=b\n 'c' $HOME \t"}
    cluster.join("n0", "--nproc-per-node", "2", env=inherited)
    first, second = cluster.workers(0, 2)
    assert [one.env["RANK"] for one in (first, second)] == ["0", "1"]
    assert [one.env["LOCAL_RANK"] for one in (first, second)] == ["0", "1"]
    assert first.env["GROUP_RANK"] == "0"
    assert first.env["WORLD_SIZE"] == "2"
    assert first.env["MASTER_ADDR"] == "127.0.0.1"
    assert int(first.env["MASTER_PORT"]) > 1024
    assert first.env["TORCHELASTIC_RESTART_COUNT"] == "0"
    for name in ("OMP_NUM_THREADS", "NCCL_DEBUG", "ODD", "HOME", "PATH"):
        assert first.env[name] == (inherited | cluster.environment())[name]


@pytest.mark.rule("G1", "J2")
def test_what_a_worker_sees(cluster: Cluster) -> None:
    """The names that torchrun gives, ours beside them, and no secret."""
    token = cluster.directory / "token"
    token.write_text("0123456789abcdef0123456789abcdef\n")
    token.chmod(0o600)
    cluster.serve("--token-file", str(token))
    cluster.join("n0", "--nproc-per-node", "2", "--token-file", str(token), env={"SLURM_PROCID": "5"})
    env = cluster.worker("n0", local_rank=1).env
    expected = {
        "RANK": "1",
        "ROLE_RANK": "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "NVRX_RUN_ID": "run",
        "NVRX_CYCLE": "0",
        "NVRX_NODE_ID": "n0",
        "NVRX_INFRA_RANK": "5",
        "NVRX_COORDINATOR": cluster.address,
    }
    assert {name: env.get(name) for name in expected} == expected
    assert "NVRX_FAILED_RANK_MAP" not in env
    assert "0123456789abcdef" not in json.dumps(env)


@pytest.mark.rule("C6", "I1", "G2")
def test_rank_0_is_where_the_others_connect(cluster: Cluster) -> None:
    """C021: infra rank 0 joins last; every worker is told the same address, and rank 0 answers there."""
    cluster.serve("--store", "rank0")
    for procid in (1, 2, 0):
        agent = cluster.join(
            f"n{procid}", "--nnodes", "3", command=worker_script("meet"), env={"SLURM_PROCID": str(procid)}
        )
        agent.said("joined run")
    workers = cluster.workers(0, 3)
    assert [one.node for one in workers] == ["n0", "n1", "n2"]
    assert len({(one.env["MASTER_ADDR"], one.env["MASTER_PORT"]) for one in workers}) == 1
    assert {one.said("met")["answer"] for one in workers} == {"cycle 0"}


@pytest.mark.rule("H1", "H4")
def test_the_rank_map_shows_zeros_and_names(cluster: Cluster) -> None:
    """C024: rank 0, group rank 0, local rank 0 and every node's state are printed, whatever the client."""
    cluster.serve()
    cluster.join_all("oak fir", "--nnodes", "2")
    cluster.wait_for("CycleRunning", 0)
    found = cluster.rank_map()
    assert [(one.node_id, one.group_rank, one.first_rank) for one in found.nodes] == [("fir", 0, 0), ("oak", 1, 1)]
    for one in found.nodes:
        assert one.HasField("group_rank")
        assert one.HasField("first_rank")
        assert one.HasField("infra_rank")
    # What a client prints that leaves out defaults, as grpcurl does.
    sparse = json_format.MessageToDict(found, preserving_proto_field_name=True)["nodes"][0]
    assert (sparse["group_rank"], sparse["first_rank"], sparse["infra_rank"]) == (0, 0, 0)
    assert common_pb2.NODE_STATE_ACTIVE != 0
    assert common_pb2.NODE_STATE_STANDBY != 0
    table = "\n".join(cluster.view("rank-map").out)
    assert re.search(r"^0-0 +0 +fir\b.*\n1-1 +1 +oak\b", table, re.MULTILINE)
    plain = json.loads("\n".join(cluster.view("rank-map", "--output", "json").out))
    assert (plain["cycle"], plain["nodes"][0]["group_rank"], plain["nodes"][0]["first_rank"]) == (0, 0, 0)
    listed = json.loads("\n".join(cluster.view("nodes", "--output", "json").out))["nodes"]
    assert {one["node_id"]: one["state"] for one in listed} == dict.fromkeys(["oak", "fir"], "NODE_STATE_ACTIVE")
    cluster.worker("fir").tell("exit", code=4)
    cluster.wait_for("CycleEnded", 0)
    failed = json.loads("\n".join(cluster.view("rank-map", "--cycle", "0", "--output", "json").out))["failure"]
    assert (failed["rank"], failed["local_rank"], failed["exit_code"]) == (0, 0, 4)


@pytest.mark.rule("A3")
def test_a_node_without_run_id_takes_the_coordinators(cluster: Cluster) -> None:
    """An agent that names no run joins the declared one; under Slurm it names the job, which is then refused."""
    cluster.serve("--run-id", "declared")
    argv = [*("--node-id", "n0"), "--log-dir", str(cluster.logs)]
    cluster.start("n0", [*NODE, "join", "--coordinator", cluster.address, *argv, "--", *OBEY])
    assert cluster.worker("n0").env["NVRX_RUN_ID"] == "declared"
    other = cluster.start(
        "n1",
        [*NODE, "join", "--coordinator", cluster.address, *argv, "--", *OBEY],
        {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0"},
    )
    assert other.ended() == 3
    assert "declared" in other.err[-1]
    assert "4711" in other.err[-1]


def test_the_programs_come_from_this_tree(cluster: Cluster) -> None:
    """What is tested is this tree, not an installed copy."""
    program = cluster.start("where", ["python", "-c", "import nvrx; print(nvrx.__file__)"])
    assert program.ended() == 0
    assert program.out == [str(ROOT / "nvrx" / "__init__.py")]
