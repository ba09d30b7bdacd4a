"""The rank maps that a node keeps beside its logs (rule H3): of each cycle it works in, as chosen and as failed.

Never on the critical path: workers stop and start without waiting for a map.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from nvrx.core.ids import CycleNumber, RunId
from nvrx.core.ranks import Desired
from nvrx.core.refused import Refused
from nvrx.v1 import common_pb2
from nvrx.wire.text import to_json

from .coordinator import Coordinator, OutOfReach
from .worker_files import WorkerFiles, write_whole

log = logging.getLogger("nvrx.node")


@dataclass(frozen=True)
class Wanted:
    """A map to have: of a cycle as it was chosen, or as it had failed by the time of a later one.

    Why a cycle failed may be put right while the next is formed or starts, as when a lost node made others fail.
    """

    cycle: CycleNumber
    failed: bool
    by: CycleNumber | None = None


class KeptMaps:
    """The maps of one run on this node."""

    def __init__(self, coordinator: Coordinator, run_id: RunId, files: WorkerFiles) -> None:
        self._coordinator = coordinator
        self._run_id = run_id
        self._files = files
        self._kept: set[Wanted] = set()

    def keep_sent(self, message: common_pb2.RankMap) -> None:
        """Keep the assigned cycle's map, which came by itself; once, also when it comes again."""
        wanted = Wanted(CycleNumber(message.cycle), failed=False)
        if wanted not in self._kept:
            self._kept.add(wanted)
            self._write(wanted, message)

    def missing(self, desired: Desired) -> list[Wanted]:
        """What has to be fetched, now marked as under way: a failed map, or one too large to come by itself."""
        maps = []
        if desired.assignment is not None and desired.assignment.fetch_rank_map:
            maps.append(Wanted(desired.assignment.cycle, failed=False))
        failed = desired.failed_cycle
        if failed is not None:
            maps.append(Wanted(failed, failed=True, by=desired.cycle))
            before = CycleNumber(failed - 1)
            if any(one.failed and one.cycle == before for one in self._kept):
                maps.append(Wanted(before, failed=True, by=desired.cycle))
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
            self._write(one, message)

    def _write(self, wanted: Wanted, message: common_pb2.RankMap) -> None:
        files = self._files
        try:
            path = files.failed_rank_map(wanted.cycle) if wanted.failed else files.rank_map(wanted.cycle)
            write_whole(path, to_json(message))
        except OSError as error:
            log.warning("cannot keep the rank map of cycle %d: %s", wanted.cycle, error)
            return
        if wanted.failed:
            log.info("rank map of failed cycle %d in %s", wanted.cycle, path)
