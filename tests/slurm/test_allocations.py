"""A fixed allocation with spares on a real cluster: what a power loss, a partition and a drain do to it."""

from __future__ import annotations

import signal

import pytest

from .deployment import Deployment


def _allocate(deployment: Deployment, nodes: int, *options: str) -> str:
    """One job of so many nodes, that no single loss ends."""
    launcher = f"srun --no-kill --wait=0 --kill-on-bad-exit=0 --ntasks={nodes} --ntasks-per-node=1"
    script = deployment.script(launcher, deployment.agent(*options))
    return deployment.submit(f"--nodes={nodes}", "--ntasks-per-node=1", "--no-kill", "--no-requeue", script=script)


@pytest.mark.rule("A5", "D2")
def test_eight_nodes_of_which_six_train_survive_a_power_loss(deployment: Deployment) -> None:
    """The world stays at six; the node that lost its power is replaced long before Slurm notices."""
    deployment.coordinate()
    _allocate(deployment, 8, "--nnodes", "6:8", "--join-timeout", "60")
    deployment.wait_for("CycleRunning", 0, timeout_s=60.0)
    assert deployment.world(0) == [f"n{number}" for number in range(1, 7)]
    deployment.slurm.power_off("n3")
    deployment.wait_for("CycleRunning", 1, timeout_s=60.0)
    assert deployment.world(1) == ["n1", "n2", "n4", "n5", "n6", "n7"]
    assert deployment.wait_for("CycleEnded", 0).detail["failure"]["cause"] == "NODE_LOST"
    for worker in deployment.workers(1, 6):
        worker.tell("exit", code=0)
    for node in ("n1", "n2", "n4", "n5", "n6", "n7", "n8"):
        assert deployment.ended_on(node) == 0


@pytest.mark.rule("E4", "D2")
def test_a_node_that_was_cut_off_stops_its_workers_when_it_is_back(deployment: Deployment) -> None:
    deployment.coordinate()
    _allocate(deployment, 3, "--nnodes", "2:3", "--join-timeout", "60")
    deployment.wait_for("CycleRunning", 0, timeout_s=60.0)
    old = deployment.worker("n1")
    deployment.slurm.machines.unplug("n1")
    deployment.wait_for("CycleRunning", 1, timeout_s=60.0)
    assert deployment.world(1) == ["n2", "n3"]
    deployment.slurm.machines.plug_in("n1")
    old.ended()
    deployment.wait_for("NodeJoined", node="n1", after=deployment.wait_for("NodeLost", node="n1").revision)
    for worker in deployment.workers(1, 2):
        worker.tell("exit", code=0)
    for node in ("n1", "n2", "n3"):
        assert deployment.ended_on(node) == 0


@pytest.mark.rule("E2", "D5")
def test_scancel_ends_all_agents_by_the_signal(deployment: Deployment) -> None:
    """C119: workers get their SIGTERM, nobody is promoted, no exit code says success."""
    deployment.coordinate()
    job = _allocate(deployment, 3, "--nnodes", "2:3", "--join-timeout", "60")
    deployment.wait_for("CycleRunning", 0, timeout_s=60.0)
    deployment.slurm.ask("scancel", job)
    for node in ("n1", "n2", "n3"):
        assert deployment.ended_on(node) == 128 + signal.SIGTERM
