"""Which workers of a node hang (rule G9): silent for longer than they may be. Pure: `now_s` is an argument.

A worker that has spoken may be silent for `hang_timeout_s`, or for as long as the section allows that it is in; one
that has not, for `start_timeout_s` from its start. Knows no socket, process or timer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .ids import LocalRank


@dataclass(frozen=True)
class Limits:
    """How long silence is borne, in seconds; None: for ever. `slack_s`: words may be held back for so long."""

    hang_timeout_s: float | None = None
    start_timeout_s: float | None = None
    slack_s: float = 0.0


@dataclass(frozen=True)
class Section:
    """A part of a program that may be silent for as long as it says; None: for ever."""

    name: str
    timeout_s: float | None


@dataclass(frozen=True)
class Word:
    """All that a worker tells: the step that it came to last, and the section that it is in."""

    step: int | None = None
    section: Section | None = None


@dataclass(frozen=True)
class Watched:
    """One worker. `since_s`: its last word, or its start; later by whatever time is not held against it.

    `word` None: it has not spoken. `may_have_said_more`: words of its were lost, among them perhaps that it entered a
    section: it is not judged until its next one.
    """

    since_s: float
    word: Word | None = None
    may_have_said_more: bool = False


@dataclass(frozen=True)
class Watch:
    """The running workers of one cycle on this node. `step`: the furthest that any of them told."""

    limits: Limits
    workers: Mapping[LocalRank, Watched] = field(default_factory=dict)
    step: int | None = None


@dataclass(frozen=True)
class Hung:
    """A worker that is silent for too long; the message says for how long, and where it was last heard."""

    local_rank: LocalRank
    message: str


def begin(limits: Limits, ranks: Iterable[LocalRank], now_s: float) -> Watch:
    """Workers were started."""
    return Watch(limits, {rank: Watched(now_s) for rank in ranks})


def hear(watch: Watch, rank: LocalRank, word: Word, now_s: float, *, may_have_said_more: bool = False) -> Watch:
    """A worker spoke; words of one that has ended count for its step alone."""
    steps = [one for one in (watch.step, word.step) if one is not None]
    step = max(steps) if steps else None
    workers = watch.workers
    if rank in workers:
        workers = {**workers, rank: Watched(now_s, word, may_have_said_more)}
    return dataclasses.replace(watch, workers=workers, step=step)


def end(watch: Watch, rank: LocalRank) -> Watch:
    """A worker ended."""
    return dataclasses.replace(watch, workers={one: state for one, state in watch.workers.items() if one != rank})


def end_all(watch: Watch) -> Watch:
    """Whatever is left is being stopped: its silence means nothing. How far training came stays known."""
    return dataclasses.replace(watch, workers={})


def extend(watch: Watch, late_s: float) -> Watch:
    """The agent itself was stalled for `late_s` (suspended, starved): nobody is judged for that time."""
    workers = {
        rank: dataclasses.replace(state, since_s=state.since_s + late_s) for rank, state in watch.workers.items()
    }
    return dataclasses.replace(watch, workers=workers)


def next_deadline(watch: Watch) -> float | None:
    """When a worker hangs that goes on being silent; None where none can."""
    due = [at_s for one in watch.workers.values() if (at_s := _deadline(watch.limits, one)) is not None]
    return min(due) if due else None


def find_hung(watch: Watch, now_s: float) -> tuple[Hung, ...]:
    """Those that hang now; who fell silent first comes first: the others mostly wait for it."""
    late = [
        (one.since_s, rank)
        for rank, one in watch.workers.items()
        if (at_s := _deadline(watch.limits, one)) is not None and now_s >= at_s
    ]
    return tuple(Hung(rank, _describe(watch.workers[rank], now_s)) for _, rank in sorted(late))


def _allowed_s(limits: Limits, one: Watched) -> float | None:
    if one.word is None:
        return limits.start_timeout_s
    if one.may_have_said_more or limits.hang_timeout_s is None:
        return None
    return limits.hang_timeout_s if one.word.section is None else one.word.section.timeout_s


def _deadline(limits: Limits, one: Watched) -> float | None:
    allowed_s = _allowed_s(limits, one)
    return None if allowed_s is None else one.since_s + allowed_s + limits.slack_s


def _describe(one: Watched, now_s: float) -> str:
    silent = f"{now_s - one.since_s:.1f} s"
    if one.word is None:
        return f"no heartbeat within {silent} of its start"
    about = [] if one.word.step is None else [f"last step {one.word.step}"]
    if one.word.section is not None:
        about.append(f'in section "{one.word.section.name}"')
    return f"no heartbeat for {silent}" + (f" ({'; '.join(about)})" if about else "")
