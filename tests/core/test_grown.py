"""Mappings that grow and records that change: the same as with plain copies, and what there was stays."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx.core.grown import Grown, changed, plus

from .driver import trained


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers()), max_size=200), st.dictionaries(st.integers(0, 9), st.none())
)
def test_it_is_what_a_dict_would_be(steps: list[tuple[int, int]], first: dict[int, int | None]) -> None:
    wanted: dict[int, int | None] = dict(first)
    grown = Grown(first)
    earlier = []
    for key, value in steps:
        earlier.append((grown, dict(wanted)))
        grown = plus(grown, key, value)
        wanted[key] = value
    for one, was in [*earlier, (grown, wanted)]:
        assert one == was
        assert was == one
        assert len(one) == len(was)
        assert list(one.items()) == list(was.items())
        assert list(one) == list(one.keys()) == list(was)
        assert list(one.values()) == list(was.values())
        assert all(one[key] == value and key in one for key, value in was.items())
        assert 99 not in one
        assert one.get(99) is None


def test_a_plain_dict_grows_and_stays_as_it_is() -> None:
    given_ = {"a": 1}
    assert plus(given_, "b", 2) == {"a": 1, "b": 2}
    assert given_ == {"a": 1}


def test_a_step_copies_a_few_entries_only() -> None:
    """Steps share the large part: of 4,000 steps few make a new one."""
    grown: Grown[int, int] = Grown({})
    bases = set()
    for number in range(4000):
        grown = grown.plus(number, number)
        bases.add(id(grown._base))
    assert len(grown) == 4000
    assert len(bases) < 200


def test_a_changed_record_is_what_replace_gives() -> None:
    run = trained().run
    other = changed(run, last_at=99.0, exit_code=3)
    assert other == dataclasses.replace(run, last_at=99.0, exit_code=3)
    assert (run.last_at, run.exit_code) != (99.0, 3)
    with pytest.raises(AssertionError, match="Run has no"):
        changed(run, colour="blue")
