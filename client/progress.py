"""How far training came, read from the file in which a checkpointing program keeps its latest iteration (rule D6).

Megatron's `latest_checkpointed_iteration.txt` is such a file. Knows no protocol; never holds up who asks.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

log = logging.getLogger("nvrx.node")

READ_EVERY_S = 5.0
MAX_BYTES = 64
"""A number, not a checkpoint: a wrong path must not be read whole."""


def read_iteration(path: Path) -> int | None:
    """The iteration in a file: 0 where there is none yet, None where it is no number (`release`, or half written)."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES).strip()
    except FileNotFoundError:
        return 0
    except OSError as error:
        log.warning("cannot read the iteration file %s: %s", path, error.strerror)
        return None
    return int(text) if text.isdigit() else None


class CheckpointProgress:
    """The latest iteration in a file, read again and again beside the agent: a file system may take its time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._wanted = asyncio.Event()
        self.step: int | None = None

    def look(self) -> None:
        """Workers ended: what they wrote last counts."""
        self._wanted.set()

    async def keep_up(self) -> None:
        """Read for ever."""
        while True:
            found = await asyncio.get_running_loop().run_in_executor(None, read_iteration, self._path)
            self.step = self.step if found is None else max(found, self.step or 0)
            try:
                async with asyncio.timeout(READ_EVERY_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
