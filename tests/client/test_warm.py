"""The zygote and the supervisor, with real processes: who is left when, and what happens where something is wrong."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from dataclasses import replace

import pytest

from nvrx.client.processes import children, descendants, read_stat
from nvrx.client.supervisor_link import Exited, Gone, SpawnRefused, SupervisorDied, Waiting

from .supervision import Bench, alive, ended, events_until, next_event
from .warmth import ask, note, python, run, spec, start_agent, warm_link

pytestmark = pytest.mark.rule("G10")

SLEEPS = "import os, signal, sys\nopen(os.environ['LINES'], 'w').write(f'{os.getpid()}\\n')\nsignal.pause()\n"
"""Tells its pid, then waits."""


def _below(pid: int) -> list[int]:
    return [stat.id.pid for stat in descendants(pid)]


# --- cycles


async def test_one_zygote_serves_cycle_after_cycle_and_is_not_taken_for_a_worker(bench: Bench) -> None:
    """Gone comes though the zygote lives, and never before the last worker's end: the lock is never found taken."""
    code = "import fcntl, sys; fcntl.flock(open('lock'+sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)\n" + SLEEPS
    worker = python(bench, code, "1")
    link, zygote = await warm_link(bench, worker)
    for cycle in range(3):
        spawned = await link.spawn(cycle, [worker])
        assert [one.warm for one in spawned.workers] == [True]
        [pid] = await bench.lines.next_pids(1)
        assert pid == spawned.workers[0].pid
        stat = read_stat(pid)
        assert stat is not None
        assert (stat.parent_pid, stat.group_id) == (link.pid, pid)
        with pytest.raises(SpawnRefused, match=rf"cycle {cycle} are left: \[{pid}\]"):
            await link.spawn(9, [worker])
        link.stop(1000.0)
        [end, gone] = [one for one in await events_until(link, Gone) if isinstance(one, Exited | Gone)]
        assert isinstance(end, Exited)
        assert (end.signal, end.stopped_by_agent) == (signal.SIGTERM, True)
        assert gone == Gone(cycle)
        assert _below(link.pid) == [zygote]
    await link.close()
    assert not alive(zygote)


async def test_workers_of_one_cycle_differ_in_what_their_place_says_and_in_chance(bench: Bench) -> None:
    code = """
import multiprocessing, os, random, tempfile, uuid
chance = [random.random(), uuid.uuid4().hex, tempfile.mktemp(), bytes(multiprocessing.current_process().authkey).hex()]
print(os.environ["RANK"], *chance)
"""
    worker = python(bench, code)
    link, _ = await warm_link(bench, worker, ["random", "tempfile", "uuid", "multiprocessing"])
    workers = [spec(bench, worker.argv, rank) for rank in range(3)]
    assert all(one.warm for one in (await link.spawn(0, workers)).workers)
    await next_event(link, Gone)
    said = [bench.output(rank).split() for rank in range(3)]
    assert [words[0] for words in said] == ["0", "1", "2"]
    assert all(len(set(column)) == 3 for column in list(zip(*said, strict=True))[1:])


async def test_a_stop_ends_the_whole_tree_but_not_the_zygote(bench: Bench) -> None:
    """Also grandchildren that left the session and ignore SIGTERM, and orphans."""
    tree = 'trap \\"\\" TERM; echo $$ > $LINES; while :; do sleep 100; done'
    code = f"""
import subprocess, signal
for _ in range(2):
    subprocess.Popen(["setsid", "bash", "-c", "{tree}"])
subprocess.run(["bash", "-c", "setsid sleep 1000 & echo $! > $LINES"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.pause()
"""
    worker = python(bench, code)
    link, zygote = await warm_link(bench, worker)
    await link.spawn(0, [worker])
    pids = await bench.lines.next_pids(3)
    link.stop(0.2)
    assert await next_event(link, Gone) == Gone(0)
    assert not any(map(alive, pids))
    assert _below(link.pid) == [zygote]
    assert (await link.spawn(1, [worker])).workers[0].warm


async def test_strays_of_a_warm_worker_are_seen(bench: Bench) -> None:
    """No Gone comes, and no new cycle begins beside them; the zygote does not hide them."""
    worker = python(bench, "import subprocess; subprocess.Popen(['sh', '-c', 'echo $$ > $LINES; exec sleep 1000'])")
    link, _ = await warm_link(bench, worker)
    await link.spawn(0, [worker])
    [stray] = await bench.lines.next_pids(1)
    assert (await next_event(link, Exited)).exit_code == 0
    with pytest.raises(SpawnRefused, match=rf"cycle 0 are left: \[{stray}\]"):
        await link.spawn(1, [worker])
    assert link.events.empty()
    link.stop(1000.0)
    assert await next_event(link, Gone) == Gone(0)
    assert not alive(stray)


async def test_the_script_of_today_runs_and_a_changed_module_is_never_used(bench: Bench) -> None:
    (bench.folder / "mine.py").write_text("VALUE = 'old'\n")
    worker = python(bench, "import mine; print('first', mine.VALUE)")
    link, zygote = await warm_link(bench, worker, ["mine"])
    python(bench, "import mine; print('second', mine.VALUE)")
    assert (await run(bench, link, worker, warm=True)).out == "second old\n"
    (bench.folder / "mine.py").write_text("VALUE = 'newest'\n")
    assert (await run(bench, link, worker, warm=False)).out == "second newest\n"
    await ended(zygote)


# --- where it cannot be used


async def test_workers_start_cold_at_once_while_the_zygote_imports_and_their_end_is_seen(bench: Bench) -> None:
    """Its helpers are no workers either: a stop leaves them alone, and it gets ready."""
    gate = bench.folder / "gate"
    os.mkfifo(gate)
    (bench.folder / "slow.py").write_text(
        "import os, subprocess\nsubprocess.run(['sh', '-c', 'echo $$ > $LINES; read x < gate'])\n"
    )
    worker = python(bench, SLEEPS)
    link = await bench.link()
    ask(link, worker, ["slow"])
    [helper] = await bench.lines.next_pids(1)
    spawned = await link.spawn(0, [worker])
    assert [one.warm for one in spawned.workers] == [False]
    await bench.lines.next_pids(1)
    link.stop(0.0)
    assert await next_event(link, Gone) == Gone(0)
    assert alive(helper)
    await asyncio.to_thread(gate.write_text, "open\n")
    await note(link, "the warm process is ready")
    assert (await link.spawn(1, [worker])).workers[0].warm


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()", "2 threads"),
        ("import subprocess; left = subprocess.Popen(['sleep', '1000'])", "left processes running"),
        ("import socket; held = socket.socket()", r"hold socket:\[\d+\] open"),
        ("import sys, types; sys.modules['grpc'] = types.ModuleType('grpc')", "loaded gRPC"),
        (
            "import sys, types; sys.modules['torch'] = t = types.ModuleType('torch')\n"
            "t.cuda = types.SimpleNamespace(is_initialized=lambda: True)",
            "started CUDA",
        ),
    ],
    ids=["thread", "process", "descriptor", "grpc", "cuda"],
)
async def test_a_zygote_that_must_not_fork_is_not_used_and_not_left(bench: Bench, module: str, why: str) -> None:
    (bench.folder / "bad.py").write_text(module)
    worker = python(bench, "print('ran')")
    link = await bench.link()
    ask(link, worker, ["bad"])
    await note(link, f"workers are not warmed: .*{why}")
    assert (await run(bench, link, worker, warm=False)).out == "ran\n"
    assert _below(link.pid) == []


async def test_threads_that_a_library_ends_before_a_fork_are_no_hindrance(bench: Bench) -> None:
    """As OpenBLAS does, which numpy brings along."""
    (bench.folder / "pool.py").write_text(
        "import os, threading\ndone = threading.Event()\nthread = threading.Thread(target=done.wait)\nthread.start()\n"
        "def end():\n    done.set()\n    thread.join()\nos.register_at_fork(before=end)\n"
    )
    worker = python(bench, "import pool, threading; print(threading.active_count())")
    link, _ = await warm_link(bench, worker, ["pool"])
    assert (await run(bench, link, worker, warm=True)).out == "1\n"


async def test_a_thread_that_is_about_to_end_when_it_has_been_joined_is_no_hindrance(bench: Bench) -> None:
    """Python's join does not wait for the last of it; here that last takes 50 ms."""
    (bench.folder / "pool.py").write_text(
        "import os, threading, time\ndef end():\n"
        "    threading.Thread(target=time.sleep, args=(0.05,)).start()\nos.register_at_fork(before=end)\n"
    )
    worker = python(bench, "print('done')")
    await warm_link(bench, worker, ["pool"])


async def test_a_module_that_does_not_load_costs_a_line(bench: Bench) -> None:
    (bench.folder / "leaves.py").write_text("import sys; sys.exit('two\\nlines')")
    worker = python(bench, "import sys; print('decimal' in sys.modules)")
    link = await bench.link()
    ask(link, worker, ["no_such_module", "leaves", "decimal"])
    await note(link, "^--prewarm: cannot import no_such_module: ModuleNotFoundError: No module named 'no_such_module'$")
    await note(link, "^--prewarm: cannot import leaves: SystemExit: two lines$")
    await note(link, "the warm process is ready")
    assert (await run(bench, link, worker, warm=True)).out == "True\n"


async def test_a_file_that_hides_a_standard_module_is_seen(bench: Bench) -> None:
    (bench.folder / "socket.py").write_text("raise AssertionError('never imported')")
    link = await bench.link()
    worker = python(bench, "")
    ask(link, replace(worker, env={**worker.env, "PYTHONPATH": ""}))
    await note(link, r"not warmed: socket.py in .* hides a standard module")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"env": {"PYTHONHASHSEED": "1"}}, "PYTHONHASHSEED has another value"),
        ({"argv": ["nice", sys.executable, "worker.py"]}, "the command is another"),
        ({"cwd": "/"}, "the working directory is another"),
    ],
    ids=["environment", "command", "folder"],
)
async def test_what_was_not_prepared_for_starts_cold(bench: Bench, change: dict[str, object], why: str) -> None:
    worker = python(bench, "print('ran')")
    link, _ = await warm_link(bench, worker)
    env = {**worker.env, **change.pop("env", {})}  # type: ignore[dict-item]
    spawned = await link.spawn(0, [replace(worker, env=env, **change)])  # type: ignore[arg-type]
    assert not any(one.warm for one in spawned.workers)
    await note(link, f"workers start cold: {why}")
    assert await next_event(link, Gone) == Gone(0)
    assert (await run(bench, link, worker, warm=True)).out.endswith("ran\n")


async def test_a_worker_that_cannot_start_says_so_as_ever(bench: Bench) -> None:
    """The log folder is gone for one, the script for all: what the cold start says is said."""
    worker = python(bench, "print('ran')")
    link, _ = await warm_link(bench, worker)
    lost = replace(worker, local_rank=1, stdout_path=str(bench.folder / "no" / "out"))
    await link.spawn(0, [worker, lost])
    ends = [one for one in await events_until(link, Gone) if isinstance(one, Exited)]
    assert {one.local_rank: one.exit_code for one in ends} == {0: 0, 1: 126}
    assert "cannot open an output of the worker" in next(one.message for one in ends if one.local_rank == 1)
    os.unlink(bench.folder / "worker.py")
    assert (await run(bench, link, worker, warm=False)).err.endswith("No such file or directory\n")


# --- where something dies


async def test_signals_to_the_whole_step_leave_the_zygote_ready(bench: Bench) -> None:
    worker = python(bench, "import signal; print(signal.sigpending(), signal.pthread_sigmask(0, []))")
    link, zygote = await warm_link(bench, worker)
    for signo in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP):
        os.kill(zygote, signo)
    assert (await run(bench, link, worker, warm=True)).out == "set() set()\n"


@pytest.mark.parametrize("signo", [signal.SIGKILL, signal.SIGSTOP])
async def test_workers_start_cold_where_the_zygote_is_dead_or_stuck(bench: Bench, signo: signal.Signals) -> None:
    worker = python(bench, "print('ran')")
    link, zygote = await warm_link(bench, worker)
    os.kill(zygote, signo)
    assert (await run(bench, link, worker, warm=False)).out == "ran\n"
    await ended(zygote)
    assert _below(link.pid) == []
    await link.close()


async def test_a_zygote_that_dies_with_workers_at_work_ends_none_of_them(bench: Bench) -> None:
    worker = python(bench, SLEEPS)
    link, zygote = await warm_link(bench, worker)
    spawned = await link.spawn(0, [worker])
    await bench.lines.next_pids(1)
    os.kill(zygote, signal.SIGKILL)
    await note(link, r"the warm process ended \(SIGKILL\); workers start cold")
    assert children(link.pid) == [spawned.workers[0].pid]
    link.stop(1000.0)
    assert await next_event(link, Gone) == Gone(0)


async def test_a_killed_supervisor_takes_workers_and_zygote_along(bench: Bench) -> None:
    worker = python(bench, SLEEPS)
    link, zygote = await warm_link(bench, worker)
    spawned = await link.spawn(0, [worker])
    os.kill(link.pid, signal.SIGKILL)
    await next_event(link, SupervisorDied)
    await ended(spawned.workers[0].pid)
    await ended(zygote)


async def test_a_killed_agent_takes_all_along_and_the_next_one_waits(bench: Bench) -> None:
    """The next agent's workers find the lock free: old and new never overlap."""
    code = "import fcntl; lock = open('busy', 'w'); fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
    worker = python(bench, code + "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPS)
    agent = start_agent(bench, worker, prewarm=["json"])
    await bench.lines.next_pids(1)
    assert agent.stdout is not None
    told = json.loads(await asyncio.to_thread(agent.stdout.readline))
    assert told["warm"] == [True]
    below = _below(told["supervisor_pid"])
    assert len(below) == 2
    agent.kill()
    link = await bench.link()
    ask(link, worker)
    spawning = asyncio.create_task(link.spawn(0, [worker]))
    assert await next_event(link, Waiting) == Waiting(told["supervisor_pid"])
    await bench.lines.next_pids(1)
    assert not any(map(alive, below))
    await spawning
    link.stop(0.0)
    await next_event(link, Gone)
    agent.stdout.close()
    agent.wait()


async def test_an_agent_that_ends_while_the_zygote_imports_leaves_nothing(bench: Bench) -> None:
    (bench.folder / "slow.py").write_text(
        "import subprocess\nsubprocess.run(['sh', '-c', 'echo $$ > $LINES; sleep 1000'])"
    )
    worker = python(bench, "")
    link = await bench.link()
    ask(link, worker, ["slow"])
    await bench.lines.next_pids(1)
    below = _below(link.pid)
    await link.close()
    assert len(below) >= 2
    assert not any(map(alive, below))


async def test_a_command_that_cannot_be_warmed_is_said_once_and_runs(bench: Bench) -> None:
    link = await bench.link()
    worker = bench.shell("echo ran")
    ask(link, worker)
    assert (await note(link, "workers are not warmed: (.*)"))[1].startswith("bash is no python")
    assert (await run(bench, link, worker, warm=False)).out == "ran\n"
    assert link.events.empty()


async def test_cycles_leave_no_descriptor_behind(bench: Bench) -> None:
    worker = python(bench, "")
    link, zygote = await warm_link(bench, worker)
    descriptors = []
    for _ in range(10):
        await run(bench, link, worker, warm=True)
        descriptors.append([len(os.listdir(f"/proc/{pid}/fd")) for pid in (link.pid, zygote)])
    assert descriptors == [descriptors[0]] * 10


@pytest.mark.rule("G7")
@pytest.mark.skipif(shutil.which("numactl") is None, reason="numactl is not installed")
@pytest.mark.parametrize(
    "words",
    [
        ["numactl", "--cpunodebind=0", "--membind=0"],
        ["numactl", "--physcpubind=0", "--localalloc"],
        ["numactl", "--cpunodebind=0"],
        ["taskset", "-c", "0"],
        [],
    ],
    ids=" ".join,
)
async def test_a_warm_worker_is_bound_as_numactl_would_bind_it(bench: Bench, words: list[str]) -> None:
    code = """
import os
print(sorted(os.sched_getaffinity(0)), open("/proc/self/numa_maps").readline().split()[1])
print(open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"))
"""
    worker = python(bench, code)
    link, _ = await warm_link(bench, worker)
    bound = replace(worker, argv=[*words, *worker.argv])
    warm = await run(bench, link, bound, warm=True)
    cold = await bench.link("cold")
    assert await run(bench, cold, bound, warm=False) == warm
    assert warm.out.count("\n") == 2
    assert (await run(bench, link, worker, warm=True)).out.splitlines()[0].endswith(" default")


async def test_who_comes_late_never_begins(bench: Bench) -> None:
    """A child that hangs before it is a worker: it is ended, and a cold one runs instead, once."""
    (bench.folder / "hangs.py").write_text(
        "import os, time\nzygote = os.getpid()\n"
        "def hang():\n"
        "    if os.path.exists('armed') and os.getppid() != zygote: time.sleep(1000)\n"
        "os.register_at_fork(after_in_child=hang)\n"
    )
    worker = python(bench, "print('ran')")
    link, zygote = await warm_link(bench, worker, ["hangs"])
    assert (await run(bench, link, worker, warm=True)).out == "ran\n"
    (bench.folder / "armed").touch()
    assert (await run(bench, link, worker, warm=False)).out == "ran\n"
    await ended(zygote)
    assert _below(link.pid) == []
