"""The same random calls of torch's own clients on torch's server and on the one under test: the same answers.

Three clients, one of them within a prefix. A call that waits is known to have reached the server before the next is
made, and only what must time out has a short time-out, so no answer depends on time.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .clients import Clients, StoreError
from .raw import PATIENCE_S, set_
from .servers import RunningStore, StoreHost
from .tries import TIMEOUT_S, tries

pytestmark = [pytest.mark.torch, pytest.mark.rule("I5"), pytest.mark.timeout(TIMEOUT_S)]
TRIES = tries(25, 1000)
WHO = [0, 1, 2]
GIVES_UP = timedelta(milliseconds=20)


@dataclass(frozen=True)
class Call:
    """One client's next call."""

    who: int
    op: str
    args: tuple[Any, ...] = ()


KEY = st.sampled_from(["k", "l", "m"])
ABSENT = st.sampled_from(["k", "l", "m", "none"])
VALUE = st.sampled_from([b"", b"v", b"\x00\xff", b"12", b" 7x"])
NUMBER = st.sampled_from(["n", "o"])
QUEUE = st.sampled_from(["q", "r"])
EVENT = st.sampled_from(["e", "f"])


def _call(op: str, *args: st.SearchStrategy[Any]) -> st.SearchStrategy[Call]:
    return st.builds(Call, st.sampled_from(WHO), st.just(op), st.tuples(*args))


def _keys(of: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(of, max_size=3)


# Keys of numbers and events are never deleted, so that one who waits for them can be known to be woken, or not yet.
# "never" is never set: a wait for it gives up, however slow the machine.
CALLS = st.one_of(
    _call("set", KEY, VALUE),
    _call("append", KEY, VALUE),
    _call("compare_set", ABSENT, VALUE, VALUE),
    _call("delete_key", ABSENT),
    _call("check", _keys(ABSENT)),
    _call("multi_set", st.just(["k", "l"]), st.tuples(VALUE, VALUE).map(list)),
    _call("add", NUMBER, st.sampled_from([0, 1, -5, 2**63 - 1])),
    _call("set", NUMBER, st.sampled_from([b"12", b" 7x", b"-3"])),
    _call("get", NUMBER | EVENT),
    _call("get", EVENT),
    _call("wait", _keys(EVENT)),
    _call("multi_get", _keys(EVENT | NUMBER)),
    _call("set", EVENT, VALUE),
    _call("wait", _keys(ABSENT | QUEUE).map(lambda keys: [*keys, "never"]), st.just(GIVES_UP)),
    _call("queue_push", QUEUE, VALUE),
    _call("queue_pop", QUEUE, st.just(False)),
    _call("queue_len", QUEUE),
    _call("check", st.lists(QUEUE, max_size=2)),
    _call("barrier", st.just("b"), st.just(2)),
    _call("num_keys"),
    _call("list_keys"),
)
Answer = tuple[str, Any]


class _Side:
    """The clients of one store, new and empty. Client 2 sees the keys within a prefix."""

    def __init__(self, clients: Clients, store: RunningStore) -> None:
        self._store = store
        self._clients = [clients.client(store, *prefixes) for prefixes in ((), (), ("inner",))]
        self._waiting: dict[int, Future[Any]] = {}

    def call(self, call: Call) -> Answer:
        return _answer(self._clients[call.who].begin(call.op, *call.args))

    def begin(self, call: Call) -> None:
        """Make a call that has to wait, and see it do so."""
        self._waiting[call.who] = self._clients[call.who].begin(call.op, *call.args)
        self._clients[call.who].asleep()

    def still_waits(self, who: int) -> bool:
        return not self._waiting[who].done()

    def end(self, who: int) -> Answer:
        """The answer of what waited so far."""
        return _answer(self._waiting.pop(who))

    def close(self) -> None:
        """Let everybody go who still waits, by all that anybody may wait for."""
        with self._store.raw() as one:
            for prefix in (b"/", b"/inner/"):
                for key in (b"e", b"f", b"n", b"o", b"b", b"b/last_member"):
                    one.exchange(set_(prefix + key, b"1"))
        for client in self._clients:
            client.close()


def _answer(future: Future[Any]) -> Answer:
    try:
        result = future.result(PATIENCE_S)
    except StoreError as error:
        return error.kind, "timeout" in error.text
    if isinstance(result, list) and result and isinstance(result[0], str):
        return "list", sorted(result)
    return "answer", result


class _Model:
    """Who has to wait, and until when: which of the keys that stay there are, and how many have arrived."""

    def __init__(self) -> None:
        self._there: set[tuple[bool, str]] = set()
        self._arrived = {False: 0, True: 0}
        self.waiting: dict[int, Call] = {}

    def made(self, call: Call) -> None:
        inner = call.who == 2
        if call.op in ("set", "add"):
            self._there.add((inner, call.args[0]))
        if call.op == "barrier":
            self._arrived[inner] += 1

    def waits(self, call: Call) -> bool:
        inner = call.who == 2
        if call.op == "barrier":
            return self._arrived[inner] < 2
        if call.op not in ("get", "wait", "multi_get") or call.args[-1] == GIVES_UP:
            return False
        keys = [call.args[0]] if call.op == "get" else call.args[0]
        return not all((inner, key) in self._there for key in keys)

    def woken(self) -> list[int]:
        woken = [who for who, call in sorted(self.waiting.items()) if not self.waits(call)]
        for who in woken:
            del self.waiting[who]
        return woken


def _follow(calls: list[Call], sides: list[_Side]) -> None:
    model = _Model()
    for call in calls:
        free = [who for who in WHO if who not in model.waiting]
        if not free:
            break
        if call.who not in free:
            call = replace(call, who=free[0])
        model.made(call)
        if model.waits(call):
            model.waiting[call.who] = call
            for side in sides:
                side.begin(call)
        else:
            expected, answer = (side.call(call) for side in sides)
            assert answer == expected, call
        for who in model.woken():
            expected, answer = (side.end(who) for side in sides)
            assert answer == expected, (call, who)
        for who in model.waiting:
            assert all(side.still_waits(who) for side in sides), (call, who)


@TRIES
@given(calls=st.lists(CALLS, min_size=15, max_size=40))
def test_calls_have_the_same_answers(calls: list[Call], clients: Clients, oracle: StoreHost, server: StoreHost) -> None:
    sides = [_Side(clients, host.open()) for host in (oracle, server)]
    try:
        _follow(calls, sides)
    finally:
        for side in sides:
            side.close()
