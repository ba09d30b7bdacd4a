"""Workers' logs as users see them: full disks, lines shown here, rotation, last words."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from .cluster import Cluster, worker_script
from .programs import NODE
from .small_disk import DISK_BYTES, SmallDisk

PYTHON = (sys.executable, "-S", "-c")
MEBIBYTE = 1024 * 1024


@pytest.mark.rule("G8")
def test_a_full_disk_warns_once_and_training_goes_on(cluster: Cluster) -> None:
    """C134: 5 MB on a disk of 1 MiB; the exit code is the worker's; room comes, and writing goes on."""
    disk = SmallDisk(cluster, cluster.logs)
    cluster.serve()
    agent = cluster.join("n0", wrapped=disk.enter)
    worker = cluster.worker("n0")
    cluster.wait_for("CycleRunning", 0)
    disk.fill(but=64 * 1024)
    for _ in range(5):
        worker.tell("print", fd=1, text="x" * 999 + "\n", times=1000)
    worker.tell("print", fd=2, text="also here\n")
    agent.said(r"cannot write \S+/rank-0\.(out|err): No space left on device; what workers print is dropped")
    assert worker.ended_at is None
    disk.empty()
    out = disk.path / "run" / "n0" / "cycle-0" / "rank-0.out"

    def is_back() -> bool:
        worker.tell("print", fd=1, text="room again\n")
        return out.read_bytes().endswith(b"room again\n")

    cluster.board.until(is_back, "room for output")
    dropped = int(agent.said(r"rank-0\.out is written again; (\d+) bytes were dropped \(No space left on device\)")[1])
    written = out.read_bytes()
    assert written.count(b"x") + dropped >= 5_000_000 - 5000
    assert f"[nvrx: {dropped} bytes were dropped here: No space left on device]\n".encode() in written
    worker.tell("exit", code=0)
    assert agent.ended() == 0
    assert len([line for line in agent.err if "cannot write" in line]) == 1
    assert "is written again" in (disk.path / "run" / "n0" / "agent.log").read_text()


@pytest.mark.rule("G8", "D4", "D5")
def test_on_a_full_disk_a_failure_is_told_and_the_next_cycle_starts(cluster: Cluster) -> None:
    """C134: not even a folder can be made; last words and the exit code come through all the same."""
    disk = SmallDisk(cluster, cluster.logs)
    cluster.serve()
    agent = cluster.join("n0", "--max-restarts", "1", "--nproc-per-node", "2", wrapped=disk.enter)
    worker = cluster.worker("n0")
    cluster.wait_for("CycleRunning", 0)
    disk.fill(but=0)
    worker.tell("print", fd=1, text="y" * 1024, times=1024)
    worker.tell("raise", text="out of luck")
    failure = cluster.wait_for("CycleEnded", 0).detail["failure"]
    assert failure["exit_code"] == 1
    assert failure["stderr_tail"].endswith("RuntimeError: out of luck\n")
    cluster.wait_for("CycleRunning", 1)
    cluster.worker("n0", 1).tell("print", fd=2, text="z" * 1024, times=1024)
    cluster.worker("n0", 1).said("printed")
    cluster.worker("n0", 1).tell("_exit", code=37)
    assert cluster.wait_for("CycleEnded", 1).detail["failure"]["exit_code"] == 37
    assert agent.ended() == 1
    assert len([line for line in agent.err if "cannot write" in line]) == 1
    assert DISK_BYTES == MEBIBYTE


@pytest.mark.rule("G8")
@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("--nnodes", "2"), {0}),
        (("--nnodes", "2", "--tee", "all"), {0, 1, 2, 3}),
        (("--nnodes", "2", "--tee", "none"), set()),
    ],
)
def test_lines_are_shown_with_their_rank(cluster: Cluster, options: tuple[str, ...], shown: set[int]) -> None:
    """Standard output to standard output, standard error to standard error."""
    cluster.serve()
    script = "echo out $RANK; echo err $RANK >&2"
    agents = [cluster.join(name, *options, "--nproc-per-node", "2", command=["sh", "-c", script]) for name in "ab"]
    assert [one.ended() for one in agents] == [0, 0]
    out = sorted(line for one in agents for line in one.out)
    err = sorted(line for one in agents for line in one.err if line.startswith("[rank"))
    assert out == [f"[rank {rank}] out {rank}" for rank in sorted(shown)]
    assert err == [f"[rank {rank}] err {rank}" for rank in sorted(shown)]


@pytest.mark.rule("G8")
def test_one_node_shows_all_its_workers_while_they_run(cluster: Cluster) -> None:
    """C133: by default; also what ends no line, and progress bars."""
    cluster.serve()
    agent = subprocess.Popen(
        [*NODE, "join", "--coordinator", cluster.address, "--log-dir", str(cluster.logs), "--", *worker_script("obey")],
        env=cluster.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert agent.stdout is not None
    try:
        worker = cluster.worker()
        worker.tell("print", fd=1, text="no line end yet")
        expected = b"[rank 0] no line end yet"
        assert agent.stdout.read(len(expected)) == expected
        for percent in (b"10%", b"20%"):
            worker.tell("print", fd=1, text="\r" + percent.decode())
            expected = b"\r[rank 0] " + percent
            assert agent.stdout.read(len(expected)) == expected
        worker.tell("exit", code=0)
        assert agent.stdout.read() == b"\n"
        assert agent.wait(30.0) == 0
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()


@pytest.mark.rule("G8")
def test_options_come_from_the_environment_and_files_are_rotated(cluster: Cluster) -> None:
    cluster.serve()
    env = {"NVRX_LOG_MAX_SIZE": "16K", "NVRX_LOG_KEEP": "2", "NVRX_TEE": "none"}
    agent = cluster.join("n0", command=["seq", "20000"], env=env)
    assert agent.ended() == 0
    assert agent.out == []
    files = [cluster.log_of("n0", 0, name) for name in ("rank-0.out.2", "rank-0.out.1", "rank-0.out")]
    pieces = [path.read_bytes() for path in files]
    assert "".join(f"{number}\n" for number in range(1, 20001)).encode().endswith(b"".join(pieces))
    assert all(len(piece) <= 16 * 1024 for piece in pieces)
    assert not files[0].with_name("rank-0.out.3").exists()


@pytest.mark.rule("G8", "A0")
@pytest.mark.parametrize("size", ["many", "1", "-64M", "64X", ""])
def test_a_bad_size_is_refused_before_joining(cluster: Cluster, size: str) -> None:
    agent = cluster.join("n0", "--log-max-size", size, address="127.0.0.1:1")
    assert agent.ended() == 2
    assert len(agent.err) == 1
    assert "--log-max-size" in agent.err[0]
    assert repr(size) in agent.err[0]


@pytest.mark.rule("G8")
def test_a_closed_standard_output_ends_nothing(cluster: Cluster) -> None:
    """C126: as under `| head -1`: said once, and the files have everything."""
    cluster.serve()
    argv = [*NODE, "join", "--coordinator", cluster.address, "--run-id", "run", "--node-id", "n0"]
    argv += ["--log-dir", str(cluster.logs), "--", "sh", "-c", "seq 1 200000; exit 0"]
    unread, end = os.pipe()
    os.close(unread)
    with os.fdopen(end) as closed:
        done = subprocess.run(
            argv,
            env=cluster.environment(),
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60.0,
            text=True,
            check=False,
        )
    assert done.returncode == 0
    assert done.stderr.count("standard output is closed (Broken pipe)") == 1
    lines = cluster.log_of("n0", 0, "rank-0.out").read_text().splitlines()
    assert lines == [str(number) for number in range(1, 200001)]


@pytest.mark.rule("G8", "G4")
def test_an_agent_killed_loses_no_output_and_leaves_nobody(cluster: Cluster) -> None:
    cluster.serve()
    script = "trap 'seq 1000; echo last words; exit' TERM; echo ready; while :; do sleep 100 & wait; done"
    agent = cluster.join("n0", "--nnodes", "1", command=["bash", "-c", script])
    agent.said(r"^\[rank 0\] ready$")
    agent.send(signal.SIGKILL)
    agent.ended()
    names = {"nvrx-logs", "nvrx-supervisor", "bash", "sleep"}
    cluster.board.until(lambda: not names & set(map(_name, cluster.alive())), "the agent's processes to be gone")
    text = cluster.log_of("n0", 0, "rank-0.out").read_text()
    assert text.endswith("1000\nlast words\n")


@pytest.mark.rule("G8", "D4")
def test_the_log_process_may_die_under_a_run(cluster: Cluster) -> None:
    """Its end is said, another goes on; no worker notices."""
    cluster.serve()
    agent = cluster.join("n0")
    worker = cluster.worker("n0")
    cluster.wait_for("CycleRunning", 0)
    [log_process] = [pid for pid in cluster.alive() if _name(pid) == "nvrx-logs"]
    os.kill(log_process, signal.SIGKILL)
    worker.tell("print", fd=1, text="m" * 1024, times=3 * 1024)
    agent.said(r"the process that writes workers' output ended \(SIGKILL\); starting another")
    worker.said("printed")
    worker.tell("raise", text="and its last words are known")
    failure = cluster.wait_for("CycleEnded", 0).detail["failure"]
    assert failure["stderr_tail"].endswith("RuntimeError: and its last words are known\n")
    assert cluster.log_of("n0", 0, "rank-0.out").read_bytes() == b"m" * 3 * MEBIBYTE


@pytest.mark.rule("G8", "E2")
def test_a_log_process_that_hangs_stops_neither_supervision_nor_restarts(cluster: Cluster) -> None:
    """As on a network file system that is gone: it is suspended here. A worker that writes too much waits."""
    cluster.serve()
    agent = cluster.join("n0", "--nproc-per-node", "2")
    blocked = cluster.worker("n0")
    cluster.wait_for("CycleRunning", 0)
    [log_process] = [pid for pid in cluster.alive() if _name(pid) == "nvrx-logs"]
    os.kill(log_process, signal.SIGSTOP)
    blocked.tell("print", fd=1, text="b" * 1024, times=3 * 1024)
    cluster.worker("n0", local_rank=1).tell("_exit", code=5)
    assert cluster.wait_for("CycleEnded", 0).detail["failure"]["exit_code"] == 5
    cluster.wait_for("CycleRunning", 1)
    assert [one for one in blocked.messages if one["event"] == "printed"] == []
    agent.send(signal.SIGTERM)
    assert agent.ended() == 128 + signal.SIGTERM
    agent.said(r"workers' output is still being written; process \d+ goes on with it")
    os.kill(log_process, signal.SIGCONT)
    cluster.board.until(lambda: "nvrx-logs" not in map(_name, cluster.alive()), "the log process to end")
    written = cluster.log_of("n0", 0, "rank-0.out").read_bytes()
    assert set(written) == {ord("b")}
    assert len(written) >= 64 * 1024


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""


@pytest.mark.rule("G8")
def test_more_workers_than_descriptors_are_refused_before_joining(cluster: Cluster) -> None:
    """Where the soft limit is lower it is raised, as far as it goes for two cycles."""
    few = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
    cluster.address = "127.0.0.1:9"
    agent = cluster.join("n0", "--nproc-per-node", "33", wrapped=few)
    assert agent.ended() == 2
    agent.said(
        r"33 workers need 262 open files in one process, but the hard limit here is 256 \(ulimit -Hn\); raise it, or "
        "lower --nproc-per-node"
    )
    command = ["sh", "-c", "echo done; test $NVRX_CYCLE = 1 || exit 3"]
    options = ("--nproc-per-node", "32", "--tee", "none", "--coordinator", "localhost:0")
    again = cluster.join("n0", *options, wrapped=few, command=command)
    assert again.ended() == 0
    logs = cluster.logs / "run" / "n0" / "cycle-1"
    assert [path.read_bytes() for path in logs.glob("rank-*.out")] == [b"done\n"] * 32
