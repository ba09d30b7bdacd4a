"""The agent as process 1 of a container: nobody else reaps there, and nobody else is sent signals."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from .cluster import Cluster
from .programs import Program

NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture(autouse=True)
def _pid_namespaces() -> None:
    tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, timeout=30)
    if tried.returncode != 0:
        missing = f"a pid namespace cannot be made here: {tried.stderr.strip()}"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _process_1(agent: Program) -> int:
    (found,) = _children(agent.pid)
    return found


@pytest.mark.rule("G6")
def test_an_agent_that_is_process_1_reaps_orphans(cluster: Cluster) -> None:
    """C124: 50 cycles whose workers leave orphans, and strangers' orphans: no zombie is left."""
    cluster.serve()
    leaves_orphans = "(sleep 1000 &); (setsid sleep 1000 &); (exit 3 &); test $NVRX_CYCLE -ge 50 && exec sleep 1000"
    agent = cluster.join("n0", "--max-restarts", "50", command=["sh", "-c", leaves_orphans], wrapped=NAMESPACE)
    cluster.wait_for("CycleRunning", 50, timeout_s=60.0)
    process_1 = _process_1(agent)
    enter = ["nsenter", f"--pid=/proc/{process_1}/ns/pid", f"--mount=/proc/{process_1}/ns/mnt"]
    subprocess.run([*enter, "sh", "-c", "(exit 1 &); (setsid true &)"], check=True, timeout=30)
    cluster.board.until(lambda: len(_children(process_1)) == 1 or None, "process 1 to have the agent as its only child")
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in _below(process_1)]
    assert "Z" not in states
    os.kill(process_1, signal.SIGTERM)
    assert agent.ended() == 128 + signal.SIGTERM


def _below(pid: int) -> list[int]:
    return [pid, *(one for child in _children(pid) for one in _below(child))]


@pytest.mark.rule("G6")
def test_process_1_has_the_agents_exit_code(cluster: Cluster) -> None:
    cluster.serve()
    agent = cluster.join("n0", "--max-restarts", "0", wrapped=NAMESPACE)
    worker = cluster.worker("n0")
    cluster.wait_for("CycleRunning", 0)
    worker.tell("exit", code=7)
    assert agent.ended() == 1


@pytest.mark.rule("G4")
def test_a_killed_agent_takes_its_container_along(cluster: Cluster) -> None:
    cluster.serve()
    agent = cluster.join("n0", wrapped=NAMESPACE)
    cluster.wait_for("CycleRunning", 0)
    (child,) = _children(_process_1(agent))
    os.kill(child, signal.SIGKILL)
    assert agent.ended() == 128 + signal.SIGKILL


@pytest.mark.rule("E7")
def test_a_coordinator_that_is_process_1_ends_when_asked(cluster: Cluster) -> None:
    coordinator = cluster.serve(wrapped=NAMESPACE)
    os.kill(_process_1(coordinator), signal.SIGTERM)
    assert coordinator.ended() == 0
