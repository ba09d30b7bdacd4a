"""Whether the memory of this node's GPUs is free for new workers (rule G12): asked of the watch of the GPUs.

Whatever held it before this agent's first workers is none of ours, and is not waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .watch_gpus import HOLDERS

log = logging.getLogger("nvrx.node")

DEFAULT_RECLAIM_TIMEOUT_S = 30.0
ANSWERS_WITHIN_S = 5.0
ASK_EVERY_S = 0.1
SAY_WAITING_AFTER_S = 1.0
MAX_NAMED = 8


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of a GPU."""

    gpu: int
    pid: int
    mib: int

    def __str__(self) -> str:
        return f"pid {self.pid} holds {self.mib} MiB of GPU {self.gpu}"


class GpuMemory:
    """`ask` sends a line to the watch of the GPUs; what it answers comes to `hear`."""

    def __init__(self, ask: Callable[[str], None]) -> None:
        self._ask = ask
        self._answer: asyncio.Future[tuple[Holder, ...]] | None = None
        self._of_others: frozenset[int] | None = None

    def hear(self, told: Mapping[str, Any]) -> None:
        """A line of the watch's: who holds memory now."""
        rows = told.get("holders")
        if not isinstance(rows, list):
            return
        found = tuple(Holder(int(one["gpu"]), int(one["pid"]), int(one["mib"])) for one in rows)
        if self._of_others is None:
            self._of_others = frozenset(one.pid for one in found)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(found)

    async def holders(self, within_s: float = ANSWERS_WITHIN_S) -> tuple[Holder, ...] | None:
        """Who holds memory that did not before our first workers; None where the watch gives no answer."""
        if self._of_others is None:
            return None  # the watch has not begun, or there is no GPU
        self._answer = asyncio.get_running_loop().create_future()
        self._ask(HOLDERS)
        try:
            async with asyncio.timeout(within_s):
                found = await self._answer
        except TimeoutError:
            log.warning("NVML did not say within %g s what holds the GPUs' memory; not waiting for it", within_s)
            return None
        return tuple(one for one in found if one.pid not in self._of_others)

    async def free(self, within_s: float, is_wanted: Callable[[], bool]) -> None:
        """Returns when the memory is free, or after `within_s` with a warning, or once nobody wants it any more."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        has_said = False
        while is_wanted():
            holding = await self.holders(min(within_s, ANSWERS_WITHIN_S)) if within_s > 0 else ()
            waited_s = loop.time() - began_s
            if not holding:
                if has_said:
                    log.info("the GPUs' memory is free after %.1f s", waited_s)
                return
            if waited_s >= within_s:
                log.warning(
                    "GPU memory is not free after %g s (--gpu-reclaim-timeout): %s; starting workers all the same",
                    within_s,
                    describe(holding),
                )
                return
            if waited_s >= SAY_WAITING_AFTER_S and not has_said:
                has_said = True
                log.info("waiting for the GPUs' memory: %s", describe(holding))
            await asyncio.sleep(ASK_EVERY_S)


def describe(holding: tuple[Holder, ...]) -> str:
    """Who holds what, in a line."""
    more = f" and {len(holding) - MAX_NAMED} more" if len(holding) > MAX_NAMED else ""
    return ", ".join(map(str, holding[:MAX_NAMED])) + more
