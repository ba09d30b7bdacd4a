"""The supervisor with real processes: workers and their end. Waits for events, never for time to pass."""

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from nvrx.client.processes import descendants, read_stat
from nvrx.client.supervisor_link import (
    Exited,
    Gone,
    SpawnRefused,
)

from .supervision import FOREVER, ROOT, Bench, alive, events_until, next_event

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
    code = "import os, sys; print(repr(([os.fsencode(a) for a in sys.argv[1:]], os.environb[b'ODD'])), end='')"
    spec = bench.python(code, *odd)
    link = await bench.link()
    await link.spawn(0, [replace(spec, env={**spec.env, "ODD": "\udcfe=="})])
    await next_event(link, Gone)
    assert bench.output() == repr(([os.fsencode(text) for text in odd], b"\xfe=="))


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
    masks = dict(line.split() for line in bench.output(1).splitlines())
    # libc keeps 32 and 33 to itself: nobody can set them, and what its posix_spawn starts, as make does, ignores them.
    of_libc = 1 << (32 - 1) | 1 << (33 - 1)
    assert {name: int(mask, 16) & ~of_libc for name, mask in masks.items()} == {"SigBlk:": 0, "SigIgn:": 0}


@pytest.mark.rule("G5", "G8")
async def test_a_chatty_worker_loses_nothing(bench: Bench) -> None:
    """Field case C126: far more than a pipe holds, on both outputs in turns."""
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
        assert all(text[at * 65536 : at * 65536 + 8] == f"{at:07d}\n".encode() for at in range(800))


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
    """Field case C113: also grandchildren that ignore SIGTERM, outlive their parent, or left the session."""
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
    """Field case C117: time to write a checkpoint, also by a program that is started for it only then."""
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
async def test_a_second_stop_never_lengthens_the_grace(bench: Bench) -> None:
    link = await bench.link()
    await link.spawn(0, [bench.shell("trap '' TERM; echo ready > $LINES; " + FOREVER)])
    assert await bench.lines.next() == "ready"
    link.stop(0.2)
    link.stop(10_000.0)
    assert (await next_event(link, Exited)).signal == signal.SIGKILL


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
    """Field case C125: workers hold a lock and take their time to let go; new ones get it at once."""
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
    """Field case C116: a bystander in the agent's session and group, and another agent's workers, live on."""
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
    code = f"import sys; sys.path.append({str(ROOT)!r}); import nvrx.client.supervisor; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not {"asyncio", "grpc", "google", "torch", "pickle"} & set(modules)
    shells = {"nvrx.client", "nvrx.client.supervisor", "nvrx.runtime_dir"}
    ours = {name for name in modules if name.startswith("nvrx.")} - shells
    start = ("warm", "warm_binding", "warm_command", "worker_start", "zygote", "zygote_worker")
    assert ours == {
        f"nvrx.client.{name}"
        for name in ("output_pipes", "processes", "supervisor_channel", "supervisor_record", "tree_stop", *start)
    }
