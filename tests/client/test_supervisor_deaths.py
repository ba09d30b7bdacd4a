"""The supervisor when its agent, or itself, dies; its lock and its record. Real processes, as before."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest

from nvrx.client.processes import pid_space, read_stat
from nvrx.client.supervisor_channel import encode
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

from .supervision import FOREVER, ROOT, Bench, alive, ended, next_event


def _start_agent(bench: Bench, worker_script: str, leak_descriptors: bool) -> subprocess.Popen[bytes]:
    worker = bench.shell(worker_script)
    order = {
        "runtime_dir": str(bench.folder / "runtime"),
        "key": "key",
        "workers": [asdict(worker)],
        "leak_descriptors": leak_descriptors,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.client.supervised_agent", json.dumps(order)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )


@pytest.mark.rule("G4")
@pytest.mark.parametrize("leak_descriptors", [False, True])
async def test_workers_end_with_a_killed_agent_and_the_next_one_waits(bench: Bench, leak_descriptors: bool) -> None:
    """Field case C115: grandchildren that ignore SIGTERM end, too, also when something that the agent forked
    still holds its end of the socket; the next agent's workers start only then."""
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
    await new.spawn(1, [bench.shell("exit 0")])
    assert not alive(grandchild)


@pytest.mark.rule("G4")
@pytest.mark.parametrize(
    ("data", "exit_code"), [(b"", 0), (b"\xff\xff\xff\xff", 0), (encode({"type": "nonsense"}), 70)]
)
async def test_nothing_outlives_a_broken_link(bench: Bench, data: bytes, exit_code: int) -> None:
    """An agent that hangs up while it lives, one that talks nonsense, and a bug in the supervisor itself."""
    link = await bench.link()
    tree = "setsid sleep 1000 & echo $! > $LINES; " + FOREVER
    spawned = await link.spawn(0, [bench.shell(tree)])
    [grandchild] = await bench.lines.next_pids(1)
    link._writer.write(data)
    link._writer.write_eof()
    assert await next_event(link, SupervisorDied) == SupervisorDied(f"exit code {exit_code}")
    assert not alive(spawned.workers[0].pid)
    assert not alive(grandchild)


@pytest.mark.rule("G4")
async def test_a_spawn_under_way_fails_when_the_supervisor_dies(bench: Bench) -> None:
    first = await bench.link()
    second = await bench.link()
    spawning = asyncio.create_task(second.spawn(0, [bench.shell("exit 0")]))
    await asyncio.sleep(0)  # it is sent
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
    assert stats[0] is not None
    assert stats[1] is not None
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
    (runtime / "key.json").write_text(json.dumps({"pid_space": "another", "supervisor": plain, "workers": [plain]}))
    link = await bench.link()
    await link.spawn(0, [bench.shell("exit 0")])
    assert alive(bystander.pid)
    bystander.kill()
    await bystander.wait()


# --- lock and record


@pytest.mark.rule("G4")
async def test_a_second_supervisor_waits_for_the_first_and_a_stop_takes_the_spawn_back(bench: Bench) -> None:
    first, second = await bench.link(), await bench.link()
    spawning = asyncio.create_task(second.spawn(0, [bench.shell("exit 0")]))
    await asyncio.sleep(0)  # it is sent
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
    with pytest.raises(SupervisorError, match=r"run-time directory .*file/below"):
        await SupervisorLink.start(bench.folder / "file/below", "key", Identity("run", "node", "1"))
