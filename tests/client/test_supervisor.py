"""The supervisor with real processes. Nothing here waits for time to pass: only for events, FIFOs and pidfds."""

import asyncio
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nvrx.client.processes import descendants, pid_space, read_stat
from nvrx.client.supervisor_link import (
    Exited,
    Gone,
    Identity,
    SpawnRefused,
    SupervisorDied,
    SupervisorError,
    SupervisorLink,
    Waiting,
)

from .supervision import Bench, alive, ended, events_until, next_event

ROOT = Path(__file__).parents[2]
FOREVER = "while :; do sleep 100 & wait; done"


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    await bench.lines.open()
    yield bench
    await bench.close()


# --- what a worker is


@pytest.mark.rule("G5")
@pytest.mark.parametrize(
    ("script", "exit_code", "signo", "message"),
    [
        ("exit 0", 0, None, "exit code 0"),
        ("exit 37", 37, None, "exit code 37"),
        ("exit 255", 255, None, "exit code 255"),
        ("kill -9 $$", None, 9, "SIGKILL"),
        ("ulimit -c 0; kill -SEGV $$", None, 11, "SIGSEGV"),
        ("kill -40 $$", None, 40, "signal 40"),
    ],
)
async def test_says_how_a_worker_ended(
    bench: Bench, script: str, exit_code: int | None, signo: int | None, message: str
) -> None:
    """Field cases C121, C122: the code and the signal are the command's own; signal 40 has no name."""
    link = await bench.link()
    spawned = await link.spawn(3, [bench.shell(script)])
    end = await next_event(link, Exited)
    assert (end.cycle, end.local_rank, end.exit_code, end.signal) == (3, 0, exit_code, signo)
    assert end.message == message
    assert not end.stopped_by_agent
    assert await next_event(link, Gone) == Gone(3)
    assert read_stat(spawned.workers[0].pid) is None


@pytest.mark.rule("G3", "G5")
async def test_says_why_a_worker_could_not_start(bench: Bench) -> None:
    """Field case C089 and its like: the others start, and each failure has its words and its code."""
    no_exec, no_interpreter = bench.folder / "no-exec", bench.folder / "no-interpreter"
    no_exec.write_text("#!/bin/sh\n")
    no_interpreter.write_text("#!/no/such/interpreter\n")
    no_interpreter.chmod(0o755)
    link = await bench.link()
    spawned = await link.spawn(
        0,
        [
            bench.worker("/no/such/prog", rank=0),
            bench.worker("no-such-prog-in-path", rank=1),
            bench.worker(str(no_exec), rank=2),
            bench.worker(str(no_interpreter), rank=3),
            bench.shell("exit 5", rank=4),
        ],
    )
    assert [worker.local_rank for worker in spawned.workers] == [4]
    ends = [event for event in await events_until(link, Gone) if isinstance(event, Exited)]
    assert {end.local_rank: (end.exit_code, end.message) for end in ends} == {
        0: (127, "/no/such/prog: not found"),
        1: (127, "no-such-prog-in-path: not found"),
        2: (126, f"{no_exec}: permission denied"),
        3: (127, f"{no_interpreter}: the interpreter that it names is not found"),
        4: (5, "exit code 5"),
    }


@pytest.mark.rule("G5")
async def test_gone_follows_when_no_worker_could_start(bench: Bench) -> None:
    link = await bench.link()
    assert (await link.spawn(0, [bench.worker("/no/such/prog")])).workers == ()
    assert [type(event) for event in await events_until(link, Gone)][1:] == [Exited, Gone]


@pytest.mark.rule("G3")
async def test_arguments_and_environment_arrive_byte_for_byte(bench: Bench) -> None:
    """Field case C090: no shell, no decoding on the way."""
    odd = ["a b", "", "--", "-h", "$HOME", "\udcff\udc80", "é\n"]
    code = "import os, sys; print([os.fsencode(a) for a in sys.argv[1:]], os.environb[b'ODD'])"
    spec = bench.python(code, *odd)
    link = await bench.link()
    await link.spawn(0, [type(spec)(**{**_fields(spec), "env": {**spec.env, "ODD": "\udcfe=="}})])
    await next_event(link, Gone)
    assert bench.output() == f"{[os.fsencode(text) for text in odd]} {os.fsencode('\udcfe==')!r}\n" or (
        bench.output() == str([os.fsencode(text) for text in odd]) + " " + repr(b"\xfe==") + "\n"
    )


def _fields(spec: object) -> dict[str, object]:
    return {name: getattr(spec, name) for name in spec.__slots__}  # type: ignore[attr-defined]


@pytest.mark.rule("G4", "G6")
async def test_a_worker_leads_a_group_and_inherits_no_signal_setting_and_no_descriptor(bench: Bench) -> None:
    code = """
import os
print(os.getpid(), os.getpgid(0))
for fd in sorted(map(int, os.listdir('/proc/self/fd'))):
    try: print(fd, os.readlink(f'/proc/self/fd/{fd}'))
    except OSError: pass  # the one that listed the folder
"""
    link = await bench.link()
    grep = bench.worker("grep", "-E", "Sig(Ign|Blk)", "/proc/self/status", rank=1)
    spawned = await link.spawn(0, [bench.python(code), grep])
    await next_event(link, Gone)
    pid = spawned.workers[0].pid
    assert bench.output().splitlines() == [
        f"{pid} {pid}",
        "0 /dev/null",
        f"1 {bench.folder}/0.out",
        f"2 {bench.folder}/0.err",
    ]
    assert bench.output(1).split() == ["SigBlk:", "0" * 16, "SigIgn:", "0" * 16]


@pytest.mark.rule("G5", "G8")
async def test_a_chatty_worker_loses_nothing(bench: Bench) -> None:
    """Field case C126: far more than a pipe holds, on both outputs in turns, while the agent reads nothing."""
    code = """
import os
for i in range(800):
    block = (f'{i:07d}\\n' * 8192).encode()
    assert os.write(1, block) == os.write(2, block) == 65536
"""
    link = await bench.link()
    await link.spawn(0, [bench.python(code)])
    assert (await next_event(link, Exited)).exit_code == 0
    for name in ("0.out", "0.err"):
        text = (bench.folder / name).read_bytes()
        assert len(text) == 800 * 65536
        assert text[:: 65536 // 2][:7] and text[-8:] == b"0000799\n"


@pytest.mark.rule("G5")
async def test_an_exit_is_seen_whatever_its_children_hold_open(bench: Bench) -> None:
    """Only the agent decides about strays: they live, no Gone comes, and no new cycle begins beside them."""
    link = await bench.link()
    await link.spawn(0, [bench.shell("sleep 1000 & echo $! > $LINES; exit 4")])
    [stray] = await bench.lines.next_pids(1)
    assert (await next_event(link, Exited)).exit_code == 4
    with pytest.raises(SpawnRefused, match=f"cycle 0 are left: .*{stray}"):
        await link.spawn(1, [bench.shell("exit 0")])
    assert alive(stray)
    assert link.events.empty()
    link.stop(1000.0)
    assert await next_event(link, Gone) == Gone(0)
    assert not alive(stray)
    await link.spawn(1, [bench.shell("exit 0")])


# --- stopping


@pytest.mark.rule("G4")
async def test_a_stop_ends_the_whole_tree(bench: Bench) -> None:
    """Field case C113: also a grandchild that ignores SIGTERM under a parent that dies, and one in its own session."""
    script = """
    bash -c 'trap "" TERM; echo $$ > $LINES; while :; do sleep 100; done' &
    setsid bash -c 'trap "" TERM; echo $$ > $LINES; while :; do sleep 100; done' &
    (setsid sleep 1000 & echo $! > $LINES) &
    wait
    """
    link = await bench.link()
    await link.spawn(0, [bench.shell(script), bench.shell(script, rank=1)])
    pids = await bench.lines.next_pids(6)
    link.stop(0.3)
    events = await events_until(link, Gone)
    ends = [event for event in events if isinstance(event, Exited)]
    assert {(end.signal, end.message, end.stopped_by_agent) for end in ends} == {
        (15, "stopped by agent (SIGTERM)", True)
    }
    assert not any(map(alive, pids))
    assert descendants(link.pid) == []


@pytest.mark.rule("G4")
async def test_the_grace_ends_as_soon_as_none_is_left(bench: Bench) -> None:
    link = await bench.link()
    await link.spawn(0, [bench.worker("sleep", "1000", rank=rank) for rank in range(4)])
    link.stop(10_000.0)  # Gone comes within the patience of this test
    assert await next_event(link, Gone) == Gone(0)


@pytest.mark.rule("G4", "E2")
async def test_the_grace_is_given(bench: Bench) -> None:
    """Field case C117: time to write a checkpoint, also by a program that the worker starts for it only then."""
    copy = "trap 'bash -c \"sleep 1; echo saved > checkpoint\"; exit 7' TERM; echo ready > $LINES; " + FOREVER
    link = await bench.link()
    await link.spawn(0, [bench.shell(copy), bench.worker("sleep", "1000", rank=1)])
    assert await bench.lines.next() == "ready"
    link.stop(1000.0)
    ends = [event for event in await events_until(link, Gone) if isinstance(event, Exited)]
    assert (bench.folder / "checkpoint").read_text() == "saved\n"
    assert {end.local_rank: end.message for end in ends} == {
        0: "stopped by agent (exit code 7)",
        1: "stopped by agent (SIGTERM)",
    }


@pytest.mark.rule("G4", "E2")
@pytest.mark.parametrize("how", ["shorter stop", "kill", "close"])
async def test_a_second_stop_shortens_the_grace(bench: Bench, how: str) -> None:
    link = await bench.link()
    await link.spawn(0, [bench.shell("trap 'echo told > $LINES' TERM; echo ready > $LINES; " + FOREVER)])
    assert await bench.lines.next() == "ready"
    link.stop(10_000.0)
    assert await bench.lines.next() == "told"
    link.stop(20_000.0)  # never lengthens
    match how:
        case "shorter stop":
            link.stop(0.0)
        case "kill":
            link.kill()
        case _:
            await link.close(grace_s=0.0)
    assert (await next_event(link, Exited)).signal == signal.SIGKILL
    assert await next_event(link, Gone) == Gone(0)


@pytest.mark.rule("G4")
async def test_a_suspended_worker_gets_to_act_on_sigterm(bench: Bench) -> None:
    link = await bench.link()
    await link.spawn(0, [bench.shell("trap 'exit 8' TERM; echo $$ > $LINES; kill -STOP $$; " + FOREVER)])
    [pid] = await bench.lines.next_pids(1)
    os.kill(pid, signal.SIGSTOP)
    link.stop(1000.0)
    assert (await next_event(link, Exited)).exit_code == 8


@pytest.mark.rule("G4")
async def test_a_stop_with_nothing_running_answers_at_once(bench: Bench) -> None:
    link = await bench.link()
    link.stop(1000.0)
    assert await next_event(link, Gone) == Gone(None)
    await link.spawn(5, [bench.shell("exit 0")])
    await next_event(link, Gone)
    link.kill()
    assert await next_event(link, Gone) == Gone(5)


@pytest.mark.rule("G4")
async def test_processes_that_fork_while_being_killed_do_not_escape(bench: Bench) -> None:
    chain = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.setsid() if os.fork() == 0 else None
end_s = time.monotonic() + 20  # in case of a bug
with open(os.environ['LINES'], 'w') as lines: lines.write('ready\\n')
while time.monotonic() < end_s:
    if os.fork() != 0: os._exit(0)
"""
    link = await bench.link()
    await link.spawn(0, [bench.python(chain)])
    assert await bench.lines.next() == "ready"
    link.kill()
    await next_event(link, Gone)
    assert descendants(link.pid) == []


@pytest.mark.rule("G4")
async def test_old_and_new_workers_never_overlap(bench: Bench) -> None:
    """Field case C125: each worker holds a lock and takes its time to let go; every new one gets it at once."""
    code = """
import fcntl, os, signal, sys, time
lock = open(f'lock-{sys.argv[1]}', 'w')
try: fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError: os._exit(99)
def leave(*_):
    time.sleep(0.3)
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
with open(os.environ['LINES'], 'w') as lines: lines.write('locked\\n')
while True: signal.pause()
"""
    link = await bench.link()
    for cycle in range(4):
        await link.spawn(cycle, [bench.python(code, str(rank), rank=rank) for rank in range(2)])
        assert [await bench.lines.next(), await bench.lines.next()] == ["locked", "locked"]
        link.stop(1000.0)
        with pytest.raises(SpawnRefused):
            await link.spawn(cycle + 1, [bench.shell("exit 99")])
        ends = [event for event in await events_until(link, Gone) if isinstance(event, Exited)]
        assert [end.exit_code for end in ends] == [0, 0]


@pytest.mark.rule("G4")
async def test_only_its_own_are_ended(bench: Bench) -> None:
    """Field case C116: a bystander in the agent's session and group, and the workers of another agent, live on."""
    bystander = await asyncio.create_subprocess_exec("sleep", "1000")
    bench.pids.append(bystander.pid)
    other, link = await bench.link("other"), await bench.link("mine")
    others = await other.spawn(0, [bench.worker("sleep", "1000")])
    await link.spawn(0, [bench.worker("sleep", "1000")])
    link.stop(0.0)
    await next_event(link, Gone)
    await link.close()
    assert alive(bystander.pid)
    assert alive(others.workers[0].pid)
    bystander.kill()
    await bystander.wait()


# --- deaths


def _start_agent(bench: Bench, worker_script: str, leak_descriptors: bool) -> subprocess.Popen[bytes]:
    worker = bench.shell(worker_script)
    order = {
        "runtime_dir": str(bench.folder / "runtime"),
        "key": "key",
        "workers": [{**_fields(worker), "env": dict(worker.env)}],
        "leak_descriptors": leak_descriptors,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.client.supervised_agent", json.dumps(order)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )


@pytest.mark.rule("G4")
@pytest.mark.parametrize("leak_descriptors", [False, True])
async def test_workers_end_with_a_killed_agent_and_the_next_one_waits(
    bench: Bench, leak_descriptors: bool
) -> None:
    """Field case C115: SIGKILL of the agent ends grandchildren that ignore SIGTERM, too, even when a process that
    the agent forked still holds its end of the socket; the next agent's workers start only then."""
    tree = """
    exec 9> busy; flock -n 9 || exit 98
    setsid bash -c 'trap "" TERM; echo $$ > $LINES; while :; do sleep 100; done' &
    trap '' TERM; echo $$ > $LINES; while :; do sleep 100; done
    """
    agent = _start_agent(bench, tree, leak_descriptors)
    pids = await bench.lines.next_pids(2)
    assert agent.stdout is not None
    told = json.loads(await asyncio.to_thread(agent.stdout.readline))
    bench.pids += [told["leaking_pid"]] if leak_descriptors else []
    agent.kill()
    link = await bench.link()
    spawning = asyncio.create_task(link.spawn(0, [bench.shell("flock -n busy true")]))
    assert await next_event(link, Waiting) == Waiting(told["supervisor_pid"])
    await ended(told["supervisor_pid"])
    assert not any(map(alive, [*pids, *told["worker_pids"]]))
    await spawning
    assert (await next_event(link, Exited)).exit_code == 0
    agent.stdout.close()
    agent.wait()


@pytest.mark.rule("G4")
async def test_workers_end_with_a_killed_supervisor_and_the_next_one_ends_the_rest(bench: Bench) -> None:
    link = await bench.link()
    spawned = await link.spawn(0, [bench.shell("trap '' TERM; sleep 1000 & echo $! > $LINES; " + FOREVER)])
    [grandchild] = await bench.lines.next_pids(1)
    bench.pids.append(grandchild)
    os.kill(link.pid, signal.SIGKILL)
    assert await next_event(link, SupervisorDied) == SupervisorDied("SIGKILL")
    await ended(spawned.workers[0].pid)
    with pytest.raises(SupervisorError):
        await link.spawn(1, [bench.shell("exit 0")])
    link.stop(0.0)  # nobody hears it, and it does not raise
    await link.close()
    assert alive(grandchild)
    new = await bench.link()
    await new.spawn(1, [bench.shell(f"kill -0 {grandchild}")])
    assert (await next_event(new, Exited)).exit_code != 0
    assert not alive(grandchild)


@pytest.mark.rule("G4")
async def test_a_spawn_under_way_fails_when_the_supervisor_dies(bench: Bench) -> None:
    first = await bench.link()
    second = await bench.link()
    spawning = asyncio.create_task(second.spawn(0, [bench.shell("exit 0")]))
    assert await next_event(second, Waiting) == Waiting(first.pid)
    os.kill(second.pid, signal.SIGKILL)
    with pytest.raises(SupervisorError, match="SIGKILL"):
        await spawning


@pytest.mark.rule("G4")
async def test_recorded_leftovers_are_ended_and_namesakes_are_not(bench: Bench) -> None:
    """A pid counts only with its start time, on this boot."""
    leftover = await asyncio.create_subprocess_exec("sleep", "1000")
    namesake = await asyncio.create_subprocess_exec("sleep", "1000")
    runtime = bench.folder / "runtime"
    runtime.mkdir(mode=0o755)
    stats = [read_stat(process.pid) for process in (leftover, namesake)]
    assert stats[0] is not None and stats[1] is not None
    record = {
        "pid_space": pid_space(),
        "supervisor": {"pid": 4194304, "start_time_ticks": 1},
        "workers": [
            {"local_rank": 0, "pid": leftover.pid, "start_time_ticks": stats[0].id.start_time_ticks},
            {"local_rank": 1, "pid": namesake.pid, "start_time_ticks": stats[1].id.start_time_ticks + 1},
        ],
    }
    (runtime / "key.json").write_text(json.dumps(record))
    link = await bench.link()
    spawned = await link.spawn(6, [bench.worker("sleep", "1000")])
    assert await leftover.wait() == -signal.SIGKILL
    assert alive(namesake.pid)
    namesake.kill()
    await namesake.wait()
    written = json.loads((runtime / "key.json").read_text())
    assert runtime.stat().st_mode & 0o777 == 0o700
    assert written["identity"] == {"run": "run", "node": "node", "incarnation": "1"}
    assert (written["cycle"], written["supervisor"]["pid"]) == (6, link.pid)
    assert [worker["pid"] for worker in written["workers"]] == [spawned.workers[0].pid]
    await link.close(grace_s=0.0)
    assert not (runtime / "key.json").exists()


@pytest.mark.rule("G4")
async def test_a_record_of_another_boot_ends_nobody(bench: Bench) -> None:
    bystander = await asyncio.create_subprocess_exec("sleep", "1000")
    stat = read_stat(bystander.pid)
    assert stat is not None
    plain = {"local_rank": 0, "pid": bystander.pid, "start_time_ticks": stat.id.start_time_ticks}
    runtime = bench.folder / "runtime"
    runtime.mkdir()
    (runtime / "key.json").write_text(
        json.dumps({"pid_space": "another", "supervisor": plain, "workers": [plain]})
    )
    link = await bench.link()
    await link.spawn(0, [bench.shell("exit 0")])
    assert alive(bystander.pid)
    bystander.kill()
    await bystander.wait()


async def test_a_second_supervisor_waits_for_the_first_and_a_stop_takes_the_spawn_back(bench: Bench) -> None:
    first, second = await bench.link(), await bench.link()
    spawning = asyncio.create_task(second.spawn(0, [bench.shell("exit 0")]))
    assert await next_event(second, Waiting) == Waiting(first.pid)
    second.stop(0.0)
    with pytest.raises(SpawnRefused, match="stopped before"):
        await spawning
    assert await next_event(second, Gone) == Gone(None)
    await first.close()
    await second.spawn(1, [bench.shell("exit 0")])
    assert (await next_event(second, Exited)).cycle == 1


@pytest.mark.parametrize("key", ["../escape", "", ".hidden", "a/b"])
async def test_a_key_never_becomes_a_path_unchecked(bench: Bench, key: str) -> None:
    with pytest.raises(SupervisorError, match="cannot name a file"):
        await bench.link(key)


async def test_an_unusable_directory_is_an_error_at_the_start(bench: Bench) -> None:
    (bench.folder / "file").write_text("")
    with pytest.raises(SupervisorError, match="run-time directory .*file/below"):
        await SupervisorLink.start(bench.folder / "file/below", "key", Identity("run", "node", "1"))


# --- signals, and a long life


@pytest.mark.rule("G6")
async def test_a_signal_goes_to_those_that_handle_it(bench: Bench) -> None:
    link = await bench.link()
    handler = "trap 'echo handled > $LINES' USR1; echo ready > $LINES; " + FOREVER
    await link.spawn(0, [bench.worker("sleep", "1000", rank=0), bench.shell(handler, rank=1)])
    assert await bench.lines.next() == "ready"
    link.signal(signal.SIGUSR1)
    assert await bench.lines.next() == "handled"
    link.kill()
    ends = [event for event in await events_until(link, Gone) if isinstance(event, Exited)]
    assert [end.signal for end in ends] == [signal.SIGKILL, signal.SIGKILL]


@pytest.mark.rule("E2", "G6")
async def test_signals_to_the_supervisor_itself_change_nothing(bench: Bench) -> None:
    """A terminal's Ctrl-C does not reach it, and what a batch scheduler sends to all of a step it ignores."""
    link = await bench.link()
    await link.spawn(0, [bench.shell("exec sleep 1000")])
    assert os.getsid(link.pid) == link.pid
    for signo in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
    ):
        os.kill(link.pid, signo)
    link.stop(1000.0)
    assert (await next_event(link, Exited)).message == "stopped by agent (SIGTERM)"


@pytest.mark.rule("G6")
async def test_many_cycles_leave_no_zombie_and_no_descriptor(bench: Bench) -> None:
    """Field case C124: orphans of all kinds, over and over."""
    script = "(sleep 1000 &); (setsid sleep 1000 &); (exit 3 &); exit 0"
    link = await bench.link()
    descriptors = []
    for cycle in range(50):
        await link.spawn(cycle, [bench.shell(script)])
        await next_event(link, Exited)
        link.stop(1000.0)
        await next_event(link, Gone)
        assert descendants(link.pid) == []
        descriptors.append(len(os.listdir(f"/proc/{link.pid}/fd")))
    assert set(descriptors) == {descriptors[0]}


async def test_both_ways_to_walk_the_tree_find_the_same(bench: Bench) -> None:
    link = await bench.link()
    await link.spawn(0, [bench.shell("setsid sleep 1000 & (sleep 1000 & echo ready > $LINES; wait) & wait")])
    assert await bench.lines.next() == "ready"
    by_kernel = descendants(link.pid, has_children_file=True)
    by_scan = descendants(link.pid, has_children_file=False)
    assert {stat.id for stat in by_kernel} == {stat.id for stat in by_scan}
    assert len(by_scan) == 4


def test_the_supervisor_imports_little() -> None:
    code = f"import sys; sys.path.append({str(ROOT)!r}); import nvrx.client.supervisor; print(*sys.modules, sep='\\n')"
    modules = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"asyncio", "grpc", "google", "torch", "pickle"} & set(modules)
    ours = {name for name in modules if name.startswith("nvrx.")} - {"nvrx.client", "nvrx.client.supervisor"}
    assert ours == {
        f"nvrx.client.{name}"
        for name in ("processes", "supervisor_channel", "supervisor_record", "tree_stop", "worker_start")
    }
