"""Health checks of real agents: who is replaced, who stays, what a broken check does (rules G11, E8)."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path

import pytest

from .cluster import OBEY, RUN_ID, Cluster
from .programs import Program, is_alive

OFTEN = ("--health-interval", "0.3")


def says(cluster: Cluster, node: str) -> Path:
    """The file that a node's check reads: an exit code, and what to print."""
    return cluster.directory / f"health-{node}"


def join(cluster: Cluster, node: str, *options: str, code: str = "0") -> Program:
    """An agent whose check does as its file says."""
    file = says(cluster, node)
    file.write_text(f"exit {code}\n")
    return cluster.join(node, *options, *OFTEN, "--health-check", f"sh {shlex.quote(str(file))}")


def turn(cluster: Cluster, node: str, code: int, words: str = "") -> None:
    file = says(cluster, node)
    new = file.with_suffix(".new")
    new.write_text(f"echo {shlex.quote(words)}\nexit {code}\n")
    new.replace(file)


def healthy(cluster: Cluster, state: int, *nodes: str) -> None:
    """Wait until nodes are known to be in a state of health."""
    cluster.board.until(
        lambda: all(cluster.nodes()[one].health.state == state for one in nodes) or None, f"health {state} of {nodes}"
    )


HEALTHY, DEGRADED, FAILED = 1, 2, 3


@pytest.mark.rule("G11", "E8", "D4")
def test_a_node_whose_check_fails_is_replaced_and_may_return(cluster: Cluster) -> None:
    cluster.serve()
    options = ("--nnodes", "2:3", "--last-call", "20")
    agents = [join(cluster, one, *options) for one in "abc"]
    cluster.wait_for("CycleRunning", 0)
    turn(cluster, "b", 2, "row remapper is full")
    ended = cluster.wait_for("CycleEnded", 0)
    assert ended.detail["failure"]["cause"] == "NODE_UNHEALTHY"
    cluster.wait_for("CycleRunning", 1)
    assert cluster.world(1) == ["a", "c"]
    agents[1].said("waiting: excluded: unhealthy, health-check: row remapper is full")
    shown = cluster.view("cycles").out
    assert any("node unhealthy on b: health-check: row remapper is full" in line for line in shown)
    assert any("b -> c" in line for line in shown)
    assert {one.node_id: one.reason for one in cluster.rank_map(1).standbys} == {
        "b": "unhealthy (health-check: row remapper is full)"
    }
    assert any(
        "UNHEALTHY" in line and "FAILED (health-check: row remapper is full)" in line
        for line in cluster.view("nodes").out
    )
    assert "health    unhealthy, and kept out of the world: b" in "\n".join(cluster.view("status").out)
    turn(cluster, "b", 0)
    cluster.wait_for("NodeRecovered", node="b")
    agents[2].send(signal.SIGKILL)
    cluster.wait_for("CycleRunning", 2)
    assert cluster.world(2) == ["a", "b"]
    for worker in cluster.workers(2, 2):
        worker.tell("exit", code=0)
    assert (agents[0].ended(), agents[1].ended()) == (0, 0)


@pytest.mark.rule("G11", "E8")
def test_the_agent_of_an_unhealthy_node_may_end(cluster: Cluster) -> None:
    cluster.serve()
    options = ("--nnodes", "1:2", "--last-call", "20", "--exit-when-excluded")
    first, second = join(cluster, "a", *options), join(cluster, "b", *options)
    cluster.wait_for("CycleRunning", 0)
    turn(cluster, "a", 2, "broken")
    assert first.ended() == 5
    cluster.wait_for("CycleRunning", 1)
    cluster.worker("b", 1).tell("exit", code=0)
    assert second.ended() == 0


@pytest.mark.rule("G11", "C1")
def test_a_degraded_node_trains_on_and_is_chosen_last_for_the_next_world(cluster: Cluster) -> None:
    cluster.serve()
    for one in "abc":
        join(cluster, one, "--nnodes", "2:3", "--last-call", "20")
    cluster.wait_for("CycleRunning", 0)
    turn(cluster, "b", 1, "one link is slow")
    healthy(cluster, DEGRADED, "b")
    assert not cluster.find("CycleEnded")
    assert list(cluster.run().health_notices) == [
        "degraded, and chosen last for the next world: b (health-check: one link is slow)"
    ]
    cluster.worker("a", 0).tell("exit", code=9)
    cluster.wait_for("CycleRunning", 1)
    assert cluster.world(1) == ["a", "c"]
    assert [one.reason for one in cluster.rank_map(1).standbys] == [
        "degraded (health-check: one link is slow): chosen last"
    ]


@pytest.mark.rule("G11")
def test_a_check_that_fails_everywhere_replaces_nobody(cluster: Cluster) -> None:
    """The standbys' fails first: no node in the world has been replaced when the check becomes suspect."""
    cluster.serve()
    for one in "abcd":
        join(cluster, one, "--nnodes", "2:4", "--last-call", "20")
    cluster.wait_for("CycleRunning", 0)
    turn(cluster, "d", 2, "no route to the license server")
    healthy(cluster, FAILED, "d")
    for one in "abc":
        turn(cluster, one, 2, "no route to the license server")
    healthy(cluster, FAILED, *"abcd")
    suspected = cluster.wait_for("CheckSuspected")
    assert suspected.text.startswith("check health-check failed on 2 of 4 nodes within a minute")
    assert not cluster.find("CycleEnded")
    assert "it is itself the suspect" in "\n".join(cluster.view("status").out)
    assert len(cluster.find("CheckSuspected")) == 1


@pytest.mark.rule("G11")
def test_the_only_node_stays_and_status_says_why(cluster: Cluster) -> None:
    coordinator = cluster.serve()
    join(cluster, "a", "--nnodes", "1")
    cluster.wait_for("CycleRunning", 0)
    turn(cluster, "a", 2, "GPU is warm")
    cluster.wait_for("NodeFailedCheck", node="a")
    said = "\n".join(cluster.view("status").out)
    assert "unhealthy, and kept in the world: a (health-check: GPU is warm); there is no world without" in said
    coordinator.send(signal.SIGKILL)
    coordinator.ended()
    cluster.serve(listen=cluster.address)
    cluster.all_back()
    turn(cluster, "a", 0)
    cluster.wait_for("NodeRecovered", node="a")
    assert not cluster.find("CycleEnded")
    assert len(cluster.find("NodeFailedCheck")) == 1


@pytest.mark.rule("G11")
def test_a_check_that_hangs_is_ended_with_all_that_it_started(cluster: Cluster) -> None:
    cluster.serve()
    pids = cluster.directory / "pids"
    script = cluster.directory / "hangs"
    script.write_text(f"sleep 1000 & echo $! $$ > {pids}.new\nmv {pids}.new {pids}\necho still looking\nsleep 1000\n")
    agent = cluster.join("a", "--nnodes", "1", *OFTEN, "--health-check", f"sh {script}")
    cluster.wait_for("CycleRunning", 0)
    agent.said(r"health: health-check is degraded: the check itself did not end within 0.3 s: still looking")
    healthy(cluster, DEGRADED, "a")
    for worker in cluster.workers(0, 1):
        worker.tell("exit", code=0)
    assert agent.ended() == 0
    for pid in map(int, pids.read_text().split()):
        cluster.board.until(lambda pid=pid: not is_alive(pid) or None, f"the end of {pid}")  # type: ignore[misc]


@pytest.mark.rule("G11")
def test_a_check_that_prints_a_lot_says_its_last_line(cluster: Cluster) -> None:
    cluster.serve()
    script = cluster.directory / "prints"
    script.write_text("head -c 100000000 /dev/zero | tr '\\0' 'x'\necho\necho the last line\nexit 2\n")
    agent = cluster.join("a", "--nnodes", "1", "--health-interval", "30", "--health-check", f"sh {script}")
    cluster.wait_for("NodeFailedCheck", node="a")
    assert cluster.nodes()["a"].health.reason == "the last line"
    assert agent.exit_code is None


@pytest.mark.rule("G11", "A1")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--health-check", "/no/such/check --fast"], "--health-check /no/such/check: not found"),
        (["--health-check", "sh -c 'oops"], "cannot be split into words"),
        (["--health-check", "true", "--health-interval", "0"], "--health-interval 0 is too short"),
    ],
)
def test_what_cannot_be_a_check_is_refused_before_joining(cluster: Cluster, given: list[str], words: str) -> None:
    agent = cluster.join("a", "--nnodes", "1", *given, address="127.0.0.1:9")
    assert agent.ended() == 2
    assert words in agent.err[-1]


@pytest.mark.rule("G11")
def test_a_check_that_goes_away_is_not_a_broken_node(cluster: Cluster) -> None:
    cluster.serve()
    script = cluster.directory / "goes"
    script.write_text("#!/bin/sh\nexit 0\n")
    script.chmod(0o755)
    cluster.join("a", "--nnodes", "1", *OFTEN, "--health-check", str(script))
    cluster.wait_for("CycleRunning", 0)
    healthy(cluster, HEALTHY, "a")
    script.unlink()
    healthy(cluster, DEGRADED, "a")
    assert "exit code 127, which is none of 0, 1, 2" in cluster.nodes()["a"].health.reason


@pytest.mark.rule("G11")
def test_a_path_that_goes_away_fails_and_comes_back(cluster: Cluster) -> None:
    cluster.serve()
    data = cluster.directory / "data"
    data.mkdir()
    for one in "ab":
        cluster.join(one, "--nnodes", "1:2", "--last-call", "20", *OFTEN, "--health-path", str(data))
    cluster.wait_for("CycleRunning", 0)
    data.rmdir()
    healthy(cluster, FAILED, "a", "b")
    assert cluster.nodes()["a"].health.check == f"health-path {data}"
    assert cluster.nodes()["a"].health.reason == f"{data}: No such file or directory"
    data.mkdir()
    healthy(cluster, HEALTHY, "a", "b")


@pytest.mark.rule("G11")
def test_check_says_what_the_checks_say(cluster: Cluster) -> None:
    script = cluster.directory / "fails"
    script.write_text("echo too hot\nexit 2\n")
    argv = ["check", "--coordinator", "127.0.0.1:9", "--log-dir", str(cluster.logs)]
    given = ["--health-check", f"sh {script}", "--health-path", str(cluster.directory)]
    program = cluster.start("check", [sys.executable, "-m", "nvrx.client.cli", *argv, *given])
    assert program.ended() == 4
    assert "health    health-check: unhealthy (too hot)" in program.out
    assert f"health    health-path {cluster.directory}: healthy" in program.out


def gpu_node(cluster: Cluster, node: str, *options: str) -> Path:
    """An agent with stand-in GPUs; the file that they answer from."""
    file = cluster.directory / f"gpus-{node}"
    holds(file)
    argv = [sys.executable, "-m", "tests.e2e.gpu_node", "join", "--coordinator", cluster.address, "--run-id", RUN_ID]
    argv += ["--node-id", node, "--log-dir", str(cluster.logs), "--stop-grace", "10", "--restart-backoff", "0"]
    cluster.start(node, [*argv, *options, "--", *OBEY], {"FAKE_NVML": str(file)})
    return file


def holds(file: Path, *processes: list[int], recovery: int = 0) -> None:
    """What the stand-in GPU says: who holds its memory, and what is to be done with it."""
    told = {"gpus": [{"uuid": "GPU-a", "recovery": recovery, "processes": processes}]}
    new = file.with_suffix(".new")
    new.write_text(json.dumps(told))
    new.replace(file)


@pytest.mark.rule("G11")
def test_a_node_whose_gpu_needs_a_reset_is_replaced(cluster: Cluster) -> None:
    cluster.serve()
    files = {one: gpu_node(cluster, one, "--nnodes", "1:2", "--last-call", "20") for one in "ab"}
    cluster.wait_for("CycleRunning", 0)
    healthy(cluster, HEALTHY, "a", "b")
    holds(files["a"], recovery=1)
    ended = cluster.wait_for("CycleEnded", 0)
    assert ended.text.endswith("node unhealthy on a: gpu: GPU 0 (GPU-a) needs a reset, its driver says")
    cluster.wait_for("CycleRunning", 1)
    assert cluster.world(1) == ["b"]


@pytest.mark.rule("G12", "D2")
def test_new_workers_wait_for_the_memory_of_the_old_ones(cluster: Cluster) -> None:
    cluster.serve()
    file = gpu_node(cluster, "a", "--nnodes", "1", "--gpu-reclaim-timeout", "600")
    cluster.wait_for("CycleRunning", 0)
    healthy(cluster, HEALTHY, "a")
    agent = cluster.programs[-1]
    holds(file, [4711, 5 << 30])
    cluster.worker("a", 0).tell("exit", code=9)
    agent.said(r"waiting for the GPUs' memory: pid 4711 holds 5120 MiB of GPU 0")
    assert not cluster.find("CycleRunning", 1)
    assert not cluster.hall.find("a", 1, 0)
    holds(file)
    cluster.wait_for("CycleRunning", 1)
    agent.said(r"the GPUs' memory is free after")
    holds(file, [4712, 5 << 30])
    cluster.worker("a", 1).tell("exit", code=9)
    agent.said(r"pid 4712 holds")
    agent.send(signal.SIGTERM)
    assert agent.ended() == 128 + signal.SIGTERM, "and nobody who waits is in the way of its end"
