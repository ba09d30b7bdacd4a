"""The watch around the pure one: words of real sockets, this machine's clock, one timer."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from nvrx.client import hang_watch
from nvrx.client.hang_watch import HangWatch
from nvrx.core.hang import Hung
from nvrx.core.ids import CycleNumber, LocalRank
from nvrx.worker import HAS_STEP, HEAD, MAGIC

C4 = CycleNumber(4)
RANKS = [LocalRank(0), LocalRank(1)]


class Bed:
    """A watch, and who it found hung."""

    def __init__(self, directory: Path, hang_timeout_s: float | None, start_timeout_s: float | None = None) -> None:
        self.found: asyncio.Queue[tuple[CycleNumber, tuple[Hung, ...]]] = asyncio.Queue()
        self.watch = HangWatch(hang_timeout_s, start_timeout_s, directory, self._on_hung)

    def _on_hung(self, cycle: CycleNumber, hung: tuple[Hung, ...]) -> None:
        self.found.put_nowait((cycle, hung))
        self.watch.stop()

    async def ranks_found(self) -> list[int]:
        async with asyncio.timeout(60):
            cycle, hung = await self.found.get()
        assert cycle == C4
        return [one.local_rank for one in hung]


def say(path: str, step: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as worker:
        worker.connect(path)
        worker.send(HEAD.pack(MAGIC, HAS_STEP, step, 0.0))


@pytest.fixture
async def bed(tmp_path: Path) -> AsyncIterator[Bed]:
    made = Bed(tmp_path, hang_timeout_s=0.3)
    yield made
    made.watch.close()


@pytest.mark.rule("G9")
async def test_the_end_of_an_older_cycle_that_is_told_twice_is_not_that_of_the_new_one(bed: Bed) -> None:
    """The supervisor tells it to a stop that comes late, too; meanwhile the next workers are about to be started."""
    bed.watch.open(CycleNumber(3), 2)
    bed.watch.gone(CycleNumber(3))
    paths = bed.watch.open(C4, 2)
    bed.watch.gone(CycleNumber(3))
    say(paths[1], 5)
    bed.watch.started(C4, RANKS)
    assert await bed.ranks_found() == [1]
    bed.watch.gone(C4)
    with pytest.raises(FileNotFoundError):
        say(paths[1], 6)


@pytest.mark.rule("G9")
async def test_what_a_worker_says_before_its_start_is_known_counts(bed: Bed) -> None:
    paths = bed.watch.open(C4, 2)
    say(paths[1], 5)
    await asyncio.sleep(0)
    bed.watch.started(C4, RANKS)
    assert await bed.ranks_found() == [1]
    assert bed.watch.step(C4) == 5
    assert bed.watch.step(CycleNumber(5)) is None


@pytest.mark.rule("G9", "D6")
async def test_the_last_words_of_a_worker_that_has_ended_count(bed: Bed) -> None:
    paths = bed.watch.open(C4, 2)
    bed.watch.started(C4, RANKS)
    say(paths[0], 7)
    say(paths[1], 6)
    bed.watch.ended(LocalRank(0))
    assert bed.watch.step(C4) == 7
    assert await bed.ranks_found() == [1]
    bed.watch.close()
    assert bed.watch.step(C4) == 7, "also when all have gone"
    bed.watch.open(CycleNumber(5), 2)
    assert bed.watch.step(CycleNumber(5)) is None


@pytest.mark.rule("G9", "E1")
async def test_time_in_which_the_loop_stood_still_is_given_back(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 was silent all the while: it gets back all the time since the timer was set."""
    monkeypatch.setattr(hang_watch, "LATE_S", 0.05)
    paths = bed.watch.open(C4, 1)
    bed.watch.started(C4, RANKS[:1])
    say(paths[0], 1)
    bed.watch.look()
    spoke_s = time.monotonic()
    await asyncio.sleep(0.1)
    time.sleep(1.0)  # noqa: ASYNC251 - as if suspended
    assert await bed.ranks_found() == [0]
    assert time.monotonic() - spoke_s > 1.2


@pytest.mark.rule("G9")
async def test_another_cycles_start_is_not_this_ones(bed: Bed) -> None:
    bed.watch.open(C4, 2)
    bed.watch.started(CycleNumber(3), RANKS)
    paths = bed.watch.open(C4, 2)
    bed.watch.started(C4, RANKS)
    say(paths[0], 1)
    assert await bed.ranks_found() == [0]
