"""torch's client against each server: what is set is got, added to, compared, listed and deleted."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .clients import Client, StoreError
from .servers import RunningStore

pytestmark = [pytest.mark.torch, pytest.mark.rule("I5")]
Connect = Callable[..., Client]

VALUES = [b"", b"v", b"\x00\xff\n\x00abc", bytes(range(256)), "é\n".encode(), b"0" * 70_000]
KEYS = ["k", "", "k with space/é\n", "a/b/../c", "\x00", "k" * 8191, b"\x00\xff\xfe"]


@pytest.mark.parametrize("value", VALUES, ids=lambda one: f"{one[:8]!r}-{len(one)}")
def test_a_value_comes_back_byte_by_byte(connect: Connect, value: bytes) -> None:
    """C093: empty, NUL, newline, all bytes; for the client that set it and for another."""
    one, other = connect(), connect()
    one.set("k", value)
    assert one.get("k") == value
    assert other.get("k") == value
    assert other.multi_get(["k", "k"]) == [value, value]


@pytest.mark.parametrize("key", KEYS, ids=lambda one: f"{one[:8]!r}-{len(one)}")
def test_any_key_is_a_key(client: Client, key: str | bytes) -> None:
    """C093: a key may be empty, have spaces, a newline, a NUL, no valid UTF-8; up to 8191 and torch's own "/"."""
    client.set(key, "v")
    assert client.get(key) == b"v"
    assert client.check([key])
    assert client.add("n", 1) == 1
    assert client.delete_key(key)
    assert not client.check([key])


def test_the_last_value_counts(connect: Connect) -> None:
    """A set is not answered: only what the same connection reads next says that it has come before another's."""
    one, other = connect(), connect()
    one.set("k", "1")
    assert one.get("k") == b"1"
    other.set("k", "")
    assert other.get("k") == b""
    assert one.get("k") == b""
    assert one.num_keys() == 1


def test_compare_set_has_three_answers(client: Client) -> None:
    """C091: it creates only where nothing is expected; with a value expected of a missing key it says that value."""
    assert client.compare_set("k", "", "v1") == b"v1"
    assert client.compare_set("k2", "x", "v1") == b"x"
    assert not client.check(["k2"])
    assert client.compare_set("k", "zz", "v2") == b"v1"
    assert client.get("k") == b"v1"
    assert client.compare_set("k", "v1", "v2") == b"v2"
    assert client.get("k") == b"v2"
    assert client.compare_set("k", "", "v3") == b"v2"


def test_compare_set_compares_bytes(client: Client) -> None:
    """C091: an empty value is a value: it is there, and equals what an empty expectation says."""
    assert client.compare_set("k", "", "") == b""
    assert client.check(["k"])
    assert client.compare_set("k", "", b"\x00a") == b"\x00a"
    assert client.compare_set("k", b"\x00", "no") == b"\x00a"
    assert client.compare_set("k", b"\x00a", b"\xff") == b"\xff"


def test_one_of_many_wins_a_compare_set(connect: Connect) -> None:
    """C091: of those that race for a missing key one creates it, and all are told which."""
    racers = [connect() for _ in range(8)]
    answers = [one.later.compare_set("leader", "", f"n{number}") for number, one in enumerate(racers)]
    assert len({one.result(60) for one in answers}) == 1


def test_add_counts_in_text(client: Client) -> None:
    assert client.add("n", 5) == 5
    assert client.get("n") == b"5"
    assert client.add("n", -12) == -7
    assert client.get("n") == b"-7"
    assert client.add("n", 0) == -7
    assert client.add("zero", 0) == 0
    assert client.get("zero") == b"0"
    client.set("set", "41")
    assert client.add("set", 1) == 42


def test_add_takes_the_number_that_a_text_begins_with(client: Client) -> None:
    """As C's strtoll: white space, a sign, digits; what follows is dropped from the sum."""
    for text, sum_ in ((" 12", 13), ("+5", 6), ("12abc", 13), ("007", 8), ("-3x", -2), ("0x10", 1)):
        client.set("n", text)
        assert client.add("n", 1) == sum_
        assert client.get("n") == str(sum_).encode()


def test_add_wraps_around(client: Client) -> None:
    assert client.add("n", 2**63 - 1) == 2**63 - 1
    assert client.add("n", 1) == -(2**63)
    assert client.get("n") == b"-9223372036854775808"


@pytest.mark.parametrize("text", ["text", "", " ", "-", "9223372036854775808"])
def test_add_on_a_text_cuts_off_that_client_alone(connect: Connect, text: str) -> None:
    """The value stays; the others go on, one of them in the middle of a wait."""
    one, other, waiting = connect(), connect(), connect()
    other.set("k", text)
    assert other.get("k") == text.encode()  # it has come: a set by itself is not answered
    waited = waiting.later.wait(["later"])
    waiting.asleep()
    with pytest.raises(StoreError) as cut:
        one.add("k", 1)
    assert cut.value.kind == "DistNetworkError"
    with pytest.raises(StoreError):
        one.get("k")
    assert other.get("k") == text.encode()
    assert not waited.done()
    other.set("later", "")
    waited.result(60)


def test_append_begins_and_goes_on(connect: Connect) -> None:
    """C095."""
    one, other = connect(), connect()
    one.append("k", "1")
    one.append("k", "2")
    assert one.get("k") == b"12"
    other.append("k", b"\x00")
    assert other.get("k") == b"12\x00"


def test_delete_says_whether_there_was_anything(client: Client) -> None:
    """C095."""
    assert client.delete_key("none") is False
    client.set("k", "")
    assert client.delete_key("k") is True
    assert client.delete_key("k") is False
    assert client.num_keys() == 0
    assert client.add("k", 1) == 1


def test_many_at_once(client: Client) -> None:
    """C095: values come in the order asked for; a key named twice counts twice, the last set of it wins."""
    client.multi_set(["a", "b", "a"], ["1", "2", "3"])
    assert client.multi_get(["b", "a", "b"]) == [b"2", b"3", b"2"]
    assert client.multi_get([]) == []
    client.multi_set([], [])
    assert client.num_keys() == 2


def test_keys_are_counted_and_listed(client: Client) -> None:
    """Every key that holds a value counts, whoever made it; a queue does not."""
    assert client.num_keys() == 0
    assert client.list_keys() == []
    client.set("a", "")
    client.add("b", 1)
    client.append("c", "")
    client.compare_set("d", "", "1")
    client.compare_set("missing", "x", "1")
    client.multi_set(["e", "f"], ["", ""])
    client.queue_push("q", "1")
    client.get("a")
    client.check(["nothing"])
    client.barrier("g", 1)
    assert sorted(client.list_keys()) == ["a", "b", "c", "d", "e", "f", "g"]
    assert client.num_keys() == 7


def test_thousands_of_keys(connect: Connect) -> None:
    one, other = connect(), connect()
    names = [f"rank/{number}" for number in range(5000)]
    one.multi_set(names, [name.encode() * 3 for name in names])
    one.wait(names)
    assert other.check(names)
    assert not other.check([*names, "more"])
    assert other.multi_get(names) == [name.encode() * 3 for name in names]
    assert sorted(other.list_keys()) == sorted(names)
    assert other.num_keys() == len(names)


def test_a_clone_is_a_client_of_the_same_store(client: Client) -> None:
    client.set("k", "1")
    clone = client.clone()
    assert clone.get("k") == b"1"
    clone.set("k", "2")
    waited = clone.later.wait(["later"])
    clone.asleep()
    assert client.get("k") == b"2"
    client.set("later", "")
    waited.result(60)


def test_a_prefix_keeps_keys_apart(connect: Connect) -> None:
    """The server sees whole keys: what one prefix holds, another does not, and the bare client sees it all."""
    bare, one, other, nested = connect(), connect("a"), connect("b"), connect("in", "a")
    one.set("k", "1")
    other.set("k", "2")
    assert one.get("k") == b"1"
    assert other.get("k") == b"2"
    assert bare.multi_get(["a/k", "b/k"]) == [b"1", b"2"]
    nested.set("k", "3")
    assert one.add("n", 2) == 2
    assert other.compare_set("n", "", "x") == b"x"
    assert one.delete_key("k")
    assert not one.check(["k"])
    assert other.check(["k"])
    assert bare.num_keys() == 4
    assert len([key for key in bare.list_keys() if key.endswith("k")]) == 2


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_every_local_address_is_answered(connect: Connect, store: RunningStore, host: str) -> None:
    """C099: IPv4, IPv6 and a name, where the server listens on both."""
    one, other = connect(host=host), connect()
    one.set("k", host)
    assert other.get("k") == host.encode()
