"""Workers that hang, for real: by sleeping, by looping, at a lock, in C, stopped; and what is no hang."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvrx.v1 import common_pb2
from nvrx.worker import HEAD, MAGIC

from .cluster import Cluster, worker_script

HANG = worker_script("hang")
FUNCTIONS = {"sleep": "hang_asleep", "loop": "hang_in_a_loop", "lock": "hang_at_a_lock", "c": "hang_in_c"}
TIMEOUT = ("--hang-timeout", "3")
ONE_NODE = ("--nnodes", "1", "--nproc-per-node", "2")
PATIENT = ("--heartbeat-interval", "0.3", "--lease-ttl", "120", "--reconnect-grace", "60")


@pytest.fixture
def py_spy() -> None:
    """Skips where a process may not look into another."""
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent))
    assert program is not None, "py-spy is not installed: pip install -e .[dev]"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as target:
        tried = subprocess.run([program, "dump", "--pid", str(target.pid)], capture_output=True, text=True, timeout=60)
        target.communicate(b"\n")
    if tried.returncode != 0:
        assert not os.environ.get("CI"), tried.stderr
        pytest.skip(f"py-spy may not look into processes here: {tried.stderr.strip()}")


def failure_of(cluster: Cluster, cycle: int) -> common_pb2.Failure:
    cluster.wait_for("CycleEnded", cycle)
    return cluster.rank_map(cycle).failure


@pytest.mark.rule("G9", "D4", "D5")
@pytest.mark.usefixtures("py_spy")
@pytest.mark.parametrize("how", ["sleep", "loop", "lock", "c"])
def test_a_silent_worker_ends_its_cycle_and_the_next_one_begins(cluster: Cluster, how: str) -> None:
    """Two nodes, one hangs: the record names it, although SIGTERM or SIGKILL ends it; its stack is in its log."""
    cluster.serve()
    for name in "ab":
        cluster.join(name, "--nnodes", "2", *TIMEOUT, command=HANG, stop_grace="1")
    other, hanging = cluster.worker("a"), cluster.worker("b")
    cluster.wait_for("CycleRunning", 0)
    other.tell("beat_on")
    hanging.tell("progress", step=12)
    hanging.said("progress")
    hanging.tell("hang", how=how)
    failure = failure_of(cluster, 0)
    cluster.wait_for("CycleRunning", 1)
    assert (failure.cause, failure.node_id, failure.rank, failure.local_rank) == (common_pb2.CAUSE_HANG, "b", 1, 0)
    assert failure.message.startswith("no heartbeat for 3."), failure.message
    assert failure.message.endswith(" s (last step 12); stack in rank-1.err"), failure.message
    stack = cluster.log_of("b", 0, "rank-1.err").read_text()
    assert f"rank 1 (local rank 0, pid {hanging.pid}) hangs: no heartbeat for 3." in stack
    assert f"{FUNCTIONS[how]} (" in stack
    assert cluster.run().restarts_used == 1
    # How it was made to end is told, too, and changes nothing of the cause.
    cluster.board.until(lambda: cluster.rank_map(0).nodes[1].outcome.exits or None, "the end of the hung worker")
    outcome = cluster.rank_map(0).nodes[1].outcome
    assert outcome.state == common_pb2.WORKER_OUTCOME_FAILED
    assert outcome.exits[0].hung
    assert cluster.rank_map(0).failure == failure
    assert "rank 1 (local rank 0) on b hung: no heartbeat for 3." in "\n".join(cluster.view("cycles").out)


@pytest.mark.rule("G9")
@pytest.mark.usefixtures("py_spy")
def test_a_stopped_worker_hangs_and_of_several_the_one_that_was_silent_first(cluster: Cluster) -> None:
    """The other rank waits for it, as in a collective; below a script the program that speaks is looked at."""
    cluster.serve()
    script = ("bash", "-c", f"{sys.executable} -m tests.e2e.workers.hang; exit $?")
    cluster.join("a", *ONE_NODE, *TIMEOUT, command=script, stop_grace="1")
    peer, stopped = cluster.workers(0, 2)
    cluster.wait_for("CycleRunning", 0)
    stopped.tell("progress", step=7)
    stopped.said("progress")
    os.kill(stopped.pid, signal.SIGSTOP)
    peer.tell("progress", step=8)
    peer.said("progress")
    failure = failure_of(cluster, 0)
    assert (failure.cause, failure.rank) == (common_pb2.CAUSE_HANG, 1)
    assert "(last step 7)" in failure.message
    cluster.wait_for("CycleRunning", 1)
    stack = cluster.log_of("a", 0, "rank-1.err").read_text()
    assert f"pid {stopped.pid}) hangs" in stack
    assert "obey (" in stack
    stopped.ended()


@pytest.mark.rule("G9")
def test_in_a_section_it_may_be_silent(cluster: Cluster) -> None:
    """Both have been silent for longer than the one that hangs: in a section, and without ever having spoken."""
    cluster.serve()
    cluster.join("a", "--nnodes", "1", "--nproc-per-node", "3", *TIMEOUT, command=HANG, stop_grace="1")
    saving, mute, hanging = cluster.workers(0, 3)
    cluster.wait_for("CycleRunning", 0)
    saving.tell("enter", name="checkpoint", timeout=600)
    saving.said("entered")
    hanging.tell("enter", name="evaluation", timeout=1.5)
    hanging.said("entered")
    failure = failure_of(cluster, 0)
    assert (failure.cause, failure.rank) == (common_pb2.CAUSE_HANG, 2)
    assert failure.message.startswith("no heartbeat for 1."), failure.message
    assert '(in section "evaluation")' in failure.message
    assert mute.rank == 1
    again = cluster.workers(1, 3)[0]
    cluster.wait_for("CycleRunning", 1)
    again.tell("enter", name="checkpoint", timeout=600)
    again.tell("leave")
    again.said("left")
    assert failure_of(cluster, 1).rank == 0, "a section that was left allows nothing"


@pytest.mark.rule("G9")
def test_a_worker_that_does_not_begin_is_hung_only_where_that_is_asked_for(cluster: Cluster) -> None:
    cluster.serve()
    cluster.join("a", *ONE_NODE, "--start-timeout", "3", command=HANG, stop_grace="1")
    spoke, _ = cluster.workers(0, 2)
    spoke.tell("beat")
    failure = failure_of(cluster, 0)
    assert (failure.cause, failure.rank) == (common_pb2.CAUSE_HANG, 1)
    assert failure.message.startswith("no heartbeat within 3.")
    assert " s of its start" in failure.message


@pytest.mark.rule("G9", "J4")
def test_garbage_on_a_workers_socket_is_no_heartbeat_and_does_no_harm(cluster: Cluster) -> None:
    cluster.serve()
    agent = cluster.join("a", *ONE_NODE, *TIMEOUT, command=HANG, stop_grace="1")
    beating, hanging = cluster.workers(0, 2)
    cluster.wait_for("CycleRunning", 0)
    assert beating.env["NVRX_WORKER_SOCKET"] != hanging.env["NVRX_WORKER_SOCKET"]
    beating.tell("beat_on")
    hanging.tell("beat")
    hanging.said("beat")
    garbage = [b"", b"\x80\x04\x95", os.urandom(4096), HEAD.pack(MAGIC, 255, 0, 0.0), HEAD.pack(MAGIC, 1, -5, 0.0)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(60)
        stranger.connect(hanging.env["NVRX_WORKER_SOCKET"])
        while not cluster.find("CycleEnded", 0):
            try:
                for data in garbage * 20:
                    stranger.send(data)
            except OSError:
                break  # the cycle has ended, and its sockets with it
    failure = failure_of(cluster, 0)
    assert (failure.cause, failure.rank) == (common_pb2.CAUSE_HANG, 1)
    assert agent.exit_code is None
    assert not [line for line in agent.err if "Traceback" in line]


def _silent_s(cluster: Cluster) -> float:
    """How long ago the agent was heard."""
    return cluster.nodes()["a"].last_heard.ToMilliseconds() / 1000


@pytest.mark.rule("G9", "E1")
def test_an_agent_that_was_itself_suspended_finds_nobody_hung_for_that(cluster: Cluster) -> None:
    """A worker that was silent all the while gets that time back; one that hangs afterwards is found."""
    cluster.serve(timing=PATIENT)
    agent = cluster.join("a", *ONE_NODE, *TIMEOUT, command=HANG, stop_grace="1")
    quiet, busy = cluster.workers(0, 2)
    cluster.wait_for("CycleRunning", 0)
    quiet.tell("progress", step=1)
    cluster.wait_for("ProgressMade", 0)  # the agent has read it, then
    agent.send(signal.SIGSTOP)
    busy.tell("beat_on")
    time.sleep(5.0)  # the very thing that is tried: longer than the timeout
    assert _silent_s(cluster) > 3.0
    agent.send(signal.SIGCONT)
    # Its timers were all due: when it is heard again, it has looked who hangs.
    cluster.board.until(lambda: _silent_s(cluster) < 3.0 or None, "the agent to be heard again")
    quiet.tell("beat_on")
    quiet.said("beats")
    busy.tell("be_still")
    failure = failure_of(cluster, 0)
    assert (failure.cause, failure.rank) == (common_pb2.CAUSE_HANG, 1)


@pytest.mark.rule("G9")
def test_a_worker_that_has_ended_or_forked_hangs_no_more_and_no_less(cluster: Cluster) -> None:
    """One ends well after its last word; the child that another forked beats on, and does not speak for it."""
    cluster.serve()
    cluster.join("a", *ONE_NODE, *TIMEOUT, command=worker_script("hang", "fork"), stop_grace="1")
    ending, hanging = cluster.workers(0, 2)
    cluster.wait_for("CycleRunning", 0)
    ending.tell("exit", code=0)
    cluster.wait_for("WorkersExited", 0)
    hanging.tell("beat")
    failure = failure_of(cluster, 0)
    assert (failure.cause, failure.rank) == (common_pb2.CAUSE_HANG, 1)


@pytest.mark.rule("G9", "D6")
def test_steps_that_workers_report_are_progress(cluster: Cluster) -> None:
    """Those of the first node count, whichever of its workers tells the furthest; without a file, and with."""
    cluster.serve()
    options = ("--nnodes", "2", "--nproc-per-node", "2", "--max-node-failures", "0", "--max-no-progress-cycles", "2")
    budget = ("--max-restarts", "1", "--restart-budget", "per-progress")
    agents = [cluster.join(one, *options, *budget, command=HANG) for one in "ab"]
    for cycle, step in enumerate((10, 20)):
        workers = cluster.workers(cycle, 4)
        cluster.wait_for("CycleRunning", cycle)
        workers[3].tell("progress", step=1000)
        workers[3].said("progress")
        workers[1].tell("progress", step=step)
        assert cluster.wait_for("ProgressMade", cycle).detail["step"] == step
        workers[2].tell("exit", code=9)
        cluster.wait_for("CycleEnded", cycle)
    last = cluster.workers(2, 4)
    cluster.wait_for("CycleRunning", 2)
    last[0].tell("progress", step=20)
    last[0].said("progress")
    last[2].tell("exit", code=9)
    assert [one.ended() for one in agents] == [1, 1], "the restart that progress gave back is used up"
    assert cluster.run().step == 20


@pytest.mark.rule("G9", "D6")
def test_reported_steps_that_come_no_further_end_the_run_with_93(cluster: Cluster) -> None:
    cluster.serve()
    options = ("--nnodes", "1", "--max-node-failures", "0", "--max-no-progress-cycles", "2", "--max-restarts", "50")
    agent = cluster.join("a", *options, command=HANG)
    for cycle in range(3):
        worker = cluster.worker("a", cycle)
        cluster.wait_for("CycleRunning", cycle)
        worker.tell("progress", step=10 - cycle)
        worker.said("progress")
        worker.tell("exit", code=9)
        cluster.wait_for("CycleEnded", cycle)
    assert agent.ended() == 93
    agent.said(r"made no progress beyond step 10 \(max_no_progress_cycles\)")


@pytest.mark.rule("G9", "H3")
def test_rank_maps_reach_the_worker(cluster: Cluster) -> None:
    cluster.serve()
    agent = cluster.join("a", "--nnodes", "1", command=HANG)
    cluster.wait_for("CycleRunning", 0)
    cluster.worker("a").tell("exit", code=9)
    cluster.wait_for("CycleRunning", 1)
    agent.said("rank map of failed cycle 0 in")
    worker = cluster.worker("a", 1)
    worker.tell("read_maps")
    maps = worker.said("maps")
    assert (maps["now"]["cycle"], maps["failed"]["cycle"], maps["failed"]["failure"]["exit_code"]) == (1, 0, 9)


@pytest.mark.rule("G1", "G9")
def test_sockets_of_an_outer_agent_are_not_passed_on_and_none_are_left(cluster: Cluster) -> None:
    cluster.serve()
    agent = cluster.join("a", *ONE_NODE, command=HANG, env={"NVRX_WORKER_SOCKET": "/tmp/outer"})
    for worker in cluster.workers(0, 2):
        assert Path(worker.env["NVRX_WORKER_SOCKET"]).parent == cluster.directory / f"nvrx-{os.getuid()}"
        worker.tell("exit", code=0)
    assert agent.ended() == 0
    assert not list((cluster.directory / f"nvrx-{os.getuid()}").glob("worker-*"))
