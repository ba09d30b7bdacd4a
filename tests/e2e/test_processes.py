"""Workers as processes: nothing is left behind, nothing overlaps, nothing of others is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx.client.processes import descendants

from .cluster import OBEY, Cluster, supervisor_of, worker_script
from .programs import NODE, is_alive


@pytest.mark.rule("G4", "D1")
@pytest.mark.parametrize("fork_support", ["0", "1"])
def test_many_cycles_beside_an_open_stream(cluster: Cluster, fork_support: str) -> None:
    """C109: a hundred starts and stops, a heartbeat every 50 ms; workers' own logs hold nothing of gRPC."""
    cluster.serve(timing=("--heartbeat-interval", "0.05", "--lease-ttl", "4", "--reconnect-grace", "1"))
    agent = cluster.join(
        "n0",
        *("--nproc-per-node", "2", "--max-restarts", "100"),
        command=["sh", "-c", "test $NVRX_CYCLE -ge 100 || test $LOCAL_RANK = 1 && sleep 100"],
        env={"GRPC_ENABLE_FORK_SUPPORT": fork_support},
    )
    cluster.wait_for("CycleRunning", 100, timeout_s=60.0)
    agent.send(signal.SIGTERM)
    assert agent.ended() == 128 + signal.SIGTERM
    logs = list(cluster.logs.rglob("rank-*.err"))
    assert len(logs) == 202
    assert {path.read_bytes() for path in logs} == {b""}


@pytest.mark.rule("G4", "D2")
def test_a_child_that_ignores_sigterm_is_gone_before_new_workers_start(cluster: Cluster) -> None:
    """C113: its parent dies on SIGTERM; the child outlives the grace and is killed, then the next cycle begins."""
    cluster.serve()
    for name in "ab":
        cluster.join(name, "--nnodes", "2", command=worker_script("tree"), stop_grace="1")
    old = cluster.workers(0, 2)
    child = cluster.worker("a", role="child")
    cluster.worker("b", role="child")
    cluster.worker("b").tell("exit", code=1)
    following = cluster.worker("a", 1)
    assert child.ended_at is not None
    assert child.ended_at < following.at
    assert child.ended_at - old[0].ended() > 0.5
    assert not is_alive(child.pid)
    before = f"NVRX_SUPERVISOR={child.env['NVRX_SUPERVISOR']}".encode()
    for pid in cluster.alive():
        entries = _environment(pid)
        assert not (before in entries and b"NVRX_CYCLE=0" in entries)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


@pytest.mark.rule("G4", "B2")
def test_an_agent_killed_takes_its_workers_along(cluster: Cluster) -> None:
    """C115: workers, one with a stubborn child, are gone within 5 s; a new agent's never run beside them."""
    cluster.serve()
    options = ("--nproc-per-node", "2")
    agent = cluster.join("n0", *options, command=worker_script("tree"))
    old = [*cluster.workers(0, 2), *(cluster.worker("n0", local_rank=rank, role="child") for rank in (0, 1))]
    supervisor = supervisor_of(cluster.worker("n0").pid)
    agent.send(signal.SIGKILL)
    agent.ended()
    again = cluster.join("n0", *options, command=worker_script("tree"))
    killed_at = agent.ended_at
    assert killed_at is not None
    gone_at = max(one.ended() for one in old)
    assert gone_at - killed_at < 5.0
    new = cluster.worker("n0", 1)
    assert gone_at < new.at
    cluster.board.until(lambda: not is_alive(supervisor) or None, "the old supervisor to be gone", 5.0)
    assert again.exit_code is None


@pytest.mark.rule("G4")
def test_stops_touch_nobody_else(cluster: Cluster) -> None:
    """C116: the shell, its other child and another agent's workers live on when an agent's run fails."""
    cluster.serve()
    other = cluster.join("other", "--run-id", "other")
    bystander = cluster.worker("other")
    join = [*NODE, "join", "--coordinator", cluster.address, "--node-id", "n0", "--log-dir", str(cluster.logs)]
    join += ["--run-id", "run", "--max-restarts", "0", "--", "sh", "-c", "exit 1"]
    script = '"$@" & agent=$!; sleep 100 & echo "sleep $!"; wait $agent; echo "agent $?"; wait'
    shell = cluster.start("shell", ["sh", "-c", script, "sh", *join])
    sleeper = int(shell.said(r"^sleep (\d+)$")[1])
    assert shell.said(r"^agent (\d+)$")[1] == "1"
    assert is_alive(sleeper)
    assert shell.exit_code is None
    assert bystander.ended_at is None
    assert other.exit_code is None


@pytest.mark.rule("D2", "G4")
def test_old_and_new_workers_never_overlap(cluster: Cluster) -> None:
    """C125: each worker holds a lock for its node and local rank, and needs a while to stop."""
    locks = cluster.directory / "locks"
    locks.mkdir()
    cluster.serve()
    for name in "ab":
        cluster.join(
            name,
            *("--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "9"),
            command=worker_script("lock"),
            env={"W_LOCKS": str(locks)},
        )
    for cycle in range(4):
        workers = cluster.workers(cycle, 4)
        cluster.wait_for("CycleRunning", cycle)
        workers[cycle].tell("exit", code=1)
        ended = cluster.wait_for("CycleEnded", cycle)
        assert ended.detail["failure"]["exit_code"] == 1
    cluster.workers(4, 4)


@pytest.mark.rule("G5", "G8")
def test_a_chatty_worker_does_not_block(cluster: Cluster) -> None:
    """C126: 200 MB to each stream; the agent's own output is a pipe that nobody reads."""
    megabytes = 200
    cluster.serve()
    argv = [*NODE, "join", "--coordinator", cluster.address, "--run-id", "run", "--node-id", "n0"]
    argv += ["--log-dir", str(cluster.logs), "--", *worker_script("chatty")]
    env = cluster.environment({"W_MEGABYTES": str(megabytes)})
    unread, full = os.pipe()
    os.set_blocking(full, False)
    try:
        while os.write(full, b"x" * 4096):
            pass
    except BlockingIOError:
        pass
    os.set_blocking(full, True)
    with os.fdopen(unread), os.fdopen(full) as end:
        process = subprocess.Popen(argv, env=env, stdout=end, stderr=end, start_new_session=True)
        try:
            cluster.wait_for("RunClosed", timeout_s=60.0)
            assert process.wait(30.0) == 0
        finally:
            process.kill()
            process.wait()
    for kind in ("out", "err"):
        path = cluster.log_of("n0", 0, f"rank-0.{kind}")
        assert path.stat().st_size == megabytes * 1024 * 1024
        with path.open("rb") as file:
            file.seek(-8, os.SEEK_END)
            assert int(file.read()) == megabytes * 16 - 1


@pytest.mark.rule("G8")
def test_an_agent_without_standard_streams(cluster: Cluster) -> None:
    """C126: its output is closed; training goes on and ends well."""
    cluster.serve()
    argv = [*NODE, "join", "--coordinator", cluster.address, "--run-id", "run", "--node-id", "n0"]
    argv += ["--log-dir", str(cluster.logs), "--", *OBEY]
    shell = cluster.start("shell", ["sh", "-c", '"$@" <&- >&- 2>&-; exit $?', "sh", *argv])
    cluster.worker("n0").tell("exit", code=0)
    assert shell.ended() == 0


@pytest.mark.rule("G8")
def test_log_names_across_cycles_and_nodes(cluster: Cluster) -> None:
    """C136: one log directory for two agents, three cycles and a promotion: every worker has its own file."""
    cluster.serve()
    agents = {name: cluster.join(name, "--nnodes", "2:3", "--last-call", "20") for name in "abc"}
    for cycle in range(3):
        for one in cluster.workers(cycle, 2):
            one.tell("print", fd=1, text=f"{one.node} {one.cycle} {one.rank}")
            one.said("printed")
        if cycle == 0:
            cluster.worker("a", 0).tell("exit", code=1)
        elif cycle == 1:
            agents["b"].send(signal.SIGTERM)
    expected = {("a", 0, 0), ("b", 0, 1), ("a", 1, 0), ("b", 1, 1), ("a", 2, 0), ("c", 2, 1)}
    wanted = {
        cluster.log_of(node, cycle, f"rank-{rank}.out"): f"{node} {cycle} {rank}" for node, cycle, rank in expected
    }

    def texts() -> dict[Path, str]:
        return {path: path.read_text() for path in cluster.logs.rglob("rank-*.out")}

    cluster.board.until(lambda: all(texts().get(path) for path in wanted), "all output to be written")
    assert texts() == wanted
    for name in "abc":
        log = (cluster.logs / "run" / name / "agent.log").read_text()
        assert f"joined run run as {name}" in log


@pytest.mark.rule("G6")
def test_usr_signals_go_on_to_workers_that_handle_them(cluster: Cluster) -> None:
    """SIGUSR1 reaches the worker with a handler and spares the one without."""
    cluster.serve()
    script = cluster.directory / "handler.py"
    script.write_text(
        "import os, signal\n"
        "from tests.e2e.workers.talk import Line, obey\n"
        "line = Line()\n"
        "if os.environ['LOCAL_RANK'] == '0':\n"
        "    signal.signal(signal.SIGUSR1, lambda number, frame: line.say('usr1'))\n"
        "line.say('ready')\n"
        "obey(line)\n"
    )
    agent = cluster.join("n0", "--nproc-per-node", "2", command=[sys.executable, str(script)])
    first, second = cluster.workers(0, 2)
    for one in (first, second):
        one.said("ready")
    agent.send(signal.SIGUSR1)
    first.said("usr1")
    for one in (first, second):
        one.tell("exit", code=0)
    assert agent.ended() == 0


@pytest.mark.rule("G6", "G11", "A4")
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_usr_signals_to_every_process_of_a_step_end_none_of_ours(cluster: Cluster, number: signal.Signals) -> None:
    """Coordinator and store, agent, supervisor, log process, health checks; the worker would have to handle them."""
    coordinator = cluster.serve()
    agent = cluster.join("n0", "--health-path", "/", "--health-interval", "0.1")
    local = cluster.join("n1", "--coordinator", "localhost:0", "--health-path", "/", "--health-interval", "0.1")
    workers = [cluster.worker("n0"), cluster.worker("n1")]
    started = (coordinator, agent, local)
    ours = {one.pid for one in started} | {stat.id.pid for one in started for stat in descendants(one.pid)}
    ours -= {one.pid for one in workers}
    for pid in ours:
        os.kill(pid, number)
    for one in workers:
        one.tell("exit", code=0)
    assert [agent.ended(), local.ended()] == [0, 0]
    for program in (agent, local):
        assert [line for line in program.err if "lost the coordinator" in line or "the watch of" in line] == []


@pytest.mark.rule("G3")
def test_a_script_that_is_not_executable_runs_with_the_agents_python(cluster: Cluster) -> None:
    """And an executable one runs as it is."""
    script = cluster.directory / "plain.py"
    script.write_text("import sys; print(sys.executable); print(sys.argv[1:])\n")
    cluster.serve()
    assert cluster.join("n0", command=[str(script), "-x", "a b"]).ended() == 0
    assert cluster.log_of("n0", 0, "rank-0.out").read_text() == f"{sys.executable}\n['-x', 'a b']\n"


@pytest.mark.rule("G3", "G7", "D4")
def test_a_worker_is_its_command(cluster: Cluster) -> None:
    """C088 without numactl: one process, its own exit code, its own signal handler."""
    cluster.serve()
    agent = cluster.join("n0", "--max-restarts", "1", command=worker_script("checkpoint"), env={"W_SAVE_S": "0"})
    first = cluster.worker("n0")
    assert Path(f"/proc/{supervisor_of(first.pid)}/task/{supervisor_of(first.pid)}/children").read_text().split() == [
        str(first.pid)
    ]
    first.tell("exit", code=37)
    second = cluster.worker("n0", 1)
    assert cluster.rank_map(0).failure.exit_code == 37
    second.said("ready")
    agent.send(signal.SIGTERM)
    second.said("saved")
    assert agent.ended() == 128 + signal.SIGTERM
