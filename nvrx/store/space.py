"""A key space: what one TCPStore holds, and who waits for what. Knows no bytes on a wire, no socket, no clock.

Semantics are those of torch 2.13's server, with its corner cases where a client can see them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable

from .codec import BadCommand
from .opcodes import MAX_APPENDED_BYTES, MAX_SPACE_BYTES

# What C's strtoll takes as a number: torch stores sums as decimal text and reads back whatever is there.
_NUMBER = re.compile(rb"[ \t\n\v\f\r]*([+-]?)0*([0-9]+)")
_I64_MIN, _I64_MAX = -(2**63), 2**63 - 1
_I64_DIGITS = 19
ENTRY_BYTES, QUEUE_BYTES = 160, 800
"""What an entry, and a queue, takes besides its own bytes: millions of tiny keys count as what they are."""


class Waiter:
    """Somebody who waits for keys; `wake` is called once, when all of them have come."""

    __slots__ = ("keys", "missing", "wake")

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.keys: tuple[bytes, ...] = ()
        self.missing = 0


class KeySpace:
    """Keys with values, and queues. `read_only_below`: a prefix under which only privileged clients write."""

    def __init__(self, read_only_below: bytes | None = None, max_bytes: int = MAX_SPACE_BYTES) -> None:
        self.read_only_below = read_only_below
        self.values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting: dict[bytes, dict[Waiter, None]] = {}
        self._max_bytes = max_bytes
        self.held_bytes = 0
        """Of keys, values and what is queued, with what they take besides."""

    # ---- values -------------------------------------------------------------------------------------------

    def set(self, key: bytes, value: bytes) -> None:
        self._put(key, value)
        if self._waiting:
            self._wake_all(key)

    def compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """The value afterwards; where the key is missing and something was expected, what was expected."""
        found = self.values.get(key)
        answer = found
        if found is None:
            answer = expected
            if not expected:
                self._put(key, desired)
                answer = desired
        elif found == expected:
            self._put(key, desired)
            answer = desired
        self._wake_all(key)
        assert answer is not None
        return answer

    def add(self, key: bytes, amount: int) -> int:
        """The sum, kept as decimal text. Raises BadCommand where there is no number."""
        found = self.values.get(key)
        total = amount if found is None else _number(key, found) + amount
        if not _I64_MIN <= total <= _I64_MAX:
            total = (total - _I64_MIN) % 2**64 + _I64_MIN  # as in two's complement
        self._put(key, b"%d" % total)
        if self._waiting:
            self._wake_all(key)
        return total

    def append(self, key: bytes, value: bytes) -> None:
        """Raises BadCommand where the whole would be over MAX_APPENDED_BYTES."""
        found = self.values.get(key, b"")
        if len(found) + len(value) > MAX_APPENDED_BYTES:
            raise BadCommand(f"key {key[:64]!a} would hold more than {MAX_APPENDED_BYTES} bytes by what is appended")
        self._put(key, found + value)
        self._wake_all(key)

    def delete(self, key: bytes) -> bool:
        """Whether there was a value. A queue of that name stays."""
        found = self.values.pop(key, None)
        if found is None:
            return False
        self.held_bytes -= ENTRY_BYTES + len(key) + len(found)
        return True

    # ---- queues -------------------------------------------------------------------------------------------

    def queue_push(self, key: bytes, value: bytes) -> None:
        """Wakes the one who has waited longest."""
        queue = self._queues.get(key)
        self._grow(key, (QUEUE_BYTES if queue is None else 0) + ENTRY_BYTES + len(key) + len(value))
        if queue is None:
            queue = self._queues[key] = deque()
        queue.append(value)
        waiting = self._waiting.get(key)
        if waiting:
            self._arrived(key, next(iter(waiting)))

    def queue_pop(self, key: bytes) -> tuple[int, bytes | None]:
        """The length before, and the oldest value if there is one."""
        queue = self._queues.get(key)
        if queue is None:
            return 0, None
        length = len(queue)
        value = queue.popleft()
        self.held_bytes -= ENTRY_BYTES + len(key) + len(value)
        if not queue:
            del self._queues[key]
            self.held_bytes -= QUEUE_BYTES
        return length, value

    def queue_length(self, key: bytes) -> int:
        return len(self._queues.get(key, ()))

    # ---- waiting ------------------------------------------------------------------------------------------

    def has(self, key: bytes) -> bool:
        """Whether there is a value, or something in a queue."""
        return key in self.values or key in self._queues

    def has_all(self, keys: Iterable[bytes]) -> bool:
        values, queues = self.values, self._queues
        return all(key in values or key in queues for key in keys)

    def wait(self, waiter: Waiter, keys: Iterable[bytes]) -> bool:
        """True when all are there. Else the waiter is woken once each missing one has come, be it gone by then."""
        self.cancel(waiter)
        missing = [key for key in dict.fromkeys(keys) if not self.has(key)]
        if not missing:
            return True
        waiter.keys = tuple(missing)
        waiter.missing = len(missing)
        for key in missing:
            self._waiting.setdefault(key, {})[waiter] = None
        return False

    def barrier(self, waiter: Waiter, key: bytes, world: int) -> bool:
        """Count an arrival under the key; True for the one that fills the world, who wakes all others."""
        found = self.values.get(key)
        count = (0 if found is None else _number(key, found)) + 1
        self._put(key, b"%d" % count)
        self.cancel(waiter)
        if count >= world:
            self._wake_all(key)
            return True
        waiter.keys = (key,)
        waiter.missing = 1
        self._waiting.setdefault(key, {})[waiter] = None
        return False

    def cancel(self, waiter: Waiter) -> None:
        """The waiter waits for nothing any more."""
        if not waiter.missing:
            return
        for key in waiter.keys:
            waiting = self._waiting.get(key)
            if waiting is not None and waiting.pop(waiter, self) is None and not waiting:
                del self._waiting[key]
        waiter.keys, waiter.missing = (), 0

    def _wake_all(self, key: bytes) -> None:
        for waiter in tuple(self._waiting.get(key, ())):
            if waiter in self._waiting.get(key, ()):  # and has not been cancelled by one woken before
                self._arrived(key, waiter)

    def _arrived(self, key: bytes, waiter: Waiter) -> None:
        waiting = self._waiting[key]
        del waiting[waiter]
        if not waiting:
            del self._waiting[key]
        waiter.missing -= 1
        if not waiter.missing:
            waiter.keys = ()
            waiter.wake()

    # ---- room ---------------------------------------------------------------------------------------------

    def _put(self, key: bytes, value: bytes) -> None:
        found = self.values.get(key)
        growth = ENTRY_BYTES + len(key) + len(value) if found is None else len(value) - len(found)
        self._grow(key, growth)
        self.values[key] = value

    def _grow(self, key: bytes, growth: int) -> None:
        if self.held_bytes + growth > self._max_bytes:
            raise BadCommand(f"the store would hold more than {self._max_bytes} bytes with key {key[:64]!a}")
        self.held_bytes += growth


def _number(key: bytes, value: bytes) -> int:
    found = _NUMBER.match(value)
    number = int(found[1] + found[2]) if found is not None and len(found[2]) <= _I64_DIGITS else None
    if number is None or not _I64_MIN <= number <= _I64_MAX:
        raise BadCommand(f"key {key[:64]!a} holds {value[:32]!a}, not a 64-bit number")
    return number
