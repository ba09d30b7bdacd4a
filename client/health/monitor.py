"""All health checks of a node together: what is told is the worst of them, as soon as it changes (rule G11)."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvrx.core.presence import WELL, Health, HealthReport

from . import command
from .command import CommandCheck
from .gpu_memory import GpuMemory
from .watching import Program, Watching

log = logging.getLogger("nvrx.node")

DEFAULT_INTERVAL_S = 30.0
LOOK_AT_GPUS_EVERY_S = 10.0
LOOK_AT_LINKS_EVERY_S = 5.0
GPUS_ANSWER_FIRST_WITHIN_S = 120.0
"""A driver that is not kept loaded takes long to wake up eight GPUs."""
LINKS = Path("/sys/class/infiniband")
DEVICES = Path("/dev")
SECRETS = "NVRX_TOKEN"
"""Variables whose names begin so reach no check."""
_WORST_FIRST = (Health.UNHEALTHY, Health.DEGRADED)


@dataclass(frozen=True)
class HealthWishes:
    """What is to be checked, as given on the command line."""

    command: tuple[str, ...] = ()
    interval_s: float = DEFAULT_INTERVAL_S
    paths: tuple[str, ...] = ()


def gpus_may_be_there(devices: Path = DEVICES) -> bool:
    """Whether it is worth while to ask NVML: without a driver there is nothing to start a process for."""
    has_driver = any((devices / name).exists() for name in ("nvidiactl", "dxg"))
    return has_driver and importlib.util.find_spec("pynvml") is not None


class HealthMonitor:
    """Runs the checks. `on_change` is called when `report` is another than before.

    Checks of this machine's own parts come first: of two that fail, the one is told that others cannot share.
    """

    def __init__(
        self,
        wishes: HealthWishes,
        env: Mapping[str, str],
        on_change: Callable[[], None],
        *,
        links: Path = LINKS,
        asks_gpus: bool | None = None,
    ) -> None:
        env = {name: value for name, value in env.items() if not name.startswith(SECRETS)}
        self._on_change = on_change
        self._told: dict[str, HealthReport | None] = {}
        self.all_told = asyncio.Event()
        """Set once each check has said something."""
        self._work: list[Coroutine[Any, Any, None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: list[Callable[[], None]] = []
        self.gpu_memory: GpuMemory | None = None
        every_s = wishes.interval_s
        if gpus_may_be_there() if asks_gpus is None else asks_gpus:
            self._watch_gpus(env)
        if links.is_dir():
            arguments = (str(links), str(LOOK_AT_LINKS_EVERY_S))
            self._watch(Program("infiniband", "watch_links", arguments, LOOK_AT_LINKS_EVERY_S, Health.DEGRADED), env)
        if wishes.command:
            check = CommandCheck(wishes.command, env, every_s)
            self._told[command.NAME] = None
            self._work.append(self._repeat(check, every_s))
            self._closing.append(check.close)
        for path in wishes.paths:
            arguments = (path, str(every_s))
            self._watch(Program(f"health-path {path}", "watch_path", arguments, every_s, Health.UNHEALTHY), env)
        if not self._told:
            self.all_told.set()

    def _watch(self, program: Program, env: Mapping[str, str]) -> None:
        self._told[program.name] = None
        watching = Watching(program, env, lambda report: self._take(program.name, report))
        self._work.append(watching.keep_up())
        self._closing.append(watching.close)

    def _watch_gpus(self, env: Mapping[str, str]) -> None:
        program = Program(
            "gpu",
            "watch_gpus",
            (str(LOOK_AT_GPUS_EVERY_S),),
            LOOK_AT_GPUS_EVERY_S,
            Health.DEGRADED,
            GPUS_ANSWER_FIRST_WITHIN_S,
        )
        self._told[program.name] = None
        self.gpu_memory = memory = GpuMemory(lambda line: watching.ask(line))
        watching = Watching(program, env, lambda report: self._take(program.name, report), memory.hear)
        self._work.append(watching.keep_up())
        self._closing.append(watching.close)

    @property
    def report(self) -> HealthReport | None:
        """The worst that any check says; None while nothing bad is known and not all have told."""
        known = [one for one in self._told.values() if one is not None]
        for state in _WORST_FIRST:
            worst = next((one for one in known if one.state is state), None)
            if worst is not None:
                return worst
        return WELL if len(known) == len(self._told) else None

    @property
    def each(self) -> Mapping[str, HealthReport | None]:
        """What each check says; None: nothing yet."""
        return self._told

    def start(self, on_done: Callable[[asyncio.Task[None]], None]) -> None:
        """Begin; `on_done` is called with each task that ends."""
        for work in self._work:
            task = asyncio.create_task(work, name="health")
            task.add_done_callback(on_done)
            self._tasks.append(task)
        self._work = []

    def close(self) -> None:
        """End it; a program that the kernel holds is left to it."""
        for task in self._tasks:
            task.cancel()
        for work in self._work:
            work.close()
        for close in self._closing:
            close()

    async def _repeat(self, check: CommandCheck, every_s: float) -> None:
        while True:
            self._take(command.NAME, await check.look())
            await asyncio.sleep(every_s)

    def _take(self, name: str, report: HealthReport) -> None:
        before, was = self.report, self._told[name]
        self._told[name] = report
        if was != report and (was is not None or report.state is not Health.HEALTHY):
            level = logging.INFO if report.state is Health.HEALTHY else logging.WARNING
            log.log(level, "health: %s is %s", name, _described(report))
        if None not in self._told.values():
            self.all_told.set()
        if self.report != before:
            self._on_change()


def _described(report: HealthReport) -> str:
    words = {Health.HEALTHY: "well", Health.DEGRADED: "degraded", Health.UNHEALTHY: "failed"}[report.state]
    return f"{words}: {report.reason}" if report.reason else words
