"""What runs show of themselves on the lasting store: the current cycle, rank maps, failures (rule I3).

Level-triggered: whatever changed, and whatever the store has lost, what should be there is compared with what was
written, and the difference is written. Follows runs, a moment behind; decides nothing and holds nobody up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from nvrx.core.facts import Cause
from nvrx.core.ids import CycleNumber, RunId
from nvrx.core.run import Cycle, Run
from nvrx.store.client import StoreClient, StoreGone
from nvrx.store.opcodes import MAX_VALUE_BYTES
from nvrx.wire import views
from nvrx.wire.text import to_json

from .lasting import Lasting

log = logging.getLogger("nvrx.coord")

KEPT_CYCLES = 16
"""Of each run, the latest; the journal has all."""
SETTLE_S_PER_NODE = 0.00025
"""How long a new cycle is left alone before its map is made: that takes processor time in proportion to its nodes, at
the very moment at which all of them are told to start."""
OUTCOMES_FACTOR = 10
"""How workers of an ended cycle ended trickles in: its map is written again this many times more patiently."""
RETRY_S = 0.25
MAX_RETRY_S = 30.0
_NEVER = "nvrx/./never"
"""A key that nobody sets: no run can be called `.`. Waiting for it tells when the store is gone."""
_NO_FAILURE = (Cause.SUCCEEDED, Cause.STOPPED)


class HasRun(Protocol):
    """A run as the engine hosts it."""

    @property
    def run(self) -> Run: ...


@dataclass
class _Shown:
    """A run and what the store shows of it. Times are on the loop's clock, None while there is nothing to do."""

    run: Run
    urgent_at: float | None = None
    """When to write what somebody may wait for."""
    all_at: float | None = None
    """When to write everything that differs."""
    current: CycleNumber | None = None
    maps: dict[CycleNumber, Cycle] = field(default_factory=dict)
    failures: dict[CycleNumber, Cycle] = field(default_factory=dict)
    too_large: set[CycleNumber] = field(default_factory=set)

    @property
    def cycles(self) -> tuple[Cycle, ...]:
        """Those that are kept on the store, in order."""
        return self.run.cycles[-KEPT_CYCLES:]

    def is_urgent(self) -> bool:
        """Whether somebody may wait for what is missing: the current cycle's map, or a failure."""
        cycle = self.run.cycle
        return (cycle is not None and cycle.number not in self.maps) or any(
            _has_failed(one) and one.number not in self.failures for one in self.run.cycles[-2:]
        )

    @property
    def due_at(self) -> float | None:
        return min((one for one in (self.urgent_at, self.all_at) if one is not None), default=None)

    def change(self, now: float, settle_s: float) -> None:
        """The run is another than what was written."""
        if self.all_at is None:
            self.all_at = now + settle_s * OUTCOMES_FACTOR
        if self.urgent_at is None and self.is_urgent():
            self.urgent_at = now + settle_s

    def begin_anew(self) -> None:
        """The store may hold nothing of it. What has yet to settle is let settle."""
        if self.run.cycle is not None:
            self.urgent_at = self.urgent_at or 0.0
            self.all_at = self.all_at or 0.0
        self.current = None
        self.maps.clear()
        self.failures.clear()


def cycle_key(run_id: RunId) -> str:
    """Where the number of a run's current cycle is."""
    return f"nvrx/{run_id}/cycle"


def rank_map_key(run_id: RunId, cycle: CycleNumber) -> str:
    """Where a cycle's rank map is."""
    return f"nvrx/{run_id}/cycles/{cycle}/rank_map"


def failure_key(run_id: RunId, cycle: CycleNumber) -> str:
    """Where the failure that ended a cycle is."""
    return f"nvrx/{run_id}/cycles/{cycle}/failure"


class Mirror:
    """Shows all runs on a lasting store."""

    def __init__(
        self,
        lasting: Lasting,
        *,
        settle_s_per_node: float = SETTLE_S_PER_NODE,
        retry_s: float = RETRY_S,
    ) -> None:
        self._lasting = lasting
        self._settle_s_per_node = settle_s_per_node
        self._retry_s = retry_s
        self._runs: dict[RunId, _Shown] = {}
        self._there: dict[RunId, set[str]] = {}
        """Keys that the store has of each run, also from a coordinator before this one."""
        self._watching: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self.up_to_date = asyncio.Event()
        """Set while the store is known to show all that it should."""

    def observe(self, hosted: HasRun) -> None:
        """A run's durable state may have changed."""
        run = hosted.run
        shown = self._runs.get(run.run_id)
        if shown is None:
            shown = self._runs[run.run_id] = _Shown(run)
        elif shown.run is run:
            return
        shown.run = run
        if run.cycle is None:
            return
        self.up_to_date.clear()
        shown.change(asyncio.get_running_loop().time(), self._settle_s_per_node * len(run.cycle.seats))
        self._news.set()

    async def keep(self) -> None:
        """Bring the store up to date until cancelled, whatever becomes of it meanwhile."""
        retry_s = self._retry_s
        is_away = False
        while True:
            try:
                async with self._connection() as client, self._told_when_gone():
                    await self._begin(client)
                    while True:
                        await self._bring_up_to_date(client)
                        retry_s, is_away = self._retry_s, False
                        await self._until_due()
            except StoreGone as gone:
                self.up_to_date.clear()
                if not is_away:
                    log.warning("the lasting store is away (%s); what runs show there is written again later", gone)
                is_away = True
            # It may be up and cut us off for want of room: then ever more patiently.
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, MAX_RETRY_S)

    # ---- the store ----------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[StoreClient]:
        client = await self._lasting.connect()
        try:
            yield client
        finally:
            client.close()

    @contextlib.asynccontextmanager
    async def _told_when_gone(self) -> AsyncIterator[None]:
        """Notice the end of the store also while there is nothing to write."""
        async with self._connection() as client:
            watching = self._watching = asyncio.create_task(client.wait([_NEVER]))
            watching.add_done_callback(self._no_longer_watching)
            try:
                yield
            finally:
                watching.cancel()

    def _no_longer_watching(self, watching: asyncio.Task[None]) -> None:
        if not watching.cancelled():
            watching.exception()  # looked at also where nobody asks for the result
        self._news.set()

    async def _begin(self, client: StoreClient) -> None:
        """Take stock of a store that may be empty, or hold what a coordinator before this one wrote."""
        self._there.clear()
        for key in await client.list_keys():
            begin, _, rest = key.partition("/")
            if begin == "nvrx":
                self._there.setdefault(RunId(rest.partition("/")[0]), set()).add(key)
        for shown in self._runs.values():
            shown.begin_anew()

    async def _until_due(self) -> None:
        """Returns once a run has settled. Raises StoreGone."""
        assert self._watching is not None
        while True:
            self._news.clear()
            if self._watching.done():
                self._watching.result()
                raise StoreGone("it says that there is what cannot be")
            due = [one.due_at for one in self._runs.values() if one.due_at is not None]
            wait_s = min(due) - asyncio.get_running_loop().time() if due else None
            if wait_s is not None and wait_s <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._news.wait()

    async def _bring_up_to_date(self, client: StoreClient) -> None:
        now = asyncio.get_running_loop().time()
        for shown in tuple(self._runs.values()):
            if shown.due_at is None or shown.due_at > now:
                continue
            is_all = shown.all_at is not None and shown.all_at <= now
            shown.urgent_at = None
            await self._write_urgent(client, shown)
            if is_all:
                shown.all_at = None
                await self._write_all(client, shown)
        await client.count()  # what is set is not acknowledged: what is answered after it is
        if all(one.due_at is None for one in self._runs.values()):
            self.up_to_date.set()

    async def _write_urgent(self, client: StoreClient, shown: _Shown) -> None:
        """What somebody may wait for: why the last cycle ended, the new one's map, then its number."""
        run, cycles = shown.run, shown.cycles
        for one in cycles:
            if _has_failed(one) and shown.failures.get(one.number) is not one:
                await self._set(client, run, failure_key(run.run_id, one.number), _failure(run, one))
                shown.failures[one.number] = one
        current = cycles[-1]
        if current.number not in shown.maps:
            await self._write_map(client, shown, run, current)
        if shown.current != current.number:
            await self._set(client, run, cycle_key(run.run_id), b"%d" % current.number)
            shown.current = current.number

    async def _write_all(self, client: StoreClient, shown: _Shown) -> None:
        """What has changed since in maps that are there, latest first; what is no longer shown goes."""
        run, cycles = shown.run, shown.cycles
        for one in reversed(cycles):
            if shown.is_urgent():
                return  # a newer cycle has come: its turn is first, and this is due again
            await self._write_map(client, shown, run, one)
        await self._delete_others(client, shown, run, cycles)

    async def _write_map(self, client: StoreClient, shown: _Shown, run: Run, cycle: Cycle) -> None:
        if shown.maps.get(cycle.number) is cycle:
            return
        value = await asyncio.to_thread(_rank_map, run, cycle)
        if len(value) <= MAX_VALUE_BYTES:
            await self._set(client, run, rank_map_key(run.run_id, cycle.number), value)
            shown.too_large.discard(cycle.number)
        elif cycle.number not in shown.too_large:
            shown.too_large.add(cycle.number)
            log.warning(
                "run %s: the rank map of cycle %d is not on the lasting store: it has %d bytes, a value at most %d",
                run.run_id,
                cycle.number,
                len(value),
                MAX_VALUE_BYTES,
            )
        shown.maps[cycle.number] = cycle

    async def _delete_others(self, client: StoreClient, shown: _Shown, run: Run, cycles: Iterable[Cycle]) -> None:
        """Delete what is no longer shown, be it from an earlier life of the coordinator."""
        numbers = {one.number for one in cycles}
        shown.maps = {number: one for number, one in shown.maps.items() if number in numbers}
        shown.failures = {number: one for number, one in shown.failures.items() if number in numbers}
        shown.too_large &= numbers
        wanted = {cycle_key(run.run_id)}
        wanted.update(rank_map_key(run.run_id, number) for number in shown.maps.keys() - shown.too_large)
        wanted.update(failure_key(run.run_id, number) for number in shown.failures)
        there = self._there.setdefault(run.run_id, set())
        for key in sorted(there - wanted):
            await client.delete(key)
            there.discard(key)

    async def _set(self, client: StoreClient, run: Run, key: str, value: bytes) -> None:
        await client.set(key, value)
        self._there.setdefault(run.run_id, set()).add(key)


def _has_failed(cycle: Cycle) -> bool:
    return cycle.failure is not None and cycle.failure.cause not in _NO_FAILURE


def _rank_map(run: Run, cycle: Cycle) -> bytes:
    text = to_json(views.whole_rank_map(run, cycle))
    if len(text) > MAX_VALUE_BYTES:
        text = json.dumps(json.loads(text), separators=(",", ":"))  # a third less
    return text.encode()


def _failure(run: Run, cycle: Cycle) -> bytes:
    return to_json(views.rank_map(run, cycle).failure).encode()
