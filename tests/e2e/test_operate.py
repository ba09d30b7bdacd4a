"""Operators' commands on real processes."""

from __future__ import annotations

import pytest

from .cluster import Cluster

NNODES = ("--nnodes", "2:3", "--last-call", "20")


@pytest.mark.rule("F1", "D2")
def test_a_node_is_drained_returned_and_promoted_and_the_run_is_stopped(cluster: Cluster) -> None:
    cluster.serve()
    agents = cluster.join_all("n0 n1 n2", *NNODES)
    cluster.wait_for("CycleRunning", 0)
    old = cluster.worker("n1")
    shown = cluster.view("drain", "n1", "--dry-run")
    assert shown.exit_code == 0
    assert shown.out[0] == "nothing was changed; n1 is drained at the next cycle boundary, the world would be:"
    assert [line.split()[2] for line in shown.out[3:5]] == ["n0", "n2"]
    assert cluster.view("drain", "n1", "--immediate").exit_code == 0
    cluster.wait_for("CycleRunning", 1)
    assert cluster.world(1) == ["n0", "n2"]
    assert old.ended_at is not None, "its workers were gone before new ones began"
    refused = cluster.view("drain", "n2")
    assert refused.exit_code == 1
    assert refused.err[-1].startswith("nvrx-coord: no legal world would be left: ")
    assert "1 of 2" in refused.err[-1]
    assert cluster.view("undrain", "n1").out == ["n1 may be chosen again"]
    assert cluster.view("promote", "n1", "--replace", "n0", "--immediate").exit_code == 0
    cluster.wait_for("CycleRunning", 2)
    assert cluster.world(2) == ["n1", "n2"]
    assert cluster.run().restarts_used == 0
    assert cluster.view("stop").exit_code == 0
    assert [one.ended() for one in agents] == [1, 1, 1]
    assert "stopped by an operator" in agents[0].err[-1]
