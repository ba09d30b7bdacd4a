"""A run as the coordinator hosts it, and who listens to it: open streams of nodes, and watches. Decides nothing."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from nvrx.core.ids import CycleNumber, Incarnation, NodeId, Revision, RunId
from nvrx.core.presence import Presence
from nvrx.core.ranks import Desired
from nvrx.core.run import Run

from .journals import Row
from .partings import Partings

MAX_WATCHED = 4096


@dataclass(frozen=True)
class Said:
    """What a node was told last: its desired state, and how many of its words had been heard."""

    desired: Desired
    heard: int


class Session:
    """An open heartbeat stream of one incarnation; `news` is set when there may be something to tell it."""

    def __init__(self, run_id: RunId, node_id: NodeId, incarnation: Incarnation, sequence: int) -> None:
        self.run_id = run_id
        self.node_id = node_id
        self.incarnation = incarnation
        self.sequence = sequence
        """The number of its first request: numbers rise over all streams of an incarnation."""
        self.news = asyncio.Event()
        self.news.set()
        self.acknowledged = 0
        self.heard = 0
        self.is_superseded = False
        self.map_sent_of: CycleNumber | None = None
        self.said: Said | None = None


class Watch:
    """A bounded queue of a run's new rows, None at the end; `overflowed` once the watcher was too slow."""

    def __init__(self, after: Revision) -> None:
        self.after = after
        self.rows: asyncio.Queue[Row | None] = asyncio.Queue(MAX_WATCHED)
        self.overflowed = False

    def put(self, row: Row | None) -> None:
        try:
            self.rows.put_nowait(row)
        except asyncio.QueueFull:
            self.overflowed = True


@dataclass
class Hosted:
    """A run as the coordinator hosts it. `run` and `revision` are what is durable."""

    run: Run
    presence: Presence
    clock_origin: float
    revision: Revision = Revision(0)
    sessions: dict[NodeId, Session] = field(default_factory=dict)
    watches: set[Watch] = field(default_factory=set)
    waiting: str = ""
    partings: Partings = field(default_factory=Partings)
