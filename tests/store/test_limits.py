"""Each server's limits on names, values and numbers of keys, and what it does with those who speak otherwise.

Beyond a limit the connection is cut, and nobody else notices. Bytes are sent raw; torch's client has a test of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .clients import Client, StoreError
from .raw import (
    HELLO,
    LIST_KEYS,
    MAX_KEY,
    MAX_KEYS,
    MAX_VALUE,
    NOT_READY,
    NUM_KEYS,
    READY,
    STOP_WAITING,
    Op,
    Reply,
    add,
    append,
    barrier,
    blob,
    check,
    command,
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
    u64,
    wait,
)
from .servers import RunningStore

pytestmark = [pytest.mark.torch, pytest.mark.rule("I5")]
LARGEST = b"v" * MAX_VALUE
LONGEST = b"k" * MAX_KEY
CUT = Reply(b"", cut=True)


def _refused(store: RunningStore, sent: bytes, keys_left: int = 0) -> None:
    """A connection that sends this is cut off without a word; another is answered as if nothing had been."""
    with store.raw() as other, store.raw() as one:
        other.send(wait(b"later"))
        assert one.exchange(sent) == CUT
        with store.raw() as third:
            assert third.exchange(NUM_KEYS, set_(b"later", b"")) == Reply(i64(keys_left))
        assert other.settled() == Reply(STOP_WAITING)


def test_the_largest_value(connect: Callable[..., Client]) -> None:
    """C093: 8 MiB through torch's client, there and back."""
    one, other = connect(), connect()
    value = bytes(range(256)) * (MAX_VALUE // 256)
    one.set("k", value)
    assert other.get("k") == value
    one.queue_push("q", value)
    assert other.queue_pop("q") == value


def test_a_value_too_large_cuts_off_that_client_alone(connect: Callable[..., Client]) -> None:
    """C093: one byte more; the call that notices may be the next one, since `set` awaits no answer."""
    one, other = connect(), connect()
    other.set("k", "before")

    def set_and_use() -> None:
        one.set("k", b"v" * (MAX_VALUE + 1))
        one.get("k")

    with pytest.raises(StoreError) as cut:
        set_and_use()
    assert cut.value.kind == "DistNetworkError"
    assert other.get("k") == b"before"


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (set_(LONGEST, LARGEST) + get(LONGEST), blob(LARGEST)),
        (compare_set(LONGEST, b"", LARGEST), blob(LARGEST)),
        (multi_set((LONGEST, b"v"), (b"k", LARGEST)) + multi_get(LONGEST, b"k"), blob(b"v") + blob(LARGEST)),
        (push(LONGEST, LARGEST) + queue_len(LONGEST) + pop(LONGEST), i64(1) * 2 + blob(LARGEST)),
        (append(b"k", LARGEST) + append(b"k", LARGEST) + get(b"k"), blob(LARGEST * 2)),
        (add(LONGEST, 1) + barrier(LONGEST, 2) + check(LONGEST), i64(1) + STOP_WAITING + READY),
        (set_(LONGEST, b"") + wait(LONGEST) + delete(LONGEST), STOP_WAITING + i64(1)),
        (check(*[b"k"] * MAX_KEYS), NOT_READY),
        (set_(b"k", b"") + wait(*[b"k"] * MAX_KEYS), STOP_WAITING),
        (multi_get(*[b"k"] * MAX_KEYS), blob(b"") * MAX_KEYS),
        (multi_set(*[(b"k", b"")] * MAX_KEYS) + NUM_KEYS, i64(1)),
    ],
    ids=lambda one: f"{one[:1].hex()}-{len(one)}",
)
def test_at_the_limit_all_is_well(store: RunningStore, sent: bytes, received: bytes) -> None:
    """A key of 8 KiB, a value of 8 MiB (two of them appended to one another), 131072 keys."""
    with store.raw() as one:
        assert one.exchange(sent) == Reply(received)


TOO_LONG = u64(MAX_KEY + 1)
KEYED = [one for one in Op if one not in {Op.VALIDATE, Op.PING, Op.GETNUMKEYS, Op.LIST_KEYS, Op.CANCEL_WAIT}]
MANY = [Op.CHECK, Op.WAIT, Op.MULTI_GET, Op.MULTI_SET]


@pytest.mark.parametrize("size", [MAX_KEY + 1, 2**31, 2**32 + 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("op", KEYED, ids=lambda one: one.name)
def test_a_key_too_long_is_refused_by_its_length(store: RunningStore, op: Op, size: int) -> None:
    """Before any of it has come: nothing is kept for a length that is too large."""
    first = u64(2) if op in MANY else b""
    _refused(store, command(op, first, u64(size)))


@pytest.mark.parametrize("size", [MAX_VALUE + 1, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize(
    "before",
    [
        command(Op.SET, blob(b"k")),
        command(Op.APPEND, blob(b"k")),
        command(Op.COMPARE_SET, blob(b"k")),
        command(Op.COMPARE_SET, blob(b"k"), blob(b"")),
        command(Op.QUEUE_PUSH, blob(b"k")),
        command(Op.MULTI_SET, u64(1), blob(b"k")),
    ],
    ids=lambda one: one[:1].hex() + f"-{len(one)}",
)
def test_a_value_too_large_is_refused_by_its_length(store: RunningStore, before: bytes, size: int) -> None:
    _refused(store, before + u64(size))


@pytest.mark.parametrize("count", [MAX_KEYS + 1, 2**32, 2**64 - 1])
@pytest.mark.parametrize("op", MANY, ids=lambda one: one.name)
def test_too_many_keys_are_refused_by_their_number(store: RunningStore, op: Op, count: int) -> None:
    _refused(store, command(op, u64(count)))


def test_the_second_key_of_several_may_be_too_long(store: RunningStore) -> None:
    for op in (Op.CHECK, Op.WAIT, Op.MULTI_GET):
        with store.raw() as one:
            assert one.exchange(command(op, u64(2), blob(b"k"), TOO_LONG)) == CUT


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.0\r\n\r\n" + b"\0" * 64,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x5a" * 501,
        b"\0" * 64,
        b"\xff" * 64,
        b"\0\xce\xf7\x85\x3d" + b"\0" * 64,
        HELLO[::-1] + b"\xff" * 64,
    ],
    ids=["http", "tls", "zeros", "ones", "wrong magic", "backwards"],
)
def test_strangers_harm_nobody(store: RunningStore, sent: bytes) -> None:
    """C098: they may be cut off or left alone, but are told nothing, and others are served.

    torch's server leaves the first piece that a stranger sends unanswered and the connection open.
    """
    with store.raw() as other, store.raw(greet=False) as stranger:
        stranger.send(sent)
        assert other.exchange(set_(b"k", b""), NUM_KEYS, LIST_KEYS) == Reply(i64(1) * 2 + blob(b"k"))
        stranger.close_half()
        assert stranger.until_cut() == b""
        assert other.exchange(get(b"k")) == Reply(blob(b""))


def test_many_idle_strangers_delay_nobody(store: RunningStore) -> None:
    """C098: 200 connections that say nothing, and 200 that greet and hang up in the middle of a command."""
    strangers = [store.raw(greet=False) for _ in range(200)]
    for number in range(200):
        with store.raw() as one:
            one.send(set_(b"k", b"v" * 100)[: number % 100])
    with store.raw() as other:
        assert other.exchange(add(b"n", 1), check(b"k")) == Reply(i64(1) + NOT_READY)
    for one in strangers:
        one.close()


def test_who_does_not_read_delays_nobody(store: RunningStore) -> None:
    """128 MiB of answers are asked for and not taken; others are served; then all of it is there to be read."""
    asked = 128
    with store.raw() as idle, store.raw() as other:
        other.exchange(set_(b"k", b"v" * (1 << 20)))
        idle.send(get(b"k") * asked)
        for number in range(100):
            assert other.exchange(add(b"n", 1)) == Reply(i64(number + 1))
        taken = idle.receive(asked * (8 + (1 << 20)))
        assert len(taken) == asked * (8 + (1 << 20))
        assert idle.settled() == Reply(b"")
