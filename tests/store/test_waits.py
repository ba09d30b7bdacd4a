"""torch's client against each server: waits, their time-outs, queues and barriers. Nothing here measures time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import timedelta
from typing import Any

import pytest

from .clients import Client, StoreError
from .raw import PATIENCE_S, RawClient
from .raw import wait as wait_for

pytestmark = [pytest.mark.torch, pytest.mark.rule("I5")]
Connect = Callable[..., Client]
SHORT_S = 0.2
SHORT = timedelta(seconds=SHORT_S)


def _timed_out(future: Future[Any]) -> str:
    """The text of the time-out that a call ends with."""
    with pytest.raises(StoreError) as raised:
        future.result(PATIENCE_S)
    assert raised.value.kind == "DistStoreError"
    assert "timeout" in raised.value.text
    return raised.value.text


def test_nothing_to_wait_for(client: Client) -> None:
    """C095."""
    client.wait([])
    assert client.check([]) is True


def test_check_asks_for_all(client: Client) -> None:
    client.set("a", "")
    assert client.check(["a"])
    assert client.check(["a", "a"])
    assert not client.check(["b"])
    assert not client.check(["a", "b"])
    client.set("b", "")
    assert client.check(["a", "b"])


@pytest.mark.parametrize("op", ["set", "add", "append", "compare_set", "multi_set"])
def test_whatever_makes_a_key_ends_a_wait_for_it(connect: Connect, op: str) -> None:
    waiting, other = connect(), connect()
    waited = waiting.later.get("k")
    waiting.asleep()
    assert other.num_keys() == 0
    assert not waited.done()
    arguments: dict[str, list[Any]] = {
        "add": ["k", 7],
        "compare_set": ["k", "", "7"],
        "multi_set": [["a", "k"], ["", "7"]],
    }
    other.begin(op, *arguments.get(op, ["k", "7"])).result(PATIENCE_S)
    assert waited.result(PATIENCE_S) == b"7"


def test_one_set_wakes_all_who_wait(connect: Connect) -> None:
    """Each once: every waiter goes on to use its connection, where a second answer would be taken for another's."""
    waiters = [connect() for _ in range(64)]
    other = connect()
    got = [one.later.get("k") for one in waiters]
    for one in waiters:
        one.asleep()
    other.set("k", "v")
    assert {one.result(PATIENCE_S) for one in got} == {b"v"}
    other.set("k", "w")
    assert other.get("k") == b"w"
    assert [one.add("n", 1) for one in waiters] == list(range(1, 65))
    assert {one.get("k") for one in waiters} == {b"w"}


def test_a_wait_for_several_keys_ends_with_the_last(connect: Connect) -> None:
    waiting, other = connect(), connect()
    other.set("b", "2")
    waited = waiting.later.multi_get(["a", "b", "c"])
    waiting.asleep()
    other.set("a", "1")
    other.set("a", "1 again")
    assert other.check(["a", "b"])
    assert not waited.done()
    other.set("c", "3")
    assert waited.result(PATIENCE_S) == [b"1 again", b"2", b"3"]


def test_get_of_a_missing_key_names_it_and_leaves_the_client_usable(connect: Connect) -> None:
    """C094."""
    client = connect(timeout_s=SHORT_S)
    assert "missing" in _timed_out(client.later.get("missing"))
    client.set("k", "v")
    assert client.get("k") == b"v"
    assert "missing" in _timed_out(client.later.multi_get(["k", "missing"]))
    assert client.add("n", 1) == 1


def test_a_waiter_that_gives_up_leaves_the_others_waiting(connect: Connect) -> None:
    """C094: one of two times out, then the key is set; the other is woken, and the first can wait again."""
    hasty, patient, other = connect(), connect(), connect()
    first = hasty.later.wait(["k"], SHORT)
    second = patient.later.get("k")
    patient.asleep()
    assert "k" in _timed_out(first)
    again = hasty.later.get("k")
    hasty.asleep()
    assert not second.done()
    other.set("k", "v")
    assert second.result(PATIENCE_S) == b"v"
    assert again.result(PATIENCE_S) == b"v"


def test_a_wait_given_up_is_not_answered_later(connect: Connect) -> None:
    """C094: the answer to the old wait would be taken for the answer to the next."""
    client, other = connect(), connect()
    for number in range(5):
        _timed_out(client.later.wait([f"old{number}", "old"], SHORT))
        other.set(f"old{number}", "")
    other.set("old", "")
    waited = client.later.wait(["new"])
    client.asleep()
    assert other.check(["old"])
    assert not waited.done()
    other.set("new", "")
    waited.result(PATIENCE_S)
    assert client.add("n", 3) == 3


def test_set_timeout_holds_for_the_next_waits(client: Client) -> None:
    client.set_timeout(SHORT)
    _timed_out(client.later.get("missing"))
    client.set("k", "v")
    assert client.get("k") == b"v"


def test_a_waiter_that_dies_is_forgotten(connect: Connect, raw: Callable[[], RawClient]) -> None:
    """A connection that ends in the middle of a wait harms nobody."""
    patient, other = connect(), connect()
    waited = patient.later.get("k")
    patient.asleep()
    for _ in range(20):
        gone = raw()
        gone.exchange(wait_for(b"/k"))
        gone.close()
    other.set("k", "v")
    assert waited.result(PATIENCE_S) == b"v"


def test_a_queue_gives_first_in_first_out(connect: Connect) -> None:
    one, other = connect(), connect()
    for value in ("1", "", b"\x00\xff"):
        one.queue_push("q", value)
    assert other.queue_len("q") == 3
    assert [other.queue_pop("q") for _ in range(3)] == [b"1", b"", b"\x00\xff"]
    assert one.queue_len("q") == 0


def test_an_empty_queue_is_not_there(client: Client) -> None:
    assert client.queue_len("q") == 0
    with pytest.raises(StoreError):
        client.queue_pop("q", False)
    assert not client.check(["q"])
    client.queue_push("q", "1")
    assert client.check(["q"])
    client.wait(["q"])
    assert client.queue_pop("q", False) == b"1"
    assert not client.check(["q"])
    with pytest.raises(StoreError):
        client.queue_pop("q", False)
    assert client.add("n", 1) == 1


def test_a_queue_and_a_value_of_one_name_are_two_things(client: Client) -> None:
    client.queue_push("k", "queued")
    client.set("k", "value")
    assert client.get("k") == b"value"
    assert client.queue_len("k") == 1
    assert client.num_keys() == 1
    assert client.delete_key("k") is True
    assert client.check(["k"])
    assert client.queue_pop("k") == b"queued"
    assert client.delete_key("k") is False


def test_one_push_wakes_one_pop(connect: Connect) -> None:
    poppers = [connect() for _ in range(4)]
    other = connect()
    waiting = {one.later.queue_pop("q") for one in poppers}
    for one in poppers:
        one.asleep()
    for number in range(4):
        other.queue_push("q", str(number))
        done, waiting = wait(waiting, PATIENCE_S, FIRST_COMPLETED)
        assert [one.result() for one in done] == [str(number).encode()]
        assert other.queue_len("q") == 0


def test_a_pop_that_gives_up_takes_nothing(connect: Connect) -> None:
    hasty, patient, other = connect(timeout_s=SHORT_S), connect(), connect()
    _timed_out(hasty.later.queue_pop("q"))
    popped = patient.later.queue_pop("q")
    patient.asleep()
    other.queue_push("q", "v")
    assert popped.result(PATIENCE_S) == b"v"
    assert hasty.queue_len("q") == 0
    assert hasty.add("n", 1) == 1


def test_workers_share_out_a_queue(connect: Connect) -> None:
    """Each value goes to one of those that pop, none is lost, round after round."""
    poppers = [connect() for _ in range(8)]
    pushers = [connect() for _ in range(2)]
    for _ in range(5):
        popped = [one.later.queue_pop("q") for one in poppers]
        for one in poppers:
            one.asleep()
        pushed = [pushers[number % 2].later.queue_push("q", str(number)) for number in range(8)]
        for future in pushed:
            future.result(PATIENCE_S)
        assert sorted(future.result(PATIENCE_S) for future in popped) == [str(number).encode() for number in range(8)]


def test_a_set_wakes_all_who_pop(connect: Connect) -> None:
    """A value under the queue's name wakes them; then they find the queue empty and say so."""
    poppers = [connect() for _ in range(3)]
    other = connect()
    popped = [one.later.queue_pop("q") for one in poppers]
    for one in poppers:
        one.asleep()
    other.set("q", "value")
    for future in popped:
        with pytest.raises(StoreError) as empty:
            future.result(PATIENCE_S)
        assert empty.value.kind == "QueueEmptyError"


def test_a_barrier_lets_all_go_with_the_last(connect: Connect) -> None:
    early = [connect() for _ in range(3)]
    last = connect()
    for name in ("one", "two"):
        arrived = [one.later.barrier(name, 4) for one in early]
        for one in early:
            one.asleep()
        assert not last.check(["nothing"])
        assert not any(future.done() for future in arrived)
        last.barrier(name, 4)
        for future in arrived:
            future.result(PATIENCE_S)


def test_a_barrier_for_one_is_passed_at_once(client: Client) -> None:
    client.barrier("b", 1)
    client.barrier("b", 1)
    client.barrier("c", 1, SHORT)
    assert client.add("n", 1) == 1


def test_a_barrier_given_up_counts_all_the_same(connect: Connect) -> None:
    """Who gave up has arrived: the next one completes the two."""
    hasty, other = connect(), connect()
    with pytest.raises(StoreError):
        hasty.barrier("b", 2, SHORT)
    assert hasty.add("n", 1) == 1
    other.barrier("b", 2)
    assert hasty.add("n", 1) == 2


def test_a_barrier_within_a_prefix_is_another(connect: Connect) -> None:
    one, two, other = connect("a"), connect("a"), connect("b")
    first = one.later.barrier("b", 2)
    elsewhere = other.later.barrier("b", 2, SHORT)
    with pytest.raises(StoreError):
        elsewhere.result(PATIENCE_S)
    assert not first.done()
    two.barrier("b", 2)
    first.result(PATIENCE_S)
