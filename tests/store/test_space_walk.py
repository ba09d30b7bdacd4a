"""Random walks: a key space and a naive one side by side, anything in any order; and how much it says it holds."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from nvrx.store.codec import BadCommand
from nvrx.store.space import ENTRY_BYTES, QUEUE_BYTES, KeySpace, Waiter

keys = st.sampled_from([b"a", b"b", b"long" * 4])
values = st.sampled_from([b"", b"0", b"1", b"2", b"-5", b"some text", b"x" * 300])
NAMES = ["w1", "w2", "w3", "w4"]
names = st.sampled_from(NAMES)
MAX_BYTES = 3000


def number(value: bytes) -> int | None:
    """The one that a value begins with."""
    for end in range(len(value), 0, -1):
        try:
            return int(value[:end])
        except ValueError:
            continue
    return None


class Walk(RuleBasedStateMachine):
    """A key space and a naive one of lists side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.space = KeySpace(max_bytes=MAX_BYTES)
        self.heard: list[str] = []
        self.waiters = {name: Waiter(partial(self.heard.append, name)) for name in NAMES}
        self.values: dict[bytes, bytes] = {}
        self.queues: dict[bytes, list[bytes]] = {}
        self.waits: list[tuple[str, set[bytes]]] = []
        self.woken: list[str] = []

    def held(self) -> int:
        held = sum(ENTRY_BYTES + len(key) + len(value) for key, value in self.values.items())
        for key, queue in self.queues.items():
            held += QUEUE_BYTES if queue else 0
            held += sum(ENTRY_BYTES + len(key) + len(value) for value in queue)
        return held

    def leave(self, name: str) -> None:
        self.waits = [one for one in self.waits if one[0] != name]

    def wake(self, key: bytes, most: int = 100) -> None:
        for one in [one for one in self.waits if key in one[1]][:most]:
            one[1].discard(key)
            if not one[1]:
                self.waits.remove(one)
                self.woken.append(one[0])

    def fits(self, key: bytes, value: bytes, act: Callable[[], object]) -> bool:
        """Do it on the model and the space; where it does not fit, the space refuses."""
        before = self.values.get(key)
        self.values[key] = value
        if self.held() <= MAX_BYTES:
            return True
        if before is None:
            del self.values[key]
        else:
            self.values[key] = before
        with pytest.raises(BadCommand):
            act()
        return False

    @rule(key=keys, value=values)
    def set(self, key: bytes, value: bytes) -> None:
        if self.fits(key, value, lambda: self.space.set(key, value)):
            self.space.set(key, value)
            self.wake(key)

    @rule(key=keys, value=values)
    def append(self, key: bytes, value: bytes) -> None:
        if self.fits(key, self.values.get(key, b"") + value, lambda: self.space.append(key, value)):
            self.space.append(key, value)
            self.wake(key)

    @rule(key=keys, expected=values, desired=values)
    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> None:
        if self.values.get(key, b"") == expected:
            if self.fits(key, desired, lambda: self.space.compare_set(key, expected, desired)):
                assert self.space.compare_set(key, expected, desired) == desired
                self.wake(key)
        else:
            assert self.space.compare_set(key, expected, desired) == self.values.get(key, expected)
            self.wake(key)

    @rule(key=keys, amount=st.integers(-3, 3))
    def add(self, key: bytes, amount: int) -> None:
        found = number(self.values.get(key, b"0"))
        if found is None:
            with pytest.raises(BadCommand):
                self.space.add(key, amount)
            return
        total = found + amount
        if self.fits(key, b"%d" % total, lambda: self.space.add(key, amount)):
            assert self.space.add(key, amount) == total
            self.wake(key)

    @rule(key=keys, name=names, world=st.integers(0, 4))
    def barrier(self, key: bytes, name: str, world: int) -> None:
        waiter = self.waiters[name]
        found = number(self.values.get(key, b"0"))
        if found is None:
            with pytest.raises(BadCommand):
                self.space.barrier(waiter, key, world)
            return
        count = found + 1
        if self.fits(key, b"%d" % count, lambda: self.space.barrier(waiter, key, world)):
            assert self.space.barrier(waiter, key, world) == (count >= world)
            self.leave(name)
            if count >= world:
                self.wake(key)
            else:
                self.waits.append((name, {key}))

    @rule(key=keys)
    def delete(self, key: bytes) -> None:
        assert self.space.delete(key) == (self.values.pop(key, None) is not None)

    @rule(key=keys, value=values)
    def push(self, key: bytes, value: bytes) -> None:
        queue = self.queues.setdefault(key, [])
        queue.append(value)
        if self.held() > MAX_BYTES:
            queue.pop()
            with pytest.raises(BadCommand):
                self.space.queue_push(key, value)
        else:
            self.space.queue_push(key, value)
            self.wake(key, 1)

    @rule(key=keys)
    def pop(self, key: bytes) -> None:
        queue = self.queues.get(key, [])
        assert self.space.queue_pop(key) == (len(queue), queue.pop(0) if queue else None)

    @rule(name=names, wanted=st.lists(keys, max_size=4))
    def wait(self, name: str, wanted: list[bytes]) -> None:
        missing = {key for key in wanted if key not in self.values and not self.queues.get(key)}
        assert self.space.wait(self.waiters[name], wanted) == (not missing)
        self.leave(name)
        if missing:
            self.waits.append((name, missing))

    @rule(name=names)
    def cancel(self, name: str) -> None:
        self.space.cancel(self.waiters[name])
        self.leave(name)

    @invariant()
    def agree(self) -> None:
        assert self.space.values == self.values
        assert self.space.held_bytes == self.held()
        assert self.heard == self.woken
        for key in (b"a", b"b", b"long" * 4):
            assert self.space.queue_length(key) == len(self.queues.get(key, []))
            assert self.space.has(key) == (key in self.values or bool(self.queues.get(key)))
            assert self.space.has_all([key, key]) == self.space.has(key)
        waiting = {name for name, _ in self.waits}
        assert {name for name, waiter in self.waiters.items() if waiter.missing} == waiting


TestWalk = Walk.TestCase
TestWalk.settings = settings(max_examples=80, stateful_step_count=40, derandomize=True, deadline=None, database=None)
