"""Where torch's agent and this node's membership meet: two threads and what lies between them, under one lock.

torch's agent is synchronous and takes a place when it is ready for one; the membership (`torchrun_agent`) offers
places, withdraws them and ends. Knows neither torch nor the wire.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from nvrx.core.endpoint import HostPort
from nvrx.core.facts import WorkerExit
from nvrx.core.ids import CycleNumber
from nvrx.core.ranks import Assignment


@dataclass(frozen=True)
class Given:
    """A place in a cycle's world, and what its workers need there."""

    assignment: Assignment
    store: HostPort
    hosts_store: bool
    """This node is to serve the cycle's store: the coordinator hosts none, and this is the world's first node."""
    environment: Mapping[str, str]
    """Our variables for the workers; those of ours that are not named are unset."""


@dataclass(frozen=True)
class Ended:
    """Nothing more comes: the exit code that nvrx-node would have, and why in one line."""

    exit_code: int
    reason: str


@dataclass(frozen=True)
class Parting:
    """Why torch's agent ends, and how its workers did, as far as it says so itself."""

    reason: str
    succeeded: bool = False
    exits: tuple[WorkerExit, ...] = ()


class Seat:
    """The place that this node has, or waits for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._offered: Given | None = None
        self._is_unwanted = False
        self._ended: Ended | None = None

    # ---- the membership's side ----------------------------------------------------------------------------

    def offer(self, given: Given) -> None:
        with self._changed:
            self._offered, self._is_unwanted = given, False
            self._changed.notify_all()

    def withdraw(self) -> bool:
        """Take the offered place back; False where torch's agent has it already."""
        with self._changed:
            was_offered, self._offered = self._offered is not None, None
            return was_offered

    def unseat(self) -> None:
        """The workers that torch's agent runs, or is about to start, have to go."""
        with self._changed:
            self._is_unwanted = True

    def end(self, ended: Ended) -> None:
        with self._changed:
            if self._ended is None:
                self._ended = ended
            self._is_unwanted = True
            self._changed.notify_all()

    @property
    def offered_cycle(self) -> CycleNumber | None:
        """The cycle of a place that waits to be taken."""
        offered = self._offered
        return offered.assignment.cycle if offered is not None else None

    # ---- torch's side -------------------------------------------------------------------------------------

    def take(self) -> Given | None:
        """Wait for a place, for as long as it takes; None at the end. A signal's handler may end it by raising."""
        with self._changed:
            while self._offered is None and self._ended is None:
                self._changed.wait()
            given, self._offered = self._offered, None
            return given if self._ended is None else None

    @property
    def is_unwanted(self) -> bool:
        """Whether torch's agent is to stop its workers and ask for the next place."""
        return self._is_unwanted

    @property
    def ended(self) -> Ended | None:
        return self._ended
