"""The checks of a node, one by one, as an agent runs them (rules G11, G12).

GPUs are a stand-in for NVML that reads a file, InfiniBand is a tree of files; commands, paths and programs are real.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from nvrx.client.health import monitor as monitors
from nvrx.client.health.command import CommandCheck
from nvrx.client.health.gpu_memory import GpuMemory
from nvrx.client.health.monitor import HealthMonitor, HealthWishes, gpus_may_be_there
from nvrx.client.health.watch_links import Links, port_states
from nvrx.client.health.watch_path import problem
from nvrx.client.health.watching import Program, Watching
from nvrx.core.presence import WELL, Health, HealthReport, health_report

PATIENCE_S = 60.0
ENV = {"PATH": os.environ.get("PATH", os.defpath)}


class Heard:
    """What a check said, and a way to wait for more."""

    def __init__(self) -> None:
        self.reports: list[HealthReport] = []
        self._news = asyncio.Event()

    def __call__(self, report: HealthReport) -> None:
        self.reports.append(report)
        self._news.set()

    def news(self) -> None:
        self._news.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                await self._news.wait()
                self._news.clear()

    async def last(self, state: Health, words: str = "") -> HealthReport:
        """Wait until the last report is so."""
        await self.until(
            lambda: bool(self.reports) and self.reports[-1].state is state and words in self.reports[-1].reason
        )
        return self.reports[-1]


# ---- the command ------------------------------------------------------------------------------------------------


async def looked(script: str, within_s: float = PATIENCE_S) -> HealthReport:
    return await CommandCheck(["sh", "-c", script], ENV, within_s).look()


@pytest.mark.rule("G11")
@pytest.mark.parametrize(
    ("script", "state", "reason"),
    [
        ("echo fine; exit 0", Health.HEALTHY, ""),
        ("echo one; echo; echo ' two '; echo; exit 1", Health.DEGRADED, "two"),
        ("echo to standard error >&2; exit 2", Health.UNHEALTHY, "to standard error"),
        ("exit 2", Health.UNHEALTHY, "exit code 2"),
        ("exit 3", Health.DEGRADED, "the check itself exit code 3, which is none of 0, 1, 2"),
        ("echo oops; kill -SEGV $$", Health.DEGRADED, "the check itself was ended by SIGSEGV: oops"),
        ("printf 'no end of line'; exit 1", Health.DEGRADED, "no end of line"),
        ("printf 'bad \\377 \\033[31m bytes\\n'; exit 1", Health.DEGRADED, "bad \ufffd [31m bytes"),
        ("head -c 400 /dev/zero | tr '\\0' x; exit 1", Health.DEGRADED, "x" * 253 + "..."),
    ],
)
async def test_what_a_command_says(script: str, state: Health, reason: str) -> None:
    found = await looked(script)
    assert (found.state, found.reason) == (state, reason)


@pytest.mark.rule("G11")
async def test_a_command_that_is_not_there_or_cannot_run_is_no_broken_node(tmp_path: Path) -> None:
    missing = await CommandCheck([str(tmp_path / "x")], ENV, PATIENCE_S).look()
    assert missing.state is Health.DEGRADED
    assert "exit code 127" in missing.reason
    (tmp_path / "x").write_text("#!/bin/sh\n")
    locked = await CommandCheck([str(tmp_path / "x")], ENV, PATIENCE_S).look()
    assert "exit code 126" in locked.reason


@pytest.mark.rule("G11")
async def test_a_command_that_leaves_a_child_with_its_output_is_not_waited_for(tmp_path: Path) -> None:
    found = await looked(f"sleep 1000 & echo $! > {tmp_path}/pid; exit 2")
    assert found.state is Health.UNHEALTHY
    await _gone(int((tmp_path / "pid").read_text()))


@pytest.mark.rule("G11")
async def test_a_command_that_hangs_is_killed_with_its_group_and_leaves_no_zombie(tmp_path: Path) -> None:
    check = CommandCheck(
        ["sh", "-c", f"trap '' TERM; sleep 1000 & echo $! > {tmp_path}/child; echo looking; wait"], ENV, 1.0
    )
    found = await check.look()
    assert found == HealthReport(Health.DEGRADED, "health-check", "the check itself did not end within 1 s: looking")
    await _gone(int((tmp_path / "child").read_text()))
    _no_children()


async def _gone(pid: int) -> None:
    """Wait until a process, perhaps not our child, has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        ready, _, _ = await asyncio.to_thread(select.select, [handle], [], [], PATIENCE_S)
        assert ready, f"{pid} lives"
    finally:
        os.close(handle)


def _no_children() -> None:
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


class Lines(logging.Handler):
    """What is logged, and a way to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._heard = Heard()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += f"{record.getMessage()}\n"
        self._heard.news()

    async def until(self, words: str) -> None:
        await self._heard.until(lambda: words in self.text)


@pytest.mark.rule("G11")
async def test_a_command_that_prints_for_ever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvrx.client.health.command.MAX_OUTPUT_BYTES", 1 << 20)
    found = await looked("yes")
    assert found.reason == "the check itself printed more than 1 MiB"


@pytest.mark.rule("G11", "J2")
async def test_no_token_reaches_a_command(tmp_path: Path) -> None:
    out = tmp_path / "env"
    heard = Heard()
    env = {**ENV, "NVRX_TOKEN_FILE": "/secret", "OTHER": "1"}
    wishes = HealthWishes(("sh", "-c", f"env > {out}; exit 1"), 30.0)
    monitor = HealthMonitor(wishes, env, heard.news, links=tmp_path / "none", asks_gpus=False)
    monitor.start(lambda _: None)
    await heard.until(lambda: monitor.report is not None)
    monitor.close()
    assert "OTHER=1" in out.read_text()
    assert "NVRX_TOKEN" not in out.read_text()


# ---- paths ------------------------------------------------------------------------------------------------------


@pytest.mark.rule("G11")
def test_what_is_wrong_with_a_path(tmp_path: Path) -> None:
    file = tmp_path / "file"
    assert problem(str(file)) == "No such file or directory"
    file.write_text("x")
    assert problem(str(file)) is None
    assert problem(str(tmp_path)) is None
    assert problem(f"{file}/below") == "Not a directory"
    os.mkfifo(tmp_path / "pipe")
    assert problem(str(tmp_path / "pipe")) is None, "and it was not opened: that would hang"
    (tmp_path / "loop").symlink_to("loop")
    assert problem(str(tmp_path / "loop")) == "Too many levels of symbolic links"


@pytest.mark.rule("G11")
async def test_a_path_that_does_not_answer_fails_until_it_does(tmp_path: Path) -> None:
    """The watch is stopped, as a hung file system would stop it: it is not killed, goes on, and ends with the agent."""
    heard = Heard()
    program = Program("health-path x", "watch_path", (str(tmp_path), "0.1"), 0.1, Health.UNHEALTHY)
    watching = Watching(program, ENV, heard, answers_within_s=1.0)
    task = asyncio.create_task(watching.keep_up())
    await heard.last(Health.HEALTHY)
    assert watching._child is not None
    pid = watching._child.pid
    os.kill(pid, signal.SIGSTOP)
    found = await heard.last(Health.UNHEALTHY)
    assert found.reason == "does not answer for 1 s"
    os.kill(pid, signal.SIGCONT)
    await heard.last(Health.HEALTHY)
    task.cancel()
    watching.close()
    await _gone(pid)


@pytest.mark.rule("G11")
async def test_a_watch_ends_when_its_agent_does(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "nvrx.client.health.watch_path", str(tmp_path), "1000"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert json.loads(await process.stdout.readline()) == {"state": "HEALTHY", "reason": ""}
    process.stdin.close()
    assert await process.wait() == 0


@pytest.mark.rule("G11")
async def test_a_watch_that_dies_says_so_and_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nvrx.client.health.watching.STARTS_AGAIN_AFTER_S", 0.1)
    heard = Heard()
    program = Program("health-path x", "watch_path", (str(tmp_path), "1000"), 1000, Health.UNHEALTHY)
    watching = Watching(program, ENV, heard)
    task = asyncio.create_task(watching.keep_up())
    await heard.last(Health.HEALTHY)
    assert watching._child is not None
    os.kill(watching._child.pid, signal.SIGKILL)
    await heard.last(Health.DEGRADED, "the watch of it ended (exit code -9)")
    await heard.last(Health.HEALTHY)
    task.cancel()
    watching.close()


# ---- InfiniBand --------------------------------------------------------------------------------------------------


def port(root: Path, device: str, number: int, state: str, physical: str = "LinkUp") -> None:
    folder = root / device / "ports" / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {"DOWN": 1, "INIT": 2, "ARMED": 3, "ACTIVE": 4}
    (folder / "state").write_text(f"{numbers[state]}: {state}\n")
    (folder / "phys_state").write_text(f"5: {physical}\n")


@pytest.mark.rule("G11")
def test_ports_that_were_up_and_are_not(tmp_path: Path) -> None:
    for device in ("mlx5_0", "mlx5_1"):
        port(tmp_path, device, 1, "ACTIVE")
    port(tmp_path, "mlx5_2", 1, "DOWN", "Disabled")
    links = Links()

    def look(times: int = 2) -> tuple[str, str]:
        return [links.look(port_states(tmp_path)) for _ in range(times)][-1]

    assert look() == ("HEALTHY", ""), "a port that never was up speaks against nothing"
    port(tmp_path, "mlx5_1", 1, "DOWN", "Polling")
    assert look(1) == ("HEALTHY", ""), "a link may be gone for a moment"
    assert look() == (
        "DEGRADED",
        "1 of 2 InfiniBand ports that were up are not: mlx5_1 port 1 is DOWN (physically Polling)",
    )
    port(tmp_path, "mlx5_0", 1, "INIT")
    state, reason = look()
    assert state == "UNHEALTHY"
    assert reason.startswith("no InfiniBand port is up any more: mlx5_0 port 1 is INIT (physically LinkUp), mlx5_1")
    port(tmp_path, "mlx5_0", 1, "ACTIVE")
    port(tmp_path, "mlx5_1", 1, "ACTIVE")
    assert look(1) == ("HEALTHY", "")
    for file in (tmp_path / "mlx5_1" / "ports" / "1").iterdir():
        file.unlink()
    (tmp_path / "mlx5_1" / "ports" / "1").rmdir()
    assert look()[1].endswith("mlx5_1 port 1 is gone")


@pytest.mark.rule("G11")
async def test_a_host_without_infiniband_has_nothing_to_watch(tmp_path: Path) -> None:
    heard = Heard()
    program = Program("infiniband", "watch_links", (str(tmp_path), "0.1"), 0.1, Health.DEGRADED)
    async with asyncio.timeout(PATIENCE_S):
        await Watching(program, ENV, heard).keep_up()
    assert heard.reports == [WELL]


@pytest.mark.rule("G11")
async def test_a_port_that_goes_down_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitors, "LOOK_AT_LINKS_EVERY_S", 0.1)
    port(tmp_path, "mlx5_0", 1, "ACTIVE")
    heard = Heard()
    monitor = HealthMonitor(HealthWishes(), ENV, heard.news, links=tmp_path, asks_gpus=False)
    monitor.start(lambda _: None)
    await heard.until(lambda: monitor.report == WELL)
    port(tmp_path, "mlx5_0", 1, "DOWN", "Polling")
    await heard.until(lambda: monitor.report != WELL)
    assert monitor.report is not None
    assert (monitor.report.state, monitor.report.check) == (Health.UNHEALTHY, "infiniband")
    monitor.close()


# ---- GPUs: a stand-in for NVML ------------------------------------------------------------------------------------


class FakeGpus:
    """The file that the stand-in for NVML answers from."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.told: dict[str, Any] = {"gpus": [{"uuid": "GPU-a", "recovery": 0}, {"uuid": "GPU-b"}], "xids": []}
        self.write()

    def write(self) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.told))
        new.replace(self.file)

    def gpu(self, index: int, **told: Any) -> None:
        self.told["gpus"][index].update(told)
        self.write()

    def xid(self, index: int, number: int) -> None:
        self.told["xids"].append([index, number])
        self.write()


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    """Where our stand-in for pynvml is found before the real one."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "fake_nvml_watch"))
    return FakeGpus(tmp_path / "nvml")


class Watched:
    """A watch of the stand-in's GPUs, as the agent has it."""

    def __init__(self, gpus: FakeGpus, answers_within_s: float = PATIENCE_S) -> None:
        self.heard = Heard()
        program = Program("gpu", "watch_gpus", ("0.1",), 0.1, Health.DEGRADED)
        env = {**ENV, "FAKE_NVML": str(gpus.file)}
        self.memory = GpuMemory(lambda line: self.watching.ask(line))
        self.watching = Watching(program, env, self.heard, self.memory.hear, answers_within_s)
        self.task = asyncio.create_task(self.watching.keep_up())

    def close(self) -> None:
        self.task.cancel()
        self.watching.close()


@pytest.fixture
async def watched(gpus: FakeGpus) -> AsyncIterator[Watched]:
    found = Watched(gpus)
    await found.heard.last(Health.HEALTHY)
    yield found
    found.close()


@pytest.mark.rule("G11")
async def test_what_the_driver_says_is_to_be_done_with_a_gpu(gpus: FakeGpus, watched: Watched) -> None:
    gpus.gpu(0, recovery=1)
    found = await watched.heard.last(Health.UNHEALTHY)
    assert found == HealthReport(Health.UNHEALTHY, "gpu", "GPU 0 (GPU-a) needs a reset, its driver says")
    gpus.gpu(0, recovery=0)
    await watched.heard.last(Health.HEALTHY)
    gpus.gpu(1, recovery=4)
    await watched.heard.last(Health.DEGRADED, "GPU 1 (GPU-b) is to be drained and reset")
    gpus.gpu(1, recovery=77)
    await watched.heard.last(Health.DEGRADED, "GPU 1 (GPU-b) has recovery action 77")
    gpus.gpu(0, lost=True)
    await watched.heard.last(Health.UNHEALTHY, "GPU 0 (GPU-a) is lost: it fell off the bus")
    gpus.gpu(0, lost=False)
    gpus.gpu(1, recovery=None, error=True)
    await watched.heard.last(Health.DEGRADED, "GPU 1 (GPU-b) does not answer NVML: Unknown Error")


@pytest.mark.rule("G11")
async def test_xids(gpus: FakeGpus, watched: Watched) -> None:
    """A program's own mistakes say nothing of the GPU; a fatal one stays until somebody did something."""
    gpus.xid(1, 43)
    gpus.xid(1, 31)
    gpus.xid(1, 94)
    await watched.heard.last(Health.DEGRADED)
    assert watched.heard.reports[-1].reason == "GPU 1 (GPU-b) had XID 94"
    gpus.xid(0, 79)
    await watched.heard.last(Health.UNHEALTHY, "GPU 0 (GPU-a) had XID 79 (fell off the bus)")


@pytest.mark.rule("G11")
async def test_a_driver_that_hangs_makes_the_node_be_chosen_last(gpus: FakeGpus) -> None:
    watched = Watched(gpus, answers_within_s=2.0)
    await watched.heard.last(Health.HEALTHY)
    gpus.told["hang"] = True
    gpus.write()
    await watched.heard.last(Health.DEGRADED, "does not answer for 2 s")
    assert await watched.memory.holders(within_s=0.2) is None, "nor is it waited for"
    watched.close()


@pytest.mark.rule("G11", "G12")
async def test_without_a_driver_there_is_nothing_to_watch(gpus: FakeGpus) -> None:
    heard = Heard()
    program = Program("gpu", "watch_gpus", ("0.1",), 0.1, Health.DEGRADED)
    memory = GpuMemory(lambda _: None)
    async with asyncio.timeout(PATIENCE_S):
        await Watching(program, ENV, heard, memory.hear).keep_up()
    assert heard.reports == [WELL]
    await memory.free(1000.0, lambda: True)


@pytest.mark.rule("G12")
def test_no_process_is_started_where_there_is_no_device(tmp_path: Path) -> None:
    assert not gpus_may_be_there(tmp_path)
    monitor = HealthMonitor(HealthWishes(), ENV, lambda: None, links=tmp_path / "none", asks_gpus=False)
    assert monitor.gpu_memory is None
    assert monitor.report == WELL
    monitor.close()


@pytest.mark.rule("G12")
async def test_new_workers_wait_for_memory_of_the_old_ones_only(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("nvrx.client.health.gpu_memory.SAY_WAITING_AFTER_S", 0.0)
    gpus.gpu(0, processes=[[7, 1 << 30]])
    watched = Watched(gpus)
    await watched.heard.last(Health.HEALTHY)
    await watched.memory.free(1000.0, lambda: True)  # what was there before is none of ours
    gpus.gpu(0, processes=[[7, 1 << 30], [4711, 5 << 30]])
    lines = Lines()
    logger = logging.getLogger("nvrx.node")
    logger.addHandler(lines)
    caplog.set_level(logging.INFO, logger.name)  # not by hand: loggers remember what they were enabled for
    try:
        waiting = asyncio.create_task(watched.memory.free(1000.0, lambda: True))
        await lines.until("waiting for the GPUs' memory: pid 4711 holds 5120 MiB of GPU 0")
        assert not waiting.done()
        gpus.gpu(0, processes=[[7, 1 << 30]])
        await lines.until("the GPUs' memory is free after")
        await waiting
    finally:
        logger.removeHandler(lines)
    watched.close()


@pytest.mark.rule("G12")
async def test_after_the_time_out_they_start_all_the_same(
    gpus: FakeGpus, watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    gpus.gpu(1, processes=[[4711, 5 << 30], [4712, 1 << 20]])
    await watched.memory.free(0.3, lambda: True)
    assert (
        "GPU memory is not free after 0.3 s (--gpu-reclaim-timeout): pid 4711 holds 5120 MiB of GPU 1, "
        "pid 4712 holds 1 MiB of GPU 1; starting workers all the same"
    ) in caplog.text


@pytest.mark.rule("G12", "D2")
async def test_nobody_waits_for_workers_that_are_not_wanted_any_more(gpus: FakeGpus, watched: Watched) -> None:
    gpus.gpu(1, processes=[[4711, 5 << 30]])
    wanted = [True, True, False]
    async with asyncio.timeout(PATIENCE_S):
        await watched.memory.free(1000.0, lambda: wanted.pop(0))


# ---- all together ------------------------------------------------------------------------------------------------


@pytest.mark.rule("G11")
async def test_the_worst_check_is_told_and_nothing_before_all_have_told(tmp_path: Path) -> None:
    wishes = HealthWishes(("true",), 30.0, ("/a", "/b"))
    monitor = HealthMonitor(wishes, ENV, lambda: None, links=tmp_path / "none", asks_gpus=False)
    assert monitor.report is None
    told = {name: health_report(Health.DEGRADED, name, "x") for name in monitor.each}
    monitor._take("health-path /b", told["health-path /b"])
    assert monitor.report == told["health-path /b"], "what is bad is told at once"
    bad = health_report(Health.UNHEALTHY, "health-check", "y")
    monitor._take("health-check", bad)
    assert monitor.report == bad
    monitor._take("health-check", WELL)
    monitor._take("health-path /b", WELL)
    assert monitor.report is None
    monitor._take("health-path /a", WELL)
    assert monitor.report == WELL
    monitor.close()


@pytest.mark.rule("G11")
@pytest.mark.gpu
async def test_a_real_gpu_is_well_and_says_what_holds_it() -> None:
    """Runs where a GPU is: the real NVML, the real structures."""
    if not gpus_may_be_there():
        pytest.skip("no GPU, or no nvidia-ml-py, on this machine")
    heard = Heard()
    memory = GpuMemory(lambda line: watching.ask(line))
    program = Program("gpu", "watch_gpus", ("1",), 1.0, Health.DEGRADED, 120.0)
    watching = Watching(program, dict(os.environ), heard, memory.hear)
    task = asyncio.create_task(watching.keep_up())
    await heard.until(lambda: bool(heard.reports))
    assert heard.reports[-1] == WELL
    assert await memory.holders() == ()
    task.cancel()
    watching.close()
