"""Tools of the tests of warm workers: the same command cold and warm, and what each said."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from nvrx.client.log_link import LogLink
from nvrx.client.supervisor_link import Exited, Gone, Note, Spawned, SupervisorLink, WorkerSpec

from .supervision import PATIENCE_S, ROOT, Bench, events_until

MODULES = ("json", "decimal")


def spec(bench: Bench, argv: Sequence[str], rank: int = 0, env: Mapping[str, str] | None = None) -> WorkerSpec:
    """As an agent would make it: what differs between workers is in the names that do."""
    return WorkerSpec(
        local_rank=rank,
        argv=argv,
        env={**os.environ, "RANK": str(rank), "NVRX_CYCLE": "1", "LINES": str(bench.lines.path), **(env or {})},
        cwd=str(bench.folder),
        stdout_path=str(bench.folder / f"{rank}.out"),
        stderr_path=str(bench.folder / f"{rank}.err"),
    )


def python(bench: Bench, code: str, *arguments: str, name: str = "worker.py", rank: int = 0) -> WorkerSpec:
    """`python worker.py ...`, where worker.py holds the code."""
    (bench.folder / name).write_text(code)
    return spec(bench, [sys.executable, name, *arguments], rank)


def ask(link: SupervisorLink, worker: WorkerSpec, modules: Sequence[str] = MODULES) -> None:
    """For a zygote of this command, told as long before any worker is known."""
    env = {name: value for name, value in worker.env.items() if name not in ("RANK", "NVRX_CYCLE")}
    link.prewarm(modules, worker.argv, env, worker.cwd)


async def note(link: SupervisorLink, pattern: str) -> re.Match[str]:
    """The next note that matches; what comes before it is dropped."""
    seen = []
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                event = await link.events.get()
                seen.append(event)
                if isinstance(event, Note) and (found := re.search(pattern, event.text)):
                    return found
    except TimeoutError as error:
        raise AssertionError(f"no note {pattern!r} among {seen}") from error


async def warm_link(
    bench: Bench, worker: WorkerSpec, modules: Sequence[str] = MODULES, handover_fd: int | None = None
) -> tuple[SupervisorLink, int]:
    """A supervisor with a zygote that is ready, and the zygote's pid."""
    link = await bench.link(handover_fd=handover_fd)
    ask(link, worker, modules)
    return link, int((await note(link, r"ready \(pid (\d+)"))[1])


@dataclass(frozen=True)
class Said:
    """How a worker ended, and what it wrote; what must differ between any two workers is taken out."""

    end: str
    out: str
    err: str


async def run(
    bench: Bench, link: SupervisorLink, worker: WorkerSpec, *, warm: bool, logs: LogLink | None = None
) -> Said:
    spawned = await link.spawn(1, [worker])
    assert [one.warm for one in spawned.workers] == [warm]
    events = await events_until(link, Gone)
    assert [type(one) for one in events if not isinstance(one, Note)] == [Spawned, Exited, Gone]
    [end] = [one for one in events if isinstance(one, Exited)]
    if logs is not None:
        await logs.flush(worker.stdout_path, worker.stderr_path)

    def plain(path: str) -> str:
        with open(path, "rb") as file:
            text = file.read().decode("latin-1")
        os.unlink(path)
        text = text.replace(str(spawned.workers[0].pid), "<worker>").replace(str(link.pid), "<supervisor>")
        text = re.sub(r"pipe:\[\d+\]", "pipe", text)
        return re.sub(r"0x[0-9a-f]+", "0x", re.sub(r"<supervisor>\.\d+", "<supervisor>.<start>", text))

    return Said(end.message, plain(worker.stdout_path), plain(worker.stderr_path))


async def cold_and_warm(bench: Bench, worker: WorkerSpec, modules: Sequence[str] = MODULES) -> tuple[Said, Said]:
    """The same worker under two supervisors, one after the other."""
    link = await bench.link("cold")
    cold = await run(bench, link, worker, warm=False)
    await link.close()
    link, _ = await warm_link(bench, worker, modules)
    return cold, await run(bench, link, worker, warm=True)


async def cold_and_warm_in_pipes(bench: Bench, worker: WorkerSpec) -> tuple[Said, Said]:
    """The same as an agent has it: a log process takes the output."""
    said = []
    for warm in (False, True):
        logs = await LogLink.start()
        if warm:
            link, _ = await warm_link(bench, worker, handover_fd=logs.handover_fd)
        else:
            link = await bench.link("cold", handover_fd=logs.handover_fd)
        logs.supervised(link.hand_outputs_over_again)
        said.append(await run(bench, link, worker, warm=warm, logs=logs))
        await link.close()
        await logs.close()
    return said[0], said[1]


def start_agent(bench: Bench, worker: WorkerSpec, prewarm: Sequence[str]) -> subprocess.Popen[bytes]:
    """An agent of its own, to be killed; it tells what it started once the worker runs."""
    order = {
        "runtime_dir": str(bench.folder / "runtime"),
        "key": "key",
        "workers": [asdict(worker)],
        "leak_descriptors": False,
        "prewarm": prewarm,
    }
    argv = [sys.executable, "-m", "tests.client.supervised_agent", json.dumps(order)]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE)
