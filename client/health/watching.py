"""A check that another program makes all the time, and the agent only listens to: what hangs there hangs alone."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvrx.core.presence import WELL, Health, HealthReport, health_report

from .child import Child
from .rounds import NOTHING_TO_WATCH

log = logging.getLogger("nvrx.node")

ANSWERS_WITHIN_S = 10.0
STARTS_AGAIN_AFTER_S = 30.0
MAX_LINE_BYTES = 64 * 1024


@dataclass(frozen=True)
class Program:
    """One of our `watch_...` programs. It says something at least every `every_s`; the first time within `first_s`.

    `when_silent`: what it means for the node when it says nothing.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    every_s: float
    when_silent: Health
    first_s: float = 0.0

    @property
    def argv(self) -> Sequence[str]:
        return (sys.executable, "-m", f"nvrx.client.health.{self.module}", *self.arguments)

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """The path that finds our modules and pynvml here finds them there."""
        return {**env, "PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}


class Watching:
    """Keeps one program running. `on_report` hears each report; `on_line` what else the program says."""

    def __init__(
        self,
        program: Program,
        env: Mapping[str, str],
        on_report: Callable[[HealthReport], None],
        on_line: Callable[[Mapping[str, Any]], None] = lambda _: None,
        answers_within_s: float = ANSWERS_WITHIN_S,
    ) -> None:
        self.program = program
        self._env = env
        self._on_report = on_report
        self._on_line = on_line
        self._answers_within_s = answers_within_s
        self._child: Child | None = None
        self._buffer = b""
        self._last_words = ""
        self._heard = asyncio.Event()

    async def keep_up(self) -> None:
        """Watch for ever; returns where there is nothing of the kind on this host."""
        while True:
            code = await self._once()
            if code == NOTHING_TO_WATCH:
                self._on_report(WELL)
                return
            log.warning("the watch of %s ended (exit code %d): %s", self.program.name, code, self._last_words or "-")
            self._tell(Health.DEGRADED, f"the watch of it ended (exit code {code}): {self._last_words or 'no words'}")
            await asyncio.sleep(STARTS_AGAIN_AFTER_S)

    def ask(self, line: str) -> None:
        if self._child is not None:
            self._child.tell(line)

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()

    async def _once(self) -> int:
        self._buffer, self._last_words = b"", ""
        self._heard.clear()
        program = self.program
        try:
            child = Child(program.argv, program.environment(self._env), self._hear, is_ours=True)
        except OSError as error:
            self._last_words = error.strerror or repr(error)
            return -1
        self._child = child
        patience_s, is_first = max(program.first_s, self._answers_within_s), True
        while not child.ended.done():
            await self._hear_or_end(child, patience_s)
            if self._heard.is_set():
                self._heard.clear()
                patience_s, is_first = program.every_s + self._answers_within_s, False
            elif not child.ended.done():
                # It is left as it is: when it can go on it says so, and a second one would hang in the same place.
                late_s = patience_s if is_first else self._answers_within_s
                self._tell(program.when_silent, f"does not answer for {late_s:g} s")
                await self._hear_or_end(child, None)
        return child.ended.result()

    async def _hear_or_end(self, child: Child, within_s: float | None) -> None:
        hearing = asyncio.ensure_future(self._heard.wait())
        either: list[asyncio.Future[Any]] = [hearing, child.ended]
        try:
            await asyncio.wait(either, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hearing.cancel()

    def _tell(self, state: Health, reason: str) -> None:
        self._on_report(health_report(state, self.program.name, reason))

    def _hear(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self._buffer = self._buffer[-MAX_LINE_BYTES:]
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            told = json.loads(line)
        except ValueError:
            self._last_words = line.decode("utf-8", "replace").strip() or self._last_words
            return
        if not isinstance(told, dict):
            return
        if "state" not in told:
            self._on_line(told)
            return
        self._heard.set()
        state = Health.__members__.get(str(told["state"]), Health.DEGRADED)
        if state is Health.HEALTHY:
            self._on_report(WELL)
        else:
            self._tell(state, str(told.get("reason", "")))
