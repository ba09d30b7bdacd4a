"""The parts of the benchmark that could make figures wrong without anyone noticing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench import figures, processes
from bench.marks import MarkBox, PeerEnded, TimedOut, kill_and_wait, monotonic_s
from bench.measure import Recovery
from bench.recovery import parse_options

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


def send(box: MarkBox, *marks: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        for mark in marks:
            sender.sendto(mark.encode(), str(box.path))


def test_only_workers_started_after_the_kill_count(tmp_path: Path) -> None:
    with MarkBox(tmp_path / "marks") as box:
        send(box, "boot 0 10 n0 0 5.0", "step 0 10 n0 0 11.0")  # of the old world, its step mark late
        send(box, "boot 0 20 n0 1 12.0", "boot 1 21 n1 1 13.0", "step 1 21 n1 1 15.0", "step 0 20 n0 1 14.0")
        world = box.wait_for_world(2, since_s=10.0, deadline_s=monotonic_s() + 5, processes={})
    assert (world.last_boot_s, world.last_step_s, world.starts_seen) == (13.0, 15.0, 2)
    assert world.nodes == {"n0", "n1"}


def test_a_rank_started_twice_counts_with_its_last_start(tmp_path: Path) -> None:
    with MarkBox(tmp_path / "marks") as box:
        send(box, "boot 0 20 n0 1 12.0", "boot 1 21 n1 1 12.5", "step 0 20 n0 1 13.0")
        send(box, "boot 0 30 n0 2 14.0", "boot 1 31 n1 2 14.5", "step 1 21 n1 1 14.6")
        send(box, "step 0 30 n0 2 15.0", "step 1 31 n1 2 15.5")
        world = box.wait_for_world(2, since_s=10.0, deadline_s=monotonic_s() + 5, processes={})
    assert (world.last_boot_s, world.last_step_s, world.starts_seen) == (14.5, 15.5, 4)


def test_a_wait_ends_in_time_or_with_its_peer(tmp_path: Path) -> None:
    with MarkBox(tmp_path / "marks") as box:
        send(box, "boot 0 20 n0 1 12.0")
        with pytest.raises(TimedOut, match="1 of 2 ranks started, 0 did"):
            box.wait_for_world(2, since_s=10.0, deadline_s=monotonic_s(), processes={})
        with subprocess.Popen([sys.executable, "-c", ""]) as launcher:
            pidfd = os.pidfd_open(launcher.pid)
            with pytest.raises(PeerEnded, match="n3 ended"):
                box.wait_for_world(2, since_s=10.0, deadline_s=monotonic_s() + 30, processes={pidfd: "n3"})
            os.close(pidfd)


def test_a_kill_returns_when_the_first_is_dead() -> None:
    with subprocess.Popen(SLEEPER) as first, subprocess.Popen(SLEEPER) as second:
        before_s = monotonic_s()
        sent_s = kill_and_wait([first.pid, second.pid], timeout_s=10.0)
        assert before_s <= sent_s <= monotonic_s()
        assert first.poll() == -9
        assert second.wait() == -9


def test_orphans_in_sessions_of_their_own_are_killed_too(tmp_path: Path) -> None:
    """In a process of its own, because it kills and reaps everything below it."""
    script = (
        "import subprocess\n"
        "from bench import processes\n"
        "processes.become_subreaper()\n"
        "orphan = ['sh', '-c', 'setsid sleep 60 > /dev/null & echo $!']\n"
        "pid = int(subprocess.run(orphan, stdout=subprocess.PIPE).stdout)\n"
        "assert pid in processes.descendants()\n"
        "processes.kill_descendants()\n"
        "assert processes.descendants() == []\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=processes.REPOSITORY, check=True, timeout=30)


def test_failed_repetitions_are_counted_and_give_no_figures() -> None:
    recoveries = [
        Recovery("nvrx", rep, "rank 0", 0.0, boot_s=boot_s, failure=failure)
        for rep, (boot_s, failure) in enumerate([(0.2, None), (0.4, None), (9.0, "no rank map"), (0.3, None)])
    ] + [Recovery("floor", 0, "rank 0", 0.0, boot_s=0.1)]
    table = figures.table(recoveries, ["nvrx", "floor"], "worker")
    assert "0.300 (0.200-0.400)" in table
    assert "3 of 4" in table
    assert "3, +0.200 s" in figures.comparisons(recoveries, ["nvrx", "floor"], "worker")
    assert figures.summary(recoveries, ["floor"], "worker")["floor"] == {
        "map_s": None,
        "boot_s": {"median": 0.1, "least": 0.1, "most": 0.1, "count": 1},
        "step_s": None,
        "cold_start_s": None,
    }


def test_a_suspended_node_is_suspended_with_all_below_it() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert processes.descendants(parent.pid) == [child]
        processes.suspend(parent.pid)
        _, status = os.waitpid(parent.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        for pid in (child, parent.pid):
            os.kill(pid, signal.SIGKILL)


def test_silence_counts_from_the_lease_and_a_coordinators_death_counts_its_victims() -> None:
    silent = [
        Recovery("nvrx", rep, "node n1", 0.0, boot_s=9.8, lease_s=lease_s) for rep, lease_s in enumerate((0.1, 0.3))
    ]
    table = figures.table(silent, ["nvrx"], "node")
    assert "lease over -> last new worker's interpreter runs       0.200 (0.100-0.300)" in table
    assert "SIGSTOP -> last new worker's interpreter runs          9.800" in table
    killed = [Recovery("nvrx", rep, "rank 0", 0.0, boot_s=0.2, answer_s=0.5, disturbed=rep) for rep in range(3)]
    lines = figures.table(killed, ["nvrx"], "coordinator").splitlines()
    assert [line.split()[-1] for line in lines if "coordinator's death ended" in line] == ["3"]
    assert [line.split()[-2] for line in lines if "answers GetRun" in line] == ["0.500"]


def test_who_takes_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_options([]).peers == ["nvrx", "nvrx-warm", "torchrun", "floor"]
    assert parse_options(["--kill", "node"]).peers == ["nvrx", "nvrx-warm"]
    with pytest.raises(SystemExit):
        parse_options(["--kill", "coordinator", "--peers", "nvrx,torchrun"])
    assert "torchrun" in capsys.readouterr().err
