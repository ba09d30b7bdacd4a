"""How cycles end and what comes after: failures, budgets, success."""

from __future__ import annotations

import json
import signal

import pytest

from nvrx.v1 import common_pb2

from .cluster import OBEY, RUN_ID, Cluster, worker_script

SUCCEEDED = common_pb2.WORKER_OUTCOME_SUCCEEDED
FAILED = common_pb2.WORKER_OUTCOME_FAILED
STOPPED = common_pb2.WORKER_OUTCOME_STOPPED_BY_AGENT


@pytest.mark.rule("H1", "H3", "D4", "E2")
def test_the_failed_cycles_map_stays_readable(cluster: Cluster) -> None:
    """C023: fir's worker fails, then fir leaves and yew takes its place; every map can be asked for."""
    cluster.serve()
    agents = {}
    for procid, name in enumerate(("oak", "fir", "yew")):
        agents[name] = cluster.join(name, "--nnodes", "2:3", "--last-call", "20", env={"SLURM_PROCID": str(procid)})
    cluster.wait_for("CycleRunning", 0)
    fir = cluster.worker("fir")
    assert fir.rank == 1
    fir.tell("exit", code=9)
    assert [one.node for one in cluster.workers(1, 2)] == ["oak", "fir"]
    agents["fir"].send(signal.SIGTERM)
    cluster.wait_for("CycleRunning", 2)
    assert cluster.world(2) == ["oak", "yew"]

    failed = cluster.rank_map(0)
    assert [(one.first_rank, one.node_id) for one in failed.nodes] == [(0, "oak"), (1, "fir")]
    failure = failed.failure
    assert (failure.cause, failure.node_id) == (common_pb2.CAUSE_WORKER_FAILED, "fir")
    assert (failure.rank, failure.local_rank, failure.exit_code) == (1, 0, 9)
    assert [one.outcome.state for one in failed.nodes] == [STOPPED, FAILED]
    assert [(one.first_rank, one.node_id) for one in cluster.rank_map().nodes] == [(0, "oak"), (1, "yew")]
    assert cluster.rank_map(-1).cycle == 1
    assert cluster.rank_map(1).failure.cause == common_pb2.CAUSE_NODE_LEFT

    agents["oak"].said("rank map of failed cycle 0 in")
    written = json.loads(cluster.log_of("oak", 0, "failed-rank-map.json").read_text())
    assert (written["failure"]["node_id"], written["failure"]["exit_code"]) == ("fir", 9)
    worker = cluster.worker("oak", 1)
    assert worker.env["NVRX_FAILED_RANK_MAP"] == str(cluster.log_of("oak", 0, "failed-rank-map.json"))
    assert json.loads(cluster.log_of("oak", 1, "rank-map.json").read_text())["cycle"] == 1
    assert worker.env["NVRX_RANK_MAP"] == str(cluster.log_of("oak", 1, "rank-map.json"))


@pytest.mark.rule("D2")
def test_one_local_failure_stops_all_at_once(cluster: Cluster) -> None:
    """C069: the other node's worker is stopped within 5 s of the failure, and C060: the standby stays a standby."""
    cluster.serve()
    cluster.join_all("n0 n1 n2", "--nnodes", "2:3", "--last-call", "20")
    other, failing = cluster.worker("n0"), cluster.worker("n1")
    cluster.wait_for("CycleRunning", 0)
    failing.tell("exit", code=1)
    assert other.ended() - failing.ended() < 5.0
    cluster.wait_for("CycleRunning", 1)
    assert cluster.world(1) == ["n0", "n1"]
    assert {one.env["NVRX_CYCLE"] for one in cluster.workers(1, 2)} == {"1"}
    assert {one.env["TORCHELASTIC_RESTART_COUNT"] for one in cluster.workers(1, 2)} == {"1"}


@pytest.mark.rule("C5", "D2")
def test_a_slow_active_node_keeps_its_seat(cluster: Cluster) -> None:
    """C060: node 0's worker takes a while to stop, so that the standby is always free first: it stays out."""
    cluster.serve()
    command = worker_script("checkpoint")
    limits = ("--max-restarts", "9", "--max-node-failures", "0")
    cluster.join_all("n0 n1 n2", "--nnodes", "2:3", "--last-call", "20", *limits, command=command)
    for cycle in range(3):
        slow, failing = cluster.worker("n0", cycle), cluster.worker("n1", cycle)
        slow.said("ready")
        cluster.wait_for("CycleRunning", cycle)
        failing.tell("exit", code=1)
        following = cluster.worker("n0", cycle + 1)
        assert slow.ended() < following.at
        assert cluster.world(cycle + 1) == ["n0", "n1"]
    assert not cluster.hall.find("n2", None)


@pytest.mark.rule("D8")
def test_standbys_end_well_with_the_run(cluster: Cluster) -> None:
    """C064: all agents exit 0 within 2 s, without a traceback."""
    cluster.serve("--once")
    agents = cluster.join_all("a b c d", "--nnodes", "2:4", "--last-call", "20")
    for one in cluster.workers(0, 2):
        one.tell("exit", code=0)
    closed = cluster.wait_for("RunClosed")
    assert closed.detail["state"] == "SUCCEEDED"
    last_worker = max(one.ended() for one in cluster.hall.workers)
    assert [one.ended() for one in agents] == [0, 0, 0, 0]
    for agent in agents:
        assert agent.ended_at is not None
        assert agent.ended_at - last_worker < 2.0, agent.tail()
        assert not [line for line in agent.err if "Traceback" in line or " error " in line]
    assert cluster.programs[0].ended() == 0


@pytest.mark.rule("D5")
def test_standbys_do_not_claim_success(cluster: Cluster) -> None:
    """C065, C120: with no restart left all agents exit 1, standbys too, and name rank, node and exit code."""
    cluster.serve()
    agents = cluster.join_all("a b c", "--nnodes", "2:3", "--last-call", "20", "--max-restarts", "0")
    cluster.wait_for("CycleRunning", 0)
    cluster.worker("b").tell("exit", code=37)
    assert [one.ended() for one in agents] == [1, 1, 1]
    for one in agents:
        assert [line for line in one.err if "rank 1 (local rank 0) on b failed with exit 37" in line], one.tail()
    run = cluster.run()
    assert (run.state, run.exit_code) == (common_pb2.RUN_STATE_FAILED, 1)
    assert "exit 37" in run.reason
    assert cluster.rank_map(0).failure.exit_code == 37
    late = cluster.join("d", "--nnodes", "2:3", "--last-call", "20", "--max-restarts", "0")
    assert late.ended() == 1
    assert "is closed" in late.err[-1]


@pytest.mark.rule("D8")
def test_a_node_that_is_done_early_waits(cluster: Cluster) -> None:
    """C066: no restart, no eviction, no promotion; and its reserved store port stays."""
    cluster.serve("--store", "rank0")
    agents = cluster.join_all("a b c", "--nnodes", "2:3", "--last-call", "20", command=worker_script("meet"))
    first, second = cluster.workers(0, 2)
    for one in (first, second):
        assert one.said("met")["answer"] == "cycle 0"
    second.tell("exit", code=0)
    cluster.wait_for("WorkersExited", 0, "b")
    cluster.board.until(
        lambda: cluster.nodes()["b"].phase == common_pb2.AGENT_PHASE_SUCCEEDED or None, "b to be known as done"
    )
    # Longer than a lease would be borne in silence, were it one.
    assert first.ended_at is None
    assert [one.exit_code for one in agents] == [None] * 3
    first.tell("exit", code=0)
    assert [one.ended() for one in agents] == [0, 0, 0]
    assert len(cluster.find("WorldChosen")) == 1
    assert [one.outcome.state for one in cluster.rank_map(0).nodes] == [SUCCEEDED, SUCCEEDED]


@pytest.mark.rule("D8")
def test_a_node_that_was_done_takes_part_in_the_next_cycle(cluster: Cluster) -> None:
    """One node finished, then another fails: the finished node runs again."""
    cluster.serve()
    cluster.join_all("a b", "--nnodes", "2")
    first, second = cluster.workers(0, 2)
    second.tell("exit", code=0)
    cluster.wait_for("WorkersExited", 0, "b")
    first.tell("exit", code=3)
    assert [one.node for one in cluster.workers(1, 2)] == ["a", "b"]


@pytest.mark.rule("G5", "D4")
@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSEGV, "SIGSEGV"), (40, "signal 40")]
)
def test_a_worker_killed_by_a_signal(cluster: Cluster, number: int, name: str) -> None:
    """C121: the name is in the agent's words, the reason and the map; the agent's own exit code is 1."""
    cluster.serve()
    agent = cluster.join("n0", "--max-restarts", "0")
    cluster.worker("n0").tell("kill", signal=int(number))
    assert agent.ended() == 1
    assert [line for line in agent.err if f"rank 0 (local rank 0) failed: {name}" in line], agent.tail()
    failure = cluster.rank_map(0).failure
    assert (failure.signal, failure.HasField("exit_code")) == (name, False)
    assert f"failed with {name}" in cluster.run().reason


@pytest.mark.rule("D8")
def test_every_way_to_exit_0_is_success(cluster: Cluster) -> None:
    """C122: sys.exit(0), sys.exit(None), os._exit(0)."""
    cluster.serve()
    agent = cluster.join("n0", "--nproc-per-node", "3", "--max-restarts", "0")
    first, second, third = cluster.workers(0, 3)
    first.tell("exit", code=0)
    second.tell("exit", code=None)
    third.tell("_exit", code=0)
    assert agent.ended() == 0


@pytest.mark.rule("D5", "G8")
def test_workers_that_die_at_once(cluster: Cluster) -> None:
    """C123: four nodes, a script with a syntax error: three restarts, then the end, the text in every node's log."""
    script = cluster.directory / "train.py"
    script.write_text("def broken(:\n")
    cluster.serve()
    # Chance decides whose worker is first to fail: three times in a row it may be the same.
    options = ("--nnodes", "4:5", "--last-call", "20", "--max-node-failures", "0")
    agents = cluster.join_all("a b c d e", *options, command=[str(script)])
    assert [one.ended() for one in agents] == [1] * 5
    assert len(cluster.find("WorldChosen")) == 4
    for cycle in range(4):
        assert cluster.world(cycle) == ["a", "b", "c", "d"]
        logs = [cluster.log_of(node, cycle, f"rank-{rank}.err") for rank, node in enumerate("abcd")]
        # A cycle may be over before a slower node has started its worker.
        assert [one for one in logs if one.exists() and "SyntaxError" in one.read_text()]
    assert "SyntaxError" in cluster.rank_map(3).failure.message
    assert "SyntaxError" in cluster.run().reason


@pytest.mark.rule("D5")
def test_restarts_are_counted_once_for_the_run(cluster: Cluster) -> None:
    """C026: a fresh agent sees the run's cycle number, not 0, and refills no budget."""
    cluster.serve()
    options = ["--nnodes", "2:3", "--last-call", "20", "--max-restarts", "1", "--settle", "0"]
    agents = {name: cluster.join(name, *options) for name in "abc"}
    cluster.wait_for("CycleRunning", 0)
    cluster.worker("a").tell("exit", code=1)
    cluster.wait_for("CycleRunning", 1)
    agents["b"].send(signal.SIGTERM)
    cluster.wait_for("CycleRunning", 2)
    assert cluster.world(2) == ["a", "c"]
    agents["b"].ended()
    agents["b"] = cluster.join("b", *options)
    agents["b"].said("joined run")
    assert {one.env["TORCHELASTIC_RESTART_COUNT"] for one in cluster.workers(2, 2)} == {"2"}
    run = cluster.run()
    assert (run.restarts_used, run.replacements_used) == (1, 1)
    cluster.worker("c", 2).tell("exit", code=1)
    assert [agents[name].ended() for name in "abc"] == [1, 1, 1]
    assert not cluster.hall.find("b", 2)


@pytest.mark.rule("D5")
def test_no_restart_means_no_second_cycle(cluster: Cluster) -> None:
    """C027: `--max-restarts 0`, an agent killed: the run ends, and a fresh agent starts nothing."""
    cluster.serve()
    first = cluster.join("a", "--nnodes", "2", "--max-restarts", "0")
    killed = cluster.join("b", "--nnodes", "2", "--max-restarts", "0")
    cluster.workers(0, 2)
    killed.send(signal.SIGKILL)
    assert first.ended() == 1
    again = cluster.join("b", "--nnodes", "2", "--max-restarts", "0")
    assert again.ended() == 1
    assert len(cluster.find("WorldChosen")) == 1
    assert len(cluster.hall.workers) == 2


@pytest.mark.rule("G5", "G8", "D4")
def test_the_last_words_of_a_crash(cluster: Cluster) -> None:
    """C135: a line without its end, then SIGKILL; the other worker is marked as stopped by its agent."""
    cluster.serve()
    agent = cluster.join("n0", "--nproc-per-node", "2", "--max-restarts", "0")
    failing, other = cluster.workers(0, 2)
    for fd, text in ((1, "half a line"), (2, "Traceback (most recent call last)\nCUDA error: \xff unspecified")):
        failing.tell("print", fd=fd, text=text)
    failing.tell("kill", signal=int(signal.SIGKILL))
    assert agent.ended() == 1
    assert other.ended()
    assert cluster.log_of("n0", 0, "rank-0.out").read_text() == "half a line"
    assert "unspecified" in cluster.log_of("n0", 0, "rank-0.err").read_text()
    failure = cluster.rank_map(0).failure
    assert failure.stderr_tail.startswith("Traceback")
    assert "CUDA error" in failure.message
    exits = {one.local_rank: one for one in cluster.rank_map(0).nodes[0].outcome.exits}
    assert (exits[0].signal, exits[0].stopped_by_agent) == ("SIGKILL", False)
    assert (exits[1].signal, exits[1].stopped_by_agent) == ("SIGTERM", True)


@pytest.mark.rule("G1", "D4")
def test_torchs_error_file_gives_the_message(cluster: Cluster) -> None:
    """What a worker writes to TORCHELASTIC_ERROR_FILE is the failure's text."""
    cluster.serve()
    text = json.dumps({"message": {"message": "ValueError: no such shard", "extraInfo": {}}})
    agent = cluster.join(
        "n0", "--max-restarts", "0", command=["sh", "-c", f"echo '{text}' > $TORCHELASTIC_ERROR_FILE; exit 1"]
    )
    assert agent.ended() == 1
    assert cluster.rank_map(0).failure.message == "ValueError: no such shard"


@pytest.mark.rule("A3")
def test_reopening_a_closed_run(cluster: Cluster) -> None:
    """`--reopen` opens the next life: cycles number on, budgets start anew; a requeued job does so by itself."""
    cluster.serve()
    command = ["sh", "-c", "exit 1"]
    assert cluster.join("n0", "--max-restarts", "1", command=command).ended() == 1
    assert cluster.join("n0", "--max-restarts", "1", command=command).ended() == 1
    assert len(cluster.find("WorldChosen")) == 2
    assert cluster.join("n0", "--max-restarts", "1", "--reopen", command=command).ended() == 1
    requeued = cluster.join("n0", "--max-restarts", "1", command=OBEY, env={"SLURM_RESTART_COUNT": "1"})
    cluster.worker("n0", 4).tell("exit", code=0)
    assert requeued.ended() == 0


@pytest.mark.rule("H5")
def test_cycles_are_followed_in_a_directory(cluster: Cluster) -> None:
    """All nodes write the same files; how a cycle ended is there too, also of the last one."""
    info = cluster.directory / "cycles"
    cluster.serve()
    agents = cluster.join_all("n0 n1", "--nnodes", "2", "--cycle-info-dir", str(info))
    workers = cluster.workers(0, 2)
    cluster.wait_for("CycleRunning", 0)
    workers[1].tell("exit", code=9)
    for worker in cluster.workers(1, 2):
        worker.tell("exit", code=0)
    assert [agent.ended() for agent in agents] == [0, 0]
    assert sorted(one.name for one in info.iterdir()) == ["current", f"{RUN_ID}.cycle-0.json", f"{RUN_ID}.cycle-1.json"]
    first, last = (json.loads((info / name).read_text()) for name in (f"{RUN_ID}.cycle-0.json", "current"))
    assert (first["failure"]["cause"], first["failure"]["rank"]) == ("CAUSE_WORKER_FAILED", 1)
    assert (last["cycle"], last["state"]) == (1, "CYCLE_STATE_ENDED")
    assert [one["outcome"]["state"] for one in last["nodes"]] == ["WORKER_OUTCOME_SUCCEEDED"] * 2
