"""Who hangs (rule G9): rows of what was heard when, and what is not held against a worker."""

from __future__ import annotations

import pytest

from nvrx.core.hang import (
    Hung,
    Limits,
    Section,
    Watch,
    Word,
    begin,
    end,
    end_all,
    extend,
    find_hung,
    hear,
    next_deadline,
)
from nvrx.core.ids import LocalRank

R0, R1 = LocalRank(0), LocalRank(1)
BEAT = Word()
HANG = Limits(hang_timeout_s=30.0)


def started(limits: Limits = HANG, count: int = 2) -> Watch:
    return begin(limits, [LocalRank(one) for one in range(count)], 0.0)


def who(watch: Watch, now_s: float) -> list[int]:
    return [one.local_rank for one in find_hung(watch, now_s)]


@pytest.mark.rule("G9")
def test_a_worker_that_has_spoken_and_is_silent_for_too_long_hangs() -> None:
    watch = hear(started(), R0, BEAT, 10.0)
    assert next_deadline(watch) == 40.0
    assert find_hung(watch, 39.9) == ()
    assert find_hung(watch, 40.0) == (Hung(R0, "no heartbeat for 30.0 s"),)
    assert who(hear(watch, R0, BEAT, 39.9), 69.8) == []


@pytest.mark.rule("G9")
def test_one_that_never_spoke_is_asked_about_only_where_starts_are_limited() -> None:
    assert next_deadline(started()) is None
    assert who(started(), 1e6) == []
    limited = started(Limits(30.0, 60.0))
    assert next_deadline(limited) == 60.0
    assert find_hung(limited, 60.0)[0] == Hung(R0, "no heartbeat within 60.0 s of its start")
    assert who(hear(limited, R0, BEAT, 59.0), 60.0) == [R1]
    only_starts = hear(started(Limits(None, 60.0)), R0, BEAT, 1.0)
    assert who(only_starts, 1e6) == [R1], "with nothing said of hangs, who has spoken may be silent"


@pytest.mark.rule("G9")
def test_nothing_hangs_where_nobody_asked() -> None:
    watch = hear(started(Limits()), R0, Word(3, Section("x", 1.0)), 0.0)
    assert next_deadline(watch) is None
    assert who(watch, 1e9) == []


@pytest.mark.rule("G9")
@pytest.mark.parametrize(
    ("section", "deadline_s"),
    [(None, 30.0), (Section("s", 600.0), 600.0), (Section("s", 5.0), 5.0), (Section("s", None), None)],
)
def test_in_a_section_its_own_time_counts_instead(section: Section | None, deadline_s: float | None) -> None:
    watch = hear(started(count=1), R0, Word(None, section), 0.0)
    assert next_deadline(watch) == deadline_s
    assert who(watch, 1e9) == ([] if deadline_s is None else [R0])


@pytest.mark.rule("G9")
def test_a_heartbeat_in_a_section_and_its_end_begin_anew() -> None:
    inside = Word(None, Section("checkpoint", 600.0))
    watch = hear(hear(started(count=1), R0, inside, 0.0), R0, inside, 500.0)
    assert next_deadline(watch) == 1100.0
    assert next_deadline(hear(watch, R0, BEAT, 700.0)) == 730.0


@pytest.mark.rule("G9", "D4")
def test_the_message_says_where_it_was_last_heard() -> None:
    watch = hear(started(count=1), R0, Word(1200, Section("checkpoint", 600.0)), 0.0)
    assert find_hung(watch, 600.04)[0].message == 'no heartbeat for 600.0 s (last step 1200; in section "checkpoint")'
    watch = hear(watch, R0, Word(0), 0.0)
    assert find_hung(watch, 30.0)[0].message == "no heartbeat for 30.0 s (last step 0)"


@pytest.mark.rule("G9", "D4")
def test_who_fell_silent_first_is_named_first() -> None:
    watch = started(count=3)
    for rank, at_s in ((R0, 5.02), (LocalRank(2), 5.0), (R1, 5.01)):
        watch = hear(watch, rank, BEAT, at_s)
    assert who(watch, 35.0) == [2]
    assert who(watch, 36.0) == [2, 1, 0]


@pytest.mark.rule("G9")
def test_who_has_ended_or_is_being_stopped_hangs_no_more() -> None:
    watch = hear(hear(started(), R0, Word(7), 0.0), R1, Word(6), 0.0)
    assert who(end(watch, R0), 99.0) == [R1]
    stopped = end_all(watch)
    assert (who(stopped, 99.0), next_deadline(stopped)) == ([], None)
    assert stopped.step == 7
    assert who(hear(stopped, R0, BEAT, 1.0), 99.0) == [], "a late word brings nobody back"


@pytest.mark.rule("G9", "E1")
def test_time_in_which_the_agent_was_stalled_is_held_against_nobody() -> None:
    watch = extend(hear(started(Limits(30.0, 60.0)), R0, BEAT, 10.0), 100.0)
    assert next_deadline(watch) == 140.0
    assert who(watch, 139.0) == []
    assert who(watch, 160.0) == [R1, R0]


@pytest.mark.rule("G9")
def test_who_may_have_said_more_than_was_heard_is_not_judged_before_its_next_word() -> None:
    """Its queue was full: the word that it entered a section may be among those lost."""
    watch = hear(started(count=1), R0, BEAT, 0.0, may_have_said_more=True)
    assert (who(watch, 1e6), next_deadline(watch)) == ([], None)
    assert who(hear(watch, R0, BEAT, 100.0), 130.0) == [R0]


@pytest.mark.rule("G9")
def test_words_that_may_be_held_back_are_allowed_for() -> None:
    watch = hear(started(Limits(30.0, 60.0, slack_s=0.5), 1), R0, BEAT, 0.0)
    assert next_deadline(watch) == 30.5


@pytest.mark.rule("D6")
def test_the_furthest_step_of_any_worker_counts() -> None:
    watch = started()
    assert watch.step is None
    for rank, step in ((R0, 5), (R1, 9), (R0, 7), (R1, None), (R1, 3)):
        watch = hear(watch, rank, Word(step), 1.0)
    assert watch.step == 9
