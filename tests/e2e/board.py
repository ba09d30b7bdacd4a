"""One place where everything that a test waits for is announced. Knows nothing of what is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 30.0
"""Far beyond what anything takes on a busy machine: a wait that reaches it has failed."""
_LOOK_AGAIN_S = 0.1
"""For what nobody announces, such as an answer of the coordinator."""

T = TypeVar("T")


class Board:
    """Threads that see something change call `announce`; tests wait with `until`."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self._describers: list[Callable[[], str]] = []

    def describe_with(self, describer: Callable[[], str]) -> None:
        """Add to what is said when a wait fails."""
        self._describers.append(describer)

    def announce(self) -> None:
        with self.condition:
            self.condition.notify_all()

    def until(self, found: Callable[[], T | None], what: str, timeout_s: float = PATIENCE_S) -> T:
        """The first answer of `found` that is neither None nor False; fails with everything known at the deadline."""
        deadline = time.monotonic() + timeout_s
        with self.condition:
            while True:
                answer = found()
                if answer is not None and answer is not False:
                    return answer
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                self.condition.wait(min(left_s, _LOOK_AGAIN_S))
        raise AssertionError(f"waited {timeout_s:g} s for {what}\n{self.state()}")

    def state(self) -> str:
        return "\n".join(one() for one in self._describers)
