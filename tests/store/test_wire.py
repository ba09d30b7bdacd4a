"""What torch 2.13's server does in the corners of its protocol, byte by byte, and whether ours does it.

A scene is played on raw connections. What it expects was observed on torch's server, not read from its source.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from .raw import (
    CANCEL_WAIT,
    HELLO,
    LIST_KEYS,
    NOT_READY,
    NUM_KEYS,
    READY,
    STOP_WAITING,
    WAIT_CANCELED,
    Reply,
    add,
    append,
    barrier,
    blob,
    check,
    compare_set,
    delete,
    get,
    i64,
    multi_get,
    multi_set,
    pop,
    push,
    queue_len,
    set_,
    wait,
)
from .servers import StoreHost
from .stage import Stage

pytestmark = [pytest.mark.torch, pytest.mark.rule("I5")]


@dataclass(frozen=True)
class Step:
    """What one connection sends in one piece, and what every connection then receives (`cut`: who is cut off)."""

    who: str
    sent: bytes
    received: dict[str, bytes]
    cut: bool = False


def says(who: str, *sent: bytes, to: bytes = b"", cut: bool = False, **others: bytes) -> Step:
    received = {name: data for name, data in {who: to, **others}.items() if data}
    return Step(who, b"".join(sent), received, cut)


SCENES = {
    # compare_set
    "compare_set creates": [
        says("b", wait(b"k")),
        says("a", compare_set(b"k", b"", b""), to=blob(b""), b=STOP_WAITING),
        says("a", check(b"k"), compare_set(b"k", b"", b"z"), get(b"k"), to=READY + blob(b"z") * 2),
    ],
    "compare_set on a key there counts no key twice": [
        says("a", set_(b"k", b"1")),
        says("b", wait(b"k", b"other")),
        says("a", compare_set(b"k", b"no", b"2"), compare_set(b"k", b"1", b"2"), to=blob(b"1") + blob(b"2")),
        says("a", set_(b"other", b""), b=STOP_WAITING),
    ],
    # add
    "add stores text and wakes": [
        says("b", wait(b"n")),
        says("a", add(b"n", 0), get(b"n"), to=i64(0) + blob(b"0"), b=STOP_WAITING),
        says("a", add(b"n", 2**63 - 1), add(b"n", 1), to=i64(2**63 - 1) + i64(-(2**63))),
        says("a", get(b"n"), to=blob(b"-9223372036854775808")),
        says("a", add(b"n", -1), get(b"n"), to=i64(2**63 - 1) + blob(b"9223372036854775807")),
    ],
    "add on a text cuts, and what was pipelined before is answered": [
        says("a", set_(b"k", b"text")),
        says("b", add(b"n", 1), add(b"k", 1), add(b"n", 1), to=i64(1), cut=True),
        says("a", get(b"k"), get(b"n"), to=blob(b"text") + blob(b"1")),
    ],
    # get, append, several keys, empty names
    "get of a missing key is empty": [
        says("a", get(b"x"), multi_get(b"x", b"y"), multi_get(), to=blob(b"") * 3),
        says("a", NUM_KEYS, LIST_KEYS, to=i64(0) + i64(0)),
    ],
    "append and multi_set wake": [
        says("b", wait(b"k")),
        says("c", wait(b"x", b"y", b"x")),
        says("a", append(b"k", b""), b=STOP_WAITING),
        says("a", multi_set((b"x", b"1"), (b"y", b"2"), (b"x", b"3")), c=STOP_WAITING),
        says("a", multi_get(b"x", b"y", b"k"), to=blob(b"3") + blob(b"2") + blob(b"")),
    ],
    "nothing": [says("a", multi_set(), check(), wait(), to=READY + STOP_WAITING)],
    "the empty key is a key": [
        says("a", set_(b"", b"v"), get(b""), check(b""), to=blob(b"v") + READY),
        says("a", LIST_KEYS, to=i64(1) + blob(b"")),
        says("a", delete(b""), delete(b""), NUM_KEYS, to=i64(1) + i64(0) + i64(0)),
    ],
    # waits
    "a key awaited and set may be deleted again": [
        says("b", wait(b"k1", b"k2")),
        says("a", set_(b"k1", b"")),
        says("a", delete(b"k1"), to=i64(1)),
        says("a", set_(b"k2", b""), b=STOP_WAITING),
        says("a", set_(b"k1", b"")),
    ],
    "a key named twice is awaited once": [
        says("b", wait(b"k", b"k")),
        says("a", set_(b"k", b""), b=STOP_WAITING),
        says("a", set_(b"k", b"")),
    ],
    "a wait does not hold up what is pipelined after it": [
        says("a", wait(b"k"), get(b"k"), add(b"n", 1), to=blob(b"") + i64(1)),
        says("b", set_(b"k", b"v"), a=STOP_WAITING),
        says("a", wait(b"j"), set_(b"j", b"v"), get(b"j"), to=STOP_WAITING + blob(b"v")),
    ],
    "cancel": [
        says("a", CANCEL_WAIT, to=WAIT_CANCELED),
        says("a", CANCEL_WAIT, CANCEL_WAIT, to=WAIT_CANCELED * 2),
        says("a", wait(b"k")),
        says("b", wait(b"k")),
        says("a", CANCEL_WAIT, to=WAIT_CANCELED),
        says("b", set_(b"k", b""), to=STOP_WAITING),
        says("a", wait(b"k"), CANCEL_WAIT, to=STOP_WAITING + WAIT_CANCELED),
    ],
    # queues
    "an empty queue is no key": [
        says("a", pop(b"q"), queue_len(b"q"), check(b"q"), get(b"q"), to=i64(0) * 2 + NOT_READY + blob(b"")),
        says("a", push(b"q", b"1"), push(b"q", b""), queue_len(b"q"), check(b"q"), to=i64(2) + READY),
        says("a", get(b"q"), NUM_KEYS, LIST_KEYS, delete(b"q"), queue_len(b"q"), to=blob(b"") + i64(0) * 3 + i64(2)),
        says("a", pop(b"q"), pop(b"q"), pop(b"q"), to=i64(2) + blob(b"1") + i64(1) + blob(b"") + i64(0)),
        says("a", check(b"q"), wait(b"q"), CANCEL_WAIT, to=NOT_READY + WAIT_CANCELED),
    ],
    "a queue and a value of one name": [
        says("a", push(b"q", b"x"), set_(b"q", b"plain"), get(b"q"), queue_len(b"q"), to=blob(b"plain") + i64(1)),
        says("a", NUM_KEYS, LIST_KEYS, to=i64(1) * 2 + blob(b"q")),
        says("a", delete(b"q"), queue_len(b"q"), check(b"q"), to=i64(1) * 2 + READY),
        says("a", pop(b"q"), check(b"q"), to=i64(1) + blob(b"x") + NOT_READY),
    ],
    "each push wakes one, in the order of their waits": [
        says("b", wait(b"q")),
        says("a", wait(b"q")),
        says("c", wait(b"q")),
        says("d", push(b"q", b"1"), b=STOP_WAITING),
        says("d", push(b"q", b"2"), a=STOP_WAITING),
        says("d", push(b"q", b"3"), c=STOP_WAITING),
        says("d", push(b"q", b"4")),
    ],
    "a push passes over who gave up": [
        says("a", wait(b"q")),
        says("b", wait(b"q")),
        says("a", CANCEL_WAIT, to=WAIT_CANCELED),
        says("c", push(b"q", b"1"), b=STOP_WAITING),
    ],
    "a push goes on to one who waits for nothing else": [
        says("a", wait(b"q", b"k")),
        says("b", wait(b"q")),
        says("c", push(b"q", b"1"), b=STOP_WAITING),
        says("c", set_(b"k", b""), a=STOP_WAITING),
    ],
    "a set wakes all who wait for a queue": [
        says("a", wait(b"q")),
        says("b", wait(b"q")),
        says("c", set_(b"q", b"1"), a=STOP_WAITING, b=STOP_WAITING),
    ],
    "a wait for a queue and a key": [
        says("a", wait(b"q", b"k")),
        says("c", set_(b"k", b"")),
        says("c", push(b"q", b""), a=STOP_WAITING),
        says("a", wait(b"p", b"j")),
        says("c", push(b"p", b"")),
        says("c", set_(b"j", b""), a=STOP_WAITING),
    ],
    # barriers
    "a barrier stores the count of arrivals": [
        says("a", barrier(b"b", 2)),
        says("c", get(b"b"), check(b"b"), NUM_KEYS, to=blob(b"1") + READY + i64(1)),
        says("b", barrier(b"b", 2), to=STOP_WAITING, a=STOP_WAITING),
        says("c", get(b"b"), LIST_KEYS, to=blob(b"2") + i64(1) + blob(b"b")),
        says("c", barrier(b"b", 2), get(b"b"), to=STOP_WAITING + blob(b"3")),
    ],
    "a barrier for nobody": [
        says("a", barrier(b"b", 0), barrier(b"b", -1), barrier(b"b", -(2**63)), to=STOP_WAITING * 3),
        says("a", get(b"b"), to=blob(b"3")),
    ],
    "a barrier on a text cuts off who arrives": [
        says("a", set_(b"b", b"text"), set_(b"c", b"")),
        says("b", barrier(b"b", 2), cut=True),
        says("b", barrier(b"c", 2), cut=True),
        says("a", get(b"b"), get(b"c"), to=blob(b"text") + blob(b"")),
    ],
    "a barrier counts on from a number": [
        says("a", set_(b"b", b" 1x"), barrier(b"b", 3)),
        says("b", get(b"b"), barrier(b"b", 3), to=blob(b"2") + STOP_WAITING, a=STOP_WAITING),
        says("a", set_(b"c", b"5"), barrier(b"c", 2), get(b"c"), to=STOP_WAITING + blob(b"6")),
    ],
    "who left a barrier has arrived": [
        says("a", barrier(b"b", 2)),
        says("a", CANCEL_WAIT, get(b"b"), to=WAIT_CANCELED + blob(b"1")),
        says("b", barrier(b"b", 2), to=STOP_WAITING),
        says("c", barrier(b"b", 2), to=STOP_WAITING),
    ],
    "worlds of different size": [
        says("a", barrier(b"b", 3)),
        says("b", barrier(b"b", 2), to=STOP_WAITING, a=STOP_WAITING),
        says("c", barrier(b"b", 3), to=STOP_WAITING),
    ],
    "who waits for a barrier's key goes with the last arrival": [
        says("c", wait(b"b")),
        says("a", barrier(b"b", 2)),
        says("d", wait(b"b"), to=STOP_WAITING),
        says("b", barrier(b"b", 2), to=STOP_WAITING, a=STOP_WAITING, c=STOP_WAITING),
    ],
    "an arrival does not count a key that another awaits": [
        says("c", wait(b"b", b"k")),
        says("a", barrier(b"b", 2)),
        says("b", barrier(b"b", 2), to=STOP_WAITING, a=STOP_WAITING),
        says("b", set_(b"k", b""), c=STOP_WAITING),
    ],
    "a barrier is passed by whatever writes its key": [
        says("a", barrier(b"b", 2)),
        says("c", set_(b"b", b"1"), a=STOP_WAITING),
        says("a", barrier(b"d", 2)),
        says("c", add(b"d", 1), to=i64(2), a=STOP_WAITING),
        says("a", barrier(b"e", 2)),
        says("c", push(b"e", b""), a=STOP_WAITING),
    ],
    "a barrier whose key is deleted counts anew": [
        says("a", barrier(b"b", 2)),
        says("c", delete(b"b"), to=i64(1)),
        says("b", barrier(b"b", 2)),
        says("c", barrier(b"b", 2), to=STOP_WAITING, a=STOP_WAITING, b=STOP_WAITING),
    ],
    # greeting and garbage
    "a second greeting cuts": [says("a", HELLO, cut=True), says("a", NUM_KEYS, to=i64(0))],
    "an unknown command cuts": [
        says("a", b"\x13", cut=True),
        says("a", b"\xff", cut=True),
        says("a", add(b"n", 1), b"\x80", add(b"n", 1), to=i64(1), cut=True),
        says("b", get(b"n"), to=blob(b"1")),
    ],
    "who is cut no longer waits": [
        says("a", wait(b"q"), b"\xff", cut=True),
        says("b", wait(b"q")),
        says("c", push(b"q", b"1"), b=STOP_WAITING),
    ],
}

ODDITIES = {
    # A connection has one count of what it waits for: a second wait begins it anew, and any key of either counts down.
    "compare_set ends waits for a key that it does not make": [
        says("b", wait(b"k")),
        says("a", compare_set(b"k", b"x", b"v"), to=blob(b"x"), b=STOP_WAITING),
        says("a", check(b"k"), to=NOT_READY),
    ],
    "two waits of one connection have one answer": [
        says("a", wait(b"k1")),
        says("a", wait(b"k2")),
        says("b", set_(b"k1", b""), a=STOP_WAITING),
        says("b", set_(b"k2", b"")),
    ],
    "the keys of two waits count for the second": [
        says("a", wait(b"k1")),
        says("a", wait(b"k2", b"k3")),
        says("b", set_(b"k1", b"")),
        says("b", set_(b"k2", b""), a=STOP_WAITING),
        says("b", set_(b"k3", b"")),
    ],
    "an answer to a second wait leaves the first": [
        says("a", wait(b"k1")),
        says("a", wait(), to=STOP_WAITING),
        says("b", set_(b"k1", b""), a=STOP_WAITING),
    ],
    "arriving twice is two arrivals": [
        says("a", barrier(b"b", 2)),
        says("a", barrier(b"b", 2), to=STOP_WAITING * 2),
    ],
    "the count of a barrier wraps around": [
        says("a", set_(b"b", b"9223372036854775807"), barrier(b"b", 2), get(b"b"), to=blob(b"-9223372036854775808")),
    ],
    "two barriers of one connection have one answer": [
        says("a", barrier(b"b1", 2)),
        says("a", barrier(b"b2", 2)),
        says("b", barrier(b"b1", 2), to=STOP_WAITING, a=STOP_WAITING),
        says("b", barrier(b"b2", 2), to=STOP_WAITING),
    ],
    "a barrier and a wait of one connection have one answer": [
        says("a", barrier(b"b", 2)),
        says("a", wait(b"k")),
        says("b", set_(b"k", b""), a=STOP_WAITING),
        says("b", barrier(b"b", 2), to=STOP_WAITING),
    ],
    # A push does not strike its waiter off the queue's list, so a later push counts down what it waits for then.
    "a push ends the later wait of who was woken by one before": [
        says("a", wait(b"q")),
        says("b", push(b"q", b"1"), a=STOP_WAITING),
        says("a", wait(b"other")),
        says("b", push(b"q", b"2"), a=STOP_WAITING),
        says("b", set_(b"other", b"")),
    ],
    "a cancel strikes it off": [
        says("a", wait(b"q")),
        says("b", push(b"q", b"1"), a=STOP_WAITING),
        says("a", CANCEL_WAIT, to=WAIT_CANCELED),
        says("a", wait(b"other")),
        says("b", push(b"q", b"2")),
    ],
    "a wait for a queue that holds something and a missing key": [
        says("a", push(b"q", b"1")),
        says("b", wait(b"q", b"k")),
        says("a", set_(b"k", b"")),
        says("a", push(b"q", b"2"), b=STOP_WAITING),
    ],
    "two pushes count for two keys": [
        says("a", wait(b"q", b"k")),
        says("b", push(b"q", b"1")),
        says("b", push(b"q", b"2"), a=STOP_WAITING),
        says("b", set_(b"k", b"")),
    ],
}
"""What torch's clients do not provoke, but for waiting for something else after they have popped from a queue."""

DEVIATIONS = frozenset(
    {
        # What waits on a connection is one thing at a time: a second wait replaces the first.
        "two waits of one connection have one answer",
        "the keys of two waits count for the second",
        "an answer to a second wait leaves the first",
        "arriving twice is two arrivals",
        "two barriers of one connection have one answer",
        # A wait ends when all of its keys have come, never for another's, and each counts once.
        "a push ends the later wait of who was woken by one before",
        "a wait for a queue that holds something and a missing key",
        "two pushes count for two keys",
    }
)
"""The oddities of torch's that ours does not share."""


def _play(host: StoreHost, steps: list[Step]) -> None:
    with Stage(host.open(), "abcd") as stage:
        for number, step in enumerate(steps):
            expected = {name: Reply(data) for name, data in step.received.items()}
            if step.cut:
                expected[step.who] = Reply(step.received.get(step.who, b""), cut=True)
            assert stage.do(step.who, step.sent) == expected, f"step {number}"


@pytest.mark.parametrize("name", SCENES)
def test_scene(server: StoreHost, name: str) -> None:
    _play(server, SCENES[name])


@pytest.mark.parametrize("name", ODDITIES)
def test_oddity(server: StoreHost, server_kind: str, name: str, request: pytest.FixtureRequest) -> None:
    if server_kind == "bridge" and name in DEVIATIONS:
        request.applymarker(pytest.mark.xfail(reason="ours does not share it", raises=AssertionError, strict=True))
    _play(server, ODDITIES[name])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(
            (text, 12)
            for text in (b"12", b" 12", b"\t\n\v\f\r 12", b"+12", b"12abc", b"12 ", b"0012", b"12\0", b"12.9")
        ),
        (b"-5", -5),
        (b"-0", 0),
        (b"0x10", 0),
        (b"1_000", 1),
        (b"9223372036854775807", 2**63 - 1),
        (b"-9223372036854775808", -(2**63)),
        *((text, None) for text in (b"", b" ", b"abc", b"-", b"+", b"+-5", b"--5", b"\0" + b"12", b"\xc2\xa012")),
        *((text, None) for text in (b"9223372036854775808", b"-9223372036854775809", b"9" * 100, b"\xd9\xa1")),
    ],
)
def test_add_reads_a_number_as_strtoll_does(server: StoreHost, text: bytes, number: int | None) -> None:
    """White space of C, a sign, ASCII digits within 64 bits; anything may follow. Else the client is cut off."""
    _play(
        server,
        [says("a", set_(b"n", text)), says("b", add(b"n", 0), cut=True), says("a", get(b"n"), to=blob(text))]
        if number is None
        else [
            says("a", set_(b"n", text)),
            says("b", add(b"n", 0), get(b"n"), to=i64(number) + blob(str(number).encode())),
        ],
    )


def test_commands_may_come_in_any_pieces(server: StoreHost) -> None:
    """Byte by byte, once the greeting is done; and many in one piece."""
    store = server.open()
    sent = set_(b"k", b"v") + get(b"k") + add(b"n", 3) + check(b"k", b"n") + multi_get(b"k", b"n")
    expected = blob(b"v") + i64(3) + READY + blob(b"v") + blob(b"3")
    with store.raw() as one, store.raw() as other:
        for byte in sent:
            one.send(bytes([byte]))
            other.settled()
        assert one.settled() == Reply(expected)
        many = one.exchange(*[get(b"k")] * 10_000)
        assert many == Reply(blob(b"v") * 10_000)


def test_a_client_that_closes_its_half_is_answered_what_it_asked(server: StoreHost) -> None:
    store = server.open()
    with store.raw() as one, store.raw() as other:
        one.send(set_(b"k", b"v") + get(b"k"))
        one.close_half()
        assert one.until_cut() == blob(b"v")
        assert other.exchange(get(b"k")) == Reply(blob(b"v"))


def test_a_waiter_that_hung_up_is_passed_over(server: StoreHost) -> None:
    with Stage(server.open(), "abc") as stage:
        stage.do("a", wait(b"q"))
        stage.do("b", wait(b"q"))
        stage.hang_up("a")
        assert stage.do("c", push(b"q", b"1")) == {"b": Reply(STOP_WAITING)}


def test_many_who_wait_are_woken_once_each(server: StoreHost) -> None:
    """One set, 500 answers of one byte; nothing follows when the key is set again."""
    store = server.open()
    with ExitStack() as opened:
        waiters = [opened.enter_context(store.raw()) for _ in range(500)]
        for one in waiters:
            assert one.exchange(wait(b"k")) == Reply(b"")
        with store.raw() as other:
            other.exchange(set_(b"k", b"v"), set_(b"k", b"w"), delete(b"k"), set_(b"k", b"x"))
        assert {one.settled() for one in waiters} == {Reply(STOP_WAITING)}
