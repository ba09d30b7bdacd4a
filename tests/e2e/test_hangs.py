"""Workers that hang, for real: by sleeping, by looping, at a lock, in C, stopped; and what is no hang."""

from __future__ import annotations

import pytest

from nvrx.v1 import common_pb2

from .cluster import Cluster, worker_script

HANG = worker_script("hang")
FUNCTIONS = {"sleep": "hang_asleep", "loop": "hang_in_a_loop", "lock": "hang_at_a_lock", "c": "hang_in_c"}
TWO = ("--nnodes", "2", "--hang-timeout", "2")


@pytest.mark.rule("G9", "D4", "D5")
@pytest.mark.parametrize("how", ["sleep", "loop", "lock", "c"])
def test_a_silent_worker_ends_its_cycle_and_the_next_one_begins(cluster: Cluster, how: str) -> None:
    """Two nodes, one hangs: the record names it, although SIGTERM or SIGKILL ends it; its stack is in its log."""
    cluster.serve()
    for name in "ab":
        cluster.join(name, *TWO, command=HANG, stop_grace="1")
    other, hanging = cluster.worker("a"), cluster.worker("b")
    cluster.wait_for("CycleRunning", 0)
    other.tell("beat_on")
    hanging.tell("progress", step=12)
    hanging.said("progress")
    hanging.tell("hang", how=how)
    cluster.wait_for("CycleEnded", 0)
    cluster.wait_for("CycleRunning", 1)
    failure = cluster.rank_map(0).failure
    assert (failure.cause, failure.node_id, failure.rank, failure.local_rank) == (common_pb2.CAUSE_HANG, "b", 1, 0)
    assert failure.message.startswith("no heartbeat for 2."), failure.message
    assert failure.message.endswith(" s (last step 12); stack in rank-1.err"), failure.message
    stack = cluster.log_of("b", 0, "rank-1.err").read_text()
    assert f"pid {hanging.pid}) hangs: no heartbeat for 2." in stack
    assert f"{FUNCTIONS[how]} (" in stack
    assert cluster.run().restarts_used == 1
