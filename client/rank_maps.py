"""The rank maps that a node keeps on disk (rules H3, H5): of each cycle it works in, as chosen and as it ended.

Never on the critical path: workers stop and start without waiting for a map, and a slow disk holds up a thread alone.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from dataclasses import dataclass
from pathlib import Path

from nvrx.core.ids import CycleNumber, RunId
from nvrx.core.ranks import Desired
from nvrx.core.refused import Refused
from nvrx.v1 import common_pb2
from nvrx.wire.text import to_json

from .coordinator import Coordinator, OutOfReach
from .cycle_info import CycleInfo
from .worker_files import WorkerFiles, write_whole

log = logging.getLogger("nvrx.node")


class Moment(enum.Enum):
    """When in a cycle's life its map is of."""

    CHOSEN = enum.auto()
    ENDED = enum.auto()
    FAILED = enum.auto()


@dataclass(frozen=True)
class Wanted:
    """A map to have: of a cycle as it was chosen, or as it had ended by the time of a later one.

    Why a cycle failed may be put right while the next is formed or starts, as when a lost node made others fail.
    """

    cycle: CycleNumber
    moment: Moment
    by: CycleNumber | None = None


class KeptMaps:
    """The maps of one run on this node. `info` is kept up as well; None where nobody asked for it."""

    def __init__(self, coordinator: Coordinator, run_id: RunId, files: WorkerFiles, info: CycleInfo | None) -> None:
        self._coordinator = coordinator
        self._run_id = run_id
        self._files = files
        self._info = info
        self._kept: set[Wanted] = set()
        self._working_in: CycleNumber | None = None
        self._ended: list[CycleNumber] = []

    def is_news(self, sent: common_pb2.RankMap) -> bool:
        """Whether the assigned cycle's map, which came by itself, is to be kept: once, also when it comes again."""
        wanted = Wanted(CycleNumber(sent.cycle), Moment.CHOSEN)
        is_news = wanted not in self._kept
        self._kept.add(wanted)
        return is_news

    async def keep_sent(self, sent: common_pb2.RankMap) -> None:
        """Keep the assigned cycle's map, which came by itself."""
        await self._write(Wanted(CycleNumber(sent.cycle), Moment.CHOSEN), sent)

    def heed(self, desired: Desired) -> None:
        """Take in what the node is to do: the cycle that it worked in until now has ended."""
        before = self._working_in
        self._working_in = desired.assignment.cycle if desired.assignment is not None else None
        if before is not None and before != self._working_in:
            self._ended.append(before)

    def missing(self, desired: Desired) -> list[Wanted]:
        """What has to be fetched, now marked as under way: an ended map, or one too large to come by itself."""
        maps = []
        if desired.assignment is not None and desired.assignment.fetch_rank_map:
            maps.append(Wanted(desired.assignment.cycle, Moment.CHOSEN))
        if self._info is not None:
            maps += [Wanted(one, Moment.ENDED) for one in self._ended if one != desired.failed_cycle]
        self._ended.clear()
        failed = desired.failed_cycle
        if failed is not None:
            maps.append(Wanted(failed, Moment.FAILED, by=desired.cycle))
            before = CycleNumber(failed - 1)
            if any(one.moment is Moment.FAILED and one.cycle == before for one in self._kept):
                maps.append(Wanted(before, Moment.FAILED, by=desired.cycle))
        missing = [one for one in maps if one not in self._kept]
        self._kept.update(missing)
        return missing

    async def fetch(self, missing: list[Wanted]) -> None:
        """Read maps from the coordinator and keep them; one that cannot be read may be asked for again."""
        for one in missing:
            try:
                message = await self._coordinator.rank_map(self._run_id, one.cycle)
            except (OutOfReach, Refused) as error:
                log.warning("no rank map of cycle %d: %s", one.cycle, error)
                self._kept.discard(one)
                continue
            await self._write(one, message)

    async def _write(self, wanted: Wanted, message: common_pb2.RankMap) -> None:
        try:
            path = await asyncio.to_thread(self._write_files, wanted, message)
        except OSError as error:
            log.warning("cannot keep the rank map of cycle %d: %s", wanted.cycle, error)
            return
        if path is not None:
            log.info("rank map of failed cycle %d in %s", wanted.cycle, path)

    def _write_files(self, wanted: Wanted, message: common_pb2.RankMap) -> Path | None:
        """Where a failed cycle's map is now. Raises OSError."""
        text = to_json(message)
        failed = self._files.failed_rank_map(wanted.cycle) if wanted.moment is Moment.FAILED else None
        if wanted.moment is Moment.CHOSEN:
            write_whole(self._files.rank_map(wanted.cycle), text)
        if failed is not None:
            write_whole(failed, text)
        if self._info is not None:
            self._info.keep(wanted.cycle, text, has_ended=wanted.moment is not Moment.CHOSEN)
        return failed
