"""Parts break under a running agent: its log directory, the coordinator's journal, a peer at the same moment."""

from __future__ import annotations

import json
import shutil
import signal

import pytest

from .cluster import Cluster


@pytest.mark.rule("G5", "G8")
def test_a_log_directory_that_became_unusable_hides_no_failure(cluster: Cluster) -> None:
    """The worker's last words cannot be read: its end is told all the same, and the agent still ends when told to."""
    cluster.serve()
    agents = cluster.join_all("a b", "--nnodes", "2", "--max-restarts", "0")
    cluster.wait_for("CycleRunning", 0)
    directory = cluster.log_of("a", 0, "rank-0.out").parents[1]
    shutil.rmtree(directory)
    directory.touch()
    cluster.worker("a").tell("exit", code=7)
    ended = cluster.wait_for("CycleEnded", 0)
    assert "rank 0 (local rank 0) on a failed with exit 7" in ended.text
    assert [one.ended() for one in agents] == [1, 1]


@pytest.mark.rule("E5")
def test_an_older_journal_makes_agents_join_anew(cluster: Cluster) -> None:
    """A journal restored from a copy has lost cycles that agents know: they stop, join anew, and cycles number on."""
    coordinator = cluster.serve()
    agents = cluster.join_all("a b", "--nnodes", "2")
    cluster.wait_for("CycleRunning", 0)
    coordinator.send(signal.SIGTERM)
    assert coordinator.ended() == 0
    copy = cluster.state_dir.with_name("copy")
    shutil.copytree(cluster.state_dir, copy)
    coordinator = cluster.serve(listen=cluster.address)
    cluster.worker("b").tell("exit", code=1)
    cluster.workers(1, 2)
    cluster.wait_for("CycleRunning", 1)
    coordinator.send(signal.SIGTERM)
    assert coordinator.ended() == 0
    shutil.rmtree(cluster.state_dir)
    shutil.copytree(copy, cluster.state_dir)
    cluster.forget_facts()
    cluster.serve(listen=cluster.address)
    agents[0].said("it lost what it knew")
    # Agents notice one after the other, and a first world may still count on one that is about to join anew.
    workers = cluster.workers(cluster.running_cycle(above=1), 2)
    for one in workers:
        one.tell("exit", code=0)
    assert [one.ended() for one in agents] == [0, 0]


@pytest.mark.rule("D4", "H3")
def test_the_kept_map_names_the_lost_node_also_when_a_peer_failed_first(cluster: Cluster) -> None:
    """C023: whoever reads the failed cycle's map on a node must not evict the survivor."""
    cluster.serve()
    agents = cluster.join_all("a b c", "--nnodes", "2:3", "--last-call", "20")
    cluster.wait_for("CycleRunning", 0)
    agents[0].send(signal.SIGKILL)
    cluster.worker("b").tell("exit", code=7)
    cluster.wait_for("CycleRunning", 1)
    kept = cluster.log_of("b", 0, "failed-rank-map.json")

    def cause() -> bool | None:
        if not kept.exists():
            return None
        failure = json.loads(kept.read_text())["failure"]
        return True if (failure["cause"], failure["node_id"]) == ("CAUSE_NODE_LOST", "a") else None

    cluster.board.until(cause, f"{kept} to name the node that was lost")
    consequences = json.loads(kept.read_text())["failure"]["consequences"]
    assert [(one["node_id"], one["exit_code"]) for one in consequences] == [("b", 7)]
