"""What failures cost, and when they are too many (rules D3, D5, D6, D7, D11). Reads a Run and decides nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .facts import LOSSES, OWN_FAILURES, PLANNED, TAKEN_AWAY, UNHEALTHY, Cause
from .ids import CycleNumber, NodeId
from .narrate import describe_failure
from .run import Cycle, Run, settles_with
from .shape import RestartBudget

EXIT_FAILED = 1
EXIT_NO_RESTART = 93
"""Exit code of a run that is not worth starting again: it makes no progress."""
QUICK_DEATH_S = 10.0
"""A cycle whose workers fail this soon after it was RUNNING is part of a crash loop."""
BACKOFF_MOST_S = 30.0
_MAX_DOUBLINGS = 16


@dataclass(frozen=True)
class Spent:
    """Why there is no further cycle: what happened last, and the limit that it came to; and the run's exit code."""

    happened: str
    limit: str
    exit_code: int

    @property
    def reason(self) -> str:
        return f"{self.happened}; {self.limit}"


def spent(run: Run) -> Spent | None:
    """D5, D6: why there is no further cycle; None if there may be one."""
    last = run.cycle
    if last is None or last.failure is None or last.number < run.life_began_with or last.failure.cause in PLANNED:
        return None
    settings = run.settings
    happened = f"cycle {last.number}: {describe_failure(last.failure)}"
    if restarts_used(run) > settings.max_restarts or settings.max_restarts == 0:
        return Spent(happened, f"max_restarts {settings.max_restarts} is used up", EXIT_FAILED)
    if settings.max_replacements is not None and replacements_used(run) > settings.max_replacements:
        return Spent(happened, f"max_replacements {settings.max_replacements} is used up", EXIT_FAILED)
    idle = cycles_without_progress(run)
    if settings.max_no_progress_cycles and idle >= settings.max_no_progress_cycles:
        return Spent(
            happened,
            f"{idle} cycles in a row made no progress beyond step {run.progress} (max_no_progress_cycles)",
            EXIT_NO_RESTART,
        )
    return None


def restarts_used(run: Run) -> int:
    """Cycles of this life ended by workers themselves, or by an unhealthy node; counted against `max_restarts`."""
    since = run.life_began_with
    if run.settings.restart_budget is RestartBudget.PER_PROGRESS:
        since = max((one.number for one in _life(run) if one.progressed), default=since)
    return sum(1 for one in _charged(run) if one.number >= since and _cause(one) in OWN_FAILURES | UNHEALTHY)


def replacements_used(run: Run) -> int:
    """Cycles of this life ended by a lost or leaving node; counted against `max_replacements`."""
    return sum(1 for one in _charged(run) if _cause(one) in LOSSES)


def _life(run: Run) -> Iterator[Cycle]:
    return (one for one in run.cycles if one.number >= run.life_began_with)


def _cause(cycle: Cycle) -> Cause | None:
    return cycle.failure.cause if cycle.failure is not None else None


def _charged(run: Run) -> Iterator[Cycle]:
    """D3, D5: the cycles whose end costs something: losses that settle with a failure before them are one with it, and
    so is the loss of a node before a cycle was RUNNING. One that turns out to be unhealthy is lost to the world."""
    before: Cycle | None = None
    for cycle in _life(run):
        cause = _cause(cycle)
        joins = before is not None and settles_with(run, before, cycle.ended_at or 0.0)
        settles = cause in TAKEN_AWAY and (cycle.running_at is None or joins)
        if cause in OWN_FAILURES | TAKEN_AWAY and not settles:
            before = cycle
            yield cycle


def cycles_without_progress(run: Run) -> int:
    """D6: how many cycles in a row, up to the latest, failed without coming further; 0 where progress is not told."""
    if run.progress is None:
        return 0
    count = 0
    for cycle in reversed(list(_life(run))):
        if cycle.progressed:
            break
        cause = _cause(cycle)
        was_tried = cause in OWN_FAILURES or (cause in TAKEN_AWAY and cycle.running_at is not None)
        count += 1 if was_tried else 0
    return count


def backoff_s(run: Run) -> float:
    """D11: how long after the latest cycle's end the next waits; 0 unless workers died quickly twice in a row."""
    quick = 0
    for cycle in reversed(list(_life(run))):
        if _cause(cycle) not in OWN_FAILURES or not _died_quickly(cycle):
            break
        quick += 1
    if quick < 2:
        return 0.0
    first_s = run.settings.restart_backoff_s
    return min(first_s * 2.0 ** min(quick - 2, _MAX_DOUBLINGS), max(first_s, BACKOFF_MOST_S))


def _died_quickly(cycle: Cycle) -> bool:
    return cycle.running_at is None or (cycle.ended_at or 0.0) - cycle.running_at < QUICK_DEATH_S


@dataclass(frozen=True)
class RepeatOffender:
    """A node whose own workers failed first, `times` in a row."""

    node_id: NodeId
    times: int


def repeat_offender(run: Run) -> RepeatOffender | None:
    """D7: the node that is to be quarantined; None if there is none."""
    most = run.settings.max_node_failures
    last = run.cycle
    if not most or last is None or last.failure is None or last.failure.node_id is None:
        return None
    node_id = last.failure.node_id
    times = _failures_in_a_row(run, node_id)
    return RepeatOffender(node_id, times) if times >= most else None


def _failures_in_a_row(run: Run, node_id: NodeId) -> int:
    since = max(run.life_began_with, run.pardoned.get(node_id, CycleNumber(0)))
    times = 0
    for cycle in reversed(run.cycles):
        if cycle.number < since:
            break
        if _cause(cycle) in PLANNED:
            continue
        failure = cycle.failure
        if failure is None or failure.cause not in OWN_FAILURES or failure.node_id != node_id:
            break
        times += 1
    return times
