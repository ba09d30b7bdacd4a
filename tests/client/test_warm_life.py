"""When a zygote is started and replaced: the same real process, driven by a clock of the test's own."""

from __future__ import annotations

import os
import selectors
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx.client.output_pipes import Outputs
from nvrx.client.processes import become_subreaper
from nvrx.client.warm import AFTER_WORKERS_S, Start, Warmth, WarmWish
from nvrx.client.worker_start import Command

from .supervision import PATIENCE_S

pytestmark = pytest.mark.rule("G10")
BEGIN_S = 1000.0


class Keeper:
    """What a supervisor does for it: selects and reaps."""

    def __init__(self, folder: Path, modules: tuple[str, ...] = ("json",)) -> None:
        self.notes: list[str] = []
        self.selector = selectors.DefaultSelector()
        self.warmth = Warmth(self.selector, lambda text, _: self.notes.append(text), {})
        argv = tuple(os.fsencode(word) for word in (sys.executable, "worker.py"))
        self.env = dict(os.environb)
        self.warmth.wish(WarmWish(modules, argv, self.env, os.fsencode(folder)), BEGIN_S)

    def until_it_has_spoken(self) -> str:
        count = len(self.notes)
        while len(self.notes) == count:
            ready = self.selector.select(PATIENCE_S)
            assert ready
            for key, _ in ready:
                key.data()
        return self.notes[-1]

    def reap(self, now_s: float) -> None:
        assert self.warmth.pid is not None
        self.warmth.on_reaped(os.waitpid(self.warmth.pid, 0)[1], now_s)

    @property
    def due_s(self) -> float:
        due_s = self.warmth.next_step_s
        assert due_s is not None
        return due_s


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    keeper = Keeper(tmp_path)
    yield keeper
    keeper.warmth.end()
    assert keeper.warmth.pid is None


def test_it_starts_when_due_and_after_workers_that_start(keeper: Keeper) -> None:
    keeper.warmth.step(BEGIN_S - 1)
    assert keeper.warmth.pid is None
    keeper.warmth.workers_started(BEGIN_S - 1)
    assert keeper.due_s == BEGIN_S - 1 + AFTER_WORKERS_S
    keeper.warmth.step(BEGIN_S)
    assert keeper.warmth.pid is None
    keeper.warmth.step(keeper.due_s)
    assert "is ready" in keeper.until_it_has_spoken()


def test_an_old_one_is_replaced(keeper: Keeper) -> None:
    keeper.warmth.step(BEGIN_S)
    keeper.until_it_has_spoken()
    first = keeper.warmth.pid
    old_s = keeper.due_s
    keeper.warmth.step(old_s - 1)
    assert keeper.due_s == old_s
    keeper.warmth.step(old_s)
    assert keeper.warmth.next_step_s is None  # its end is an event: nobody looks again and again
    keeper.reap(old_s)
    keeper.warmth.step(keeper.due_s)
    assert "is ready" in keeper.until_it_has_spoken()
    assert keeper.warmth.pid != first


def test_one_that_dies_again_and_again_is_started_less_and_less_often(keeper: Keeper) -> None:
    keeper.warmth.step(BEGIN_S)
    keeper.until_it_has_spoken()
    waits = []
    for _ in range(3):
        assert keeper.warmth.pid is not None
        os.kill(keeper.warmth.pid, signal.SIGKILL)
        keeper.reap(BEGIN_S)
        waits.append(keeper.due_s - BEGIN_S)
        keeper.warmth.step(keeper.due_s)
        if len(waits) < 2:
            keeper.until_it_has_spoken()
    assert waits == [10.0, 10.0, 20.0]  # one that was ready begins from the least again


def test_imports_that_end_the_process_are_given_up(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import os; os._exit(3)")
    keeper = Keeper(tmp_path, ("ends",))
    for _ in range(3):
        keeper.warmth.step(keeper.due_s)
        keeper.reap(BEGIN_S)
    assert keeper.notes[-1] == "workers are not warmed: the warm process ends while it imports (exit code 3)"
    assert keeper.warmth.next_step_s is None


@pytest.fixture
def subreaper() -> Iterator[None]:
    """As a supervisor: orphans come to this process."""
    become_subreaper()
    yield
    become_subreaper(False)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_worker_begins_when_told_and_never_otherwise(
    keeper: Keeper, tmp_path: Path, subreaper: None, is_told: bool
) -> None:
    (tmp_path / "worker.py").write_text("print('began')")
    keeper.warmth.step(BEGIN_S)
    keeper.until_it_has_spoken()
    argv = [os.fsencode(word) for word in (sys.executable, "worker.py")]
    command = Command(argv, keeper.env, os.fsencode(tmp_path))
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        [born] = keeper.warmth.bear([Start(command, Outputs(out.fileno(), err.fileno()))])
    assert born is not None
    if is_told:
        born.begin()
    else:
        born.link.close()
    code = os.waitstatus_to_exitcode(os.waitpid(born.pid, 0)[1])
    assert (code, (tmp_path / "out").read_text()) == ((0, "began\n") if is_told else (70, ""))
