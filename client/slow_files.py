"""Touching files whose file system may hang, from an event loop that must go on: in a thread that is left behind then.

A daemon thread, not the loop's own pool: nobody waits for it, also not at the end of the process. Must not know what
is read or written.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable


class Aside:
    """Does one thing after the other aside; while one is stuck, the next are not done."""

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._last: threading.Thread | None = None

    def do(self, act: Callable[[], None]) -> bool:
        """Whether it was done in time; the caller waits for so long, and only once for one that is stuck."""
        if self._last is not None and self._last.is_alive():
            return False
        self._last = threading.Thread(target=act, name="file", daemon=True)
        self._last.start()
        self._last.join(self._within_s)
        return not self._last.is_alive()


async def done_within(within_s: float, act: Callable[[], None]) -> bool:
    """The same for what may take longer: the event loop goes on meanwhile. `act` raises nothing."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        act()
        with contextlib.suppress(RuntimeError):  # the loop is closed by now
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="file", daemon=True).start()
    try:
        async with asyncio.timeout(within_s):
            await done.wait()
    except TimeoutError:
        return False
    return True
