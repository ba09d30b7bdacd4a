"""`--once`: a coordinator ends with its runs, once whoever has to learn of their outcome has (rules D8, D9, A5).

Notes whom a closed run still has to tell. Decides nothing, and knows no file and no port.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nvrx.core.ids import Incarnation, NodeId, RunId
from nvrx.core.presence import Presence
from nvrx.core.run import Run

ASKS_AGAIN_WITHIN_S = 5.0
"""A node that waits for a place in a full run, or for its own, asks about every two seconds."""
MAX_TURNED_AWAY = 4096


@dataclass
class Partings:
    """Who knows that a run is closed, and who asked in vain to join it and asks again. Times are the run's clock."""

    told: set[Incarnation] = field(default_factory=set)
    turned_away: dict[NodeId, float] = field(default_factory=dict)

    def turn_away(self, node_id: NodeId, now: float) -> None:
        """It may have a place later. Of very many such nodes the latest are kept."""
        self.turned_away.pop(node_id, None)
        self.turned_away[node_id] = now
        if len(self.turned_away) > MAX_TURNED_AWAY:
            del self.turned_away[next(iter(self.turned_away))]

    def awaited_until(self, run: Run, presence: Presence) -> float | None:
        """Until when somebody may still ask how a closed run ended; None: nobody."""
        times = [
            node.lease_until
            for one in run.live_members()
            if one.info.incarnation not in self.told and (node := presence.nodes.get(one.info.node_id)) is not None
        ]
        times += [at + ASKS_AGAIN_WITHIN_S for at in self.turned_away.values()]
        return max(times, default=None)


@dataclass
class Leaving:
    """One run, as `--once` sees it."""

    run: Run
    presence: Presence
    partings: Partings
    now: Callable[[], float]

    @property
    def waits_s(self) -> float:
        """For how much longer at most somebody has to be waited for; 0 or less: nobody."""
        until = self.partings.awaited_until(self.run, self.presence)
        return 0.0 if until is None else until - self.now()


async def all_over(
    runs: Callable[[], Mapping[RunId, Leaving]], declared: RunId | None, changed: asyncio.Event, most_s: float
) -> None:
    """Returns when every run is closed, the declared one among them, and nobody has to be waited for any more.

    `changed` is set whenever a run closes or somebody has learned of it. A node that goes on talking to a closed run
    is borne for `most_s`.
    """
    loop = asyncio.get_running_loop()
    closed_at: float | None = None
    while True:
        changed.clear()
        there = runs()
        is_closed = bool(there) and not any(one.run.is_open for one in there.values())
        if not is_closed or (declared is not None and declared not in there):
            closed_at = None
            await changed.wait()
            continue
        closed_at = loop.time() if closed_at is None else closed_at
        waits_s = min(max(one.waits_s for one in there.values()), closed_at + most_s - loop.time())
        if waits_s <= 0:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(waits_s):
                await changed.wait()
