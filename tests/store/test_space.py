"""The key space: values, sums, queues, who is woken and when, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nvrx.store.codec import BadCommand
from nvrx.store.opcodes import MAX_APPENDED_BYTES
from nvrx.store.space import ENTRY_BYTES, QUEUE_BYTES, KeySpace, Waiter

I64_MIN, I64_MAX = -(2**63), 2**63 - 1


class Room:
    """A key space and waiters with names; `woken` tells who was woken, in order."""

    def __init__(self, max_bytes: int = 2**20) -> None:
        self.space = KeySpace(max_bytes=max_bytes)
        self.woken: list[str] = []

    def waiter(self, name: str, then: Callable[[], object] = lambda: None) -> Waiter:
        def wake() -> None:
            self.woken.append(name)
            then()

        return Waiter(wake)

    def waiting(self, name: str, *keys: bytes) -> Waiter:
        waiter = self.waiter(name)
        assert not self.space.wait(waiter, keys)
        return waiter


# ---- values -----------------------------------------------------------------------------------------------


def test_set_replaces_and_delete_tells_what_was_there() -> None:
    space = KeySpace()
    assert not space.delete(b"k")
    space.set(b"k", b"v")
    space.set(b"k", b"")
    assert space.values == {b"k": b""}
    assert space.has(b"k")
    assert space.delete(b"k")
    assert not space.delete(b"k")
    assert space.held_bytes == 0


@pytest.mark.rule("I5")
@pytest.mark.parametrize(
    ("found", "expected", "answer", "after"),
    [
        (None, b"", b"new", b"new"),
        (None, b"x", b"x", None),
        (b"old", b"old", b"new", b"new"),
        (b"old", b"x", b"old", b"old"),
        (b"old", b"", b"old", b"old"),
        (b"", b"", b"new", b"new"),
        (b"", b"x", b"", b""),
    ],
)
def test_compare_set(found: bytes | None, expected: bytes, answer: bytes, after: bytes | None) -> None:
    space = KeySpace()
    if found is not None:
        space.set(b"k", found)
    assert space.compare_set(b"k", expected, b"new") == answer
    assert space.values.get(b"k") == after


@pytest.mark.rule("I5")
@pytest.mark.parametrize(
    ("found", "amount", "total"),
    [
        (None, 0, 0),
        (None, -3, -3),
        (None, I64_MIN, I64_MIN),
        (b"7", 1, 8),
        (b"+7", 1, 8),
        (b" \t\n\v\f\r-7", 1, -6),
        (b"7seven", 1, 8),
        (b"7\0" + b"8", 1, 8),
        (b"0x10", 1, 1),
        (b"-0", 1, 1),
        (b"0" * 40 + b"7", 1, 8),
        (b"-" + b"0" * 40 + b"7", 1, -6),
        (str(I64_MAX).encode(), 0, I64_MAX),
        (str(I64_MAX).encode(), 1, I64_MIN),
        (str(I64_MIN).encode(), 0, I64_MIN),
        (str(I64_MIN).encode(), -1, I64_MAX),
        (str(I64_MIN).encode(), I64_MIN, 0),
    ],
)
def test_add(found: bytes | None, amount: int, total: int) -> None:
    space = KeySpace()
    if found is not None:
        space.set(b"k", found)
    assert space.add(b"k", amount) == total
    assert space.values[b"k"] == str(total).encode()


@pytest.mark.rule("I5")
@pytest.mark.parametrize(
    "found",
    [
        b"",
        b"x",
        b"x1",
        b"- 1",
        b"--1",
        b"+",
        b"\0" + b"1",
        b"\xa01",
        str(2**63).encode(),
        b"-" + str(2**63 + 1).encode(),
        b"9" * 20,
        b"9" * 10_000,
        "٣".encode(),
        b"_1",
    ],
)
def test_add_to_what_is_no_number(found: bytes) -> None:
    space = KeySpace()
    space.set(b"k", found)
    held = space.held_bytes
    with pytest.raises(BadCommand, match="not a 64-bit number"):
        space.add(b"k", 1)
    with pytest.raises(BadCommand, match="not a 64-bit number"):
        space.barrier(Waiter(pytest.fail), b"k", 1)
    assert space.values == {b"k": found}
    assert space.held_bytes == held


def test_append_grows_up_to_its_own_limit() -> None:
    space = KeySpace()
    space.append(b"k", b"a")
    space.append(b"k", b"")
    space.append(b"k", b"b")
    assert space.values[b"k"] == b"ab"
    space.append(b"k", bytes(MAX_APPENDED_BYTES - 2))
    with pytest.raises(BadCommand, match="by what is appended"):
        space.append(b"k", b"c")
    assert len(space.values[b"k"]) == MAX_APPENDED_BYTES


# ---- queues -----------------------------------------------------------------------------------------------


@pytest.mark.rule("I5")
def test_a_queue_is_first_in_first_out_and_apart_from_values() -> None:
    space = KeySpace()
    assert space.queue_pop(b"q") == (0, None)
    space.queue_push(b"q", b"1")
    space.queue_push(b"q", b"")
    assert space.has(b"q")
    assert space.queue_length(b"q") == 2
    assert b"q" not in space.values
    assert not space.delete(b"q")
    space.set(b"q", b"value")
    assert space.delete(b"q")
    assert space.queue_pop(b"q") == (2, b"1")
    assert space.queue_pop(b"q") == (1, b"")
    assert space.queue_pop(b"q") == (0, None)
    assert not space.has(b"q")
    assert space.queue_length(b"q") == 0
    assert space.held_bytes == 0


@pytest.mark.rule("I5")
def test_a_push_wakes_the_one_who_has_waited_longest() -> None:
    room = Room()
    for name in "abc":
        room.waiting(name, b"q")
    room.space.queue_push(b"q", b"1")
    assert room.woken == ["a"]
    room.space.queue_push(b"q", b"2")
    assert room.woken == ["a", "b"]
    room.space.set(b"q", b"")
    assert room.woken == ["a", "b", "c"]


# ---- waiting ----------------------------------------------------------------------------------------------


def test_who_waits_for_what_is_there_does_not_wait() -> None:
    room = Room()
    room.space.set(b"k", b"")
    room.space.queue_push(b"q", b"")
    waiter = room.waiter("a")
    assert room.space.wait(waiter, [])
    assert room.space.wait(waiter, [b"k", b"q", b"k"])
    assert waiter.missing == 0
    room.space.set(b"k", b"")
    assert room.woken == []


@pytest.mark.rule("I5")
@pytest.mark.parametrize(
    "come",
    [
        lambda space: space.set(b"k", b""),
        lambda space: space.add(b"k", 0),
        lambda space: space.append(b"k", b""),
        lambda space: space.compare_set(b"k", b"", b""),
        lambda space: space.compare_set(b"k", b"unlike", b""),  # torch wakes although nothing has come
        lambda space: space.queue_push(b"k", b""),
        lambda space: space.barrier(Waiter(pytest.fail), b"k", 1),
    ],
)
def test_what_wakes(come: Callable[[KeySpace], object]) -> None:
    room = Room()
    waiter = room.waiting("a", b"k")
    come(room.space)
    assert room.woken == ["a"]
    assert waiter.missing == 0
    come(room.space)
    assert room.woken == ["a"]


@pytest.mark.rule("I5")
def test_a_waiter_is_woken_once_when_its_last_key_comes() -> None:
    room = Room()
    room.waiting("a", b"1", b"2", b"1")
    room.waiting("b", b"2")
    room.space.set(b"1", b"")
    room.space.set(b"1", b"")
    assert room.woken == []
    room.space.delete(b"1")
    room.space.set(b"2", b"")
    assert room.woken == ["a", "b"]
    room.space.set(b"1", b"")
    room.space.set(b"2", b"")
    assert room.woken == ["a", "b"]


def test_waiters_are_woken_in_the_order_they_came() -> None:
    room = Room()
    for number in range(100):
        room.waiting(f"{number * 37 % 100}", b"k")
    room.space.set(b"k", b"")
    assert room.woken == [f"{number * 37 % 100}" for number in range(100)]


def test_one_that_waits_anew_waits_for_that_alone() -> None:
    room = Room()
    waiter = room.waiting("a", b"1", b"2")
    assert not room.space.wait(waiter, [b"3"])
    room.space.set(b"1", b"")
    room.space.set(b"2", b"")
    assert room.woken == []
    room.space.set(b"3", b"")
    assert room.woken == ["a"]


def test_cancel() -> None:
    room = Room()
    waiter = room.waiting("a", b"1", b"2")
    room.waiting("b", b"1")
    room.space.set(b"2", b"")
    room.space.cancel(waiter)
    room.space.cancel(waiter)
    room.space.cancel(room.waiter("never waited"))
    room.space.set(b"1", b"")
    assert room.woken == ["b"]
    assert waiter.keys == ()


def test_nothing_is_kept_of_those_who_are_gone() -> None:
    space = KeySpace()
    for number in range(100):
        waiter = Waiter(pytest.fail)
        space.wait(waiter, [b"%d" % number, b"k"])
        space.cancel(waiter)
        space.wait(waiter, [b"k"])
        space.cancel(waiter)
    assert vars(space)["_waiting"] == {}


def test_one_that_waits_again_as_it_is_woken() -> None:
    room = Room()
    again: list[bool] = []
    one = room.waiter("a", lambda: again.append(room.space.wait(one, [b"k", b"next"])))
    assert not room.space.wait(one, [b"k"])
    room.waiting("b", b"k")
    room.space.set(b"k", b"")
    assert room.woken == ["a", "b"]
    assert again == [False]
    room.space.set(b"next", b"")
    assert room.woken == ["a", "b", "a"]
    assert again == [False, True]


def test_one_that_waits_for_the_same_as_it_is_woken_by_a_push() -> None:
    """A worker that pops in vain waits again; the others keep their places before it."""
    room = Room()

    def pop_and_wait() -> None:
        assert room.space.queue_pop(b"q") == (1, b"v")
        assert not room.space.wait(one, [b"q"])

    one = room.waiter("a", pop_and_wait)
    assert not room.space.wait(one, [b"q"])
    room.waiting("b", b"q")
    room.space.queue_push(b"q", b"v")
    assert room.woken == ["a"]
    room.space.queue_push(b"q", b"w")
    assert room.woken == ["a", "b"]


def test_one_that_goes_as_another_is_woken() -> None:
    room = Room()
    others: list[Waiter] = []

    def all_go() -> None:
        for other in others:
            room.space.cancel(other)

    assert not room.space.wait(room.waiter("a", all_go), [b"k"])
    others += [room.waiting("b", b"k"), room.waiting("c", b"k", b"more")]
    room.space.set(b"k", b"")
    room.space.set(b"more", b"")
    assert room.woken == ["a"]


def test_a_set_as_another_is_woken() -> None:
    room = Room()
    assert not room.space.wait(room.waiter("a", lambda: room.space.set(b"k", b"2")), [b"k"])
    room.waiting("b", b"k")
    room.space.set(b"k", b"1")
    assert room.woken == ["a", "b"]
    assert room.space.values == {b"k": b"2"}


# ---- barriers ---------------------------------------------------------------------------------------------


@pytest.mark.rule("I5")
def test_the_last_to_arrive_wakes_the_others() -> None:
    room = Room()
    plain = room.waiting("plain", b"bar")
    for name in "abc":
        assert not room.space.barrier(room.waiter(name), b"bar", 4)
    assert room.woken == []
    assert room.space.values == {b"bar": b"3"}
    assert room.space.barrier(room.waiter("d"), b"bar", 4)
    assert room.woken == ["plain", "a", "b", "c"]
    assert plain.missing == 0
    assert room.space.barrier(room.waiter("late"), b"bar", 4)
    assert room.space.values == {b"bar": b"5"}


@pytest.mark.parametrize("world", [1, 0, -1, I64_MIN])
def test_a_barrier_of_one_or_fewer(world: int) -> None:
    assert KeySpace().barrier(Waiter(pytest.fail), b"bar", world)


def test_one_that_leaves_a_barrier_has_still_arrived() -> None:
    room = Room()
    waiter = room.waiter("a")
    assert not room.space.barrier(waiter, b"bar", 2)
    room.space.cancel(waiter)
    assert room.space.barrier(room.waiter("b"), b"bar", 2)
    assert room.woken == []


# ---- room -------------------------------------------------------------------------------------------------

MUTATING: list[Callable[[KeySpace], object]] = [
    lambda space: space.set(b"new", b"v" * 100),
    lambda space: space.append(b"new", b"v" * 100),
    lambda space: space.append(b"old", b"v" * 300),
    lambda space: space.compare_set(b"new", b"", b"v" * 100),
    lambda space: space.compare_set(b"old", b"old", b"v" * 300),
    lambda space: space.add(b"new", 1),
    lambda space: space.barrier(Waiter(pytest.fail), b"new", 2),
    lambda space: space.queue_push(b"new", b"v"),
    lambda space: space.queue_push(b"q", b"v" * 100),
]


@pytest.mark.rule("J4")
@pytest.mark.parametrize("mutate", MUTATING)
def test_a_full_space_refuses_and_stays_as_it_was(mutate: Callable[[KeySpace], object]) -> None:
    room = Room(ENTRY_BYTES * 2 + QUEUE_BYTES + 100)
    space = room.space
    space.set(b"old", b"old")
    space.queue_push(b"q", b"v")
    held = space.held_bytes
    room.waiting("a", b"new")
    with pytest.raises(BadCommand, match="would hold more"):
        mutate(space)
    assert space.held_bytes == held
    assert space.values == {b"old": b"old"}
    assert space.queue_length(b"q") == 1
    assert not space.has(b"new")
    assert room.woken == []
    space.set(b"old", b"")  # what needs no more room goes on
    assert space.delete(b"old")
    assert space.queue_pop(b"q") == (1, b"v")
    assert space.held_bytes == 0


def test_filled_to_the_byte() -> None:
    space = KeySpace(max_bytes=ENTRY_BYTES + 10)
    space.set(b"12345", b"12345")
    assert space.held_bytes == ENTRY_BYTES + 10
    space.set(b"12345", b"54321")
    with pytest.raises(BadCommand):
        space.set(b"12345", b"123456")
