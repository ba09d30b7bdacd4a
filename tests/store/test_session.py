"""A session: every command's reply, what is read-only, who is cut off and after what, and one who does not read."""

from __future__ import annotations

from typing import Any

import pytest

from nvrx.store.codec import BadCommand
from nvrx.store.opcodes import (
    MAGIC,
    MAX_REPLY_BYTES,
    MAX_SPACE_BYTES,
    MAX_VALUE_BYTES,
    NOT_READY,
    READY,
    STOP_WAITING,
    WAIT_CANCELED,
    Opcode,
)
from nvrx.store.session import Session
from nvrx.store.space import KeySpace

from .reference import encode

GUARD = b"/nvrx/"


def i64(number: int) -> bytes:
    return number.to_bytes(8, "little", signed=True)


def text(value: bytes) -> bytes:
    return i64(len(value)) + value


class Client:
    """A session and what it has answered."""

    def __init__(self, space: KeySpace, *, privileged: bool = False, greet: bool = True) -> None:
        self.answers: list[bytes] = []
        self.session = Session(space, self.answers.append, may_write_all=privileged)
        if greet:
            assert self.ask(Opcode.VALIDATE, MAGIC) == b""

    def feed(self, *commands: list[Any]) -> bytes:
        """Send them as one piece; the answers since."""
        self.session.feed(b"".join(map(encode, commands)))
        return self.heard()

    def ask(self, opcode: Opcode, *fields: Any) -> bytes:
        return self.feed([opcode, *fields])

    def heard(self) -> bytes:
        answer = b"".join(self.answers)
        self.answers.clear()
        return answer


@pytest.fixture
def space() -> KeySpace:
    return KeySpace(GUARD)


@pytest.fixture
def client(space: KeySpace) -> Client:
    return Client(space)


# ---- replies ----------------------------------------------------------------------------------------------


@pytest.mark.rule("I5")
def test_every_command_has_torchs_answer(client: Client) -> None:
    story: list[tuple[list[Any], bytes]] = [
        ([Opcode.PING, 0xDEADBEEF], b"\xef\xbe\xad\xde"),
        ([Opcode.GET, b"k"], text(b"")),
        ([Opcode.CHECK, []], READY),
        ([Opcode.CHECK, [b"k"]], NOT_READY),
        ([Opcode.SET, b"k", b"\0\xff"], b""),
        ([Opcode.GET, b"k"], text(b"\0\xff")),
        ([Opcode.CHECK, [b"k", b"k"]], READY),
        ([Opcode.CHECK, [b"k", b"no"]], NOT_READY),
        ([Opcode.WAIT, []], STOP_WAITING),
        ([Opcode.WAIT, [b"k"]], STOP_WAITING),
        ([Opcode.APPEND, b"k", b"more"], b""),
        ([Opcode.GET, b"k"], text(b"\0\xffmore")),
        ([Opcode.COMPARE_SET, b"c", b"", b"1"], text(b"1")),
        ([Opcode.COMPARE_SET, b"c", b"2", b"3"], text(b"1")),
        ([Opcode.COMPARE_SET, b"no", b"2", b"3"], text(b"2")),
        ([Opcode.ADD, b"n", 40], i64(40)),
        ([Opcode.ADD, b"n", -42], i64(-2)),
        ([Opcode.GET, b"n"], text(b"-2")),
        ([Opcode.GETNUMKEYS], i64(3)),
        ([Opcode.LIST_KEYS], i64(3) + text(b"k") + text(b"c") + text(b"n")),
        ([Opcode.MULTI_SET, []], b""),
        ([Opcode.MULTI_SET, [b"x", b"1", b"y", b"", b"x", b"2"]], b""),
        ([Opcode.MULTI_GET, []], b""),
        ([Opcode.MULTI_GET, [b"x", b"y", b"no", b"x"]], text(b"2") + text(b"") + text(b"") + text(b"2")),
        ([Opcode.DELETE_KEY, b"x"], i64(1)),
        ([Opcode.DELETE_KEY, b"x"], i64(0)),
        ([Opcode.QUEUE_LEN, b"q"], i64(0)),
        ([Opcode.QUEUE_POP, b"q"], i64(0)),
        ([Opcode.QUEUE_PUSH, b"q", b"1"], b""),
        ([Opcode.QUEUE_PUSH, b"q", b""], b""),
        ([Opcode.QUEUE_LEN, b"q"], i64(2)),
        ([Opcode.CHECK, [b"q"]], READY),
        ([Opcode.WAIT, [b"q"]], STOP_WAITING),
        ([Opcode.GET, b"q"], text(b"")),
        ([Opcode.DELETE_KEY, b"q"], i64(0)),
        ([Opcode.QUEUE_POP, b"q"], i64(2) + text(b"1")),
        ([Opcode.QUEUE_POP, b"q"], i64(1) + text(b"")),
        ([Opcode.QUEUE_POP, b"q"], i64(0)),
        ([Opcode.BARRIER, b"b", 1], STOP_WAITING),
        ([Opcode.CANCEL_WAIT], WAIT_CANCELED),
        ([Opcode.PING, 0], bytes(4)),
    ]
    assert {command[0] for command, _ in story} == set(Opcode) - {Opcode.VALIDATE}
    for command, answer in story:
        assert client.feed(command) == answer, command
    other = Client(KeySpace())
    assert other.feed(*(command for command, _ in story)) == b"".join(answer for _, answer in story)


def test_who_waits_is_answered_later_and_served_meanwhile(space: KeySpace, client: Client) -> None:
    assert client.feed([Opcode.WAIT, [b"a", b"b"]], [Opcode.SET, b"a", b""], [Opcode.PING, 1]) == b"\1\0\0\0"
    assert client.session.is_waiting
    assert Client(space).ask(Opcode.SET, b"b", b"") == b""
    assert client.heard() == STOP_WAITING
    assert not client.session.is_waiting


def test_a_cancelled_wait_is_not_answered_again(space: KeySpace, client: Client) -> None:
    client.ask(Opcode.WAIT, [b"a"])
    assert client.ask(Opcode.CANCEL_WAIT) == WAIT_CANCELED
    space.set(b"a", b"")
    assert client.heard() == b""


def test_a_wait_that_ends_as_it_is_cancelled_has_both_answers(space: KeySpace, client: Client) -> None:
    client.ask(Opcode.WAIT, [b"a"])
    space.set(b"a", b"")
    assert client.ask(Opcode.CANCEL_WAIT) == STOP_WAITING + WAIT_CANCELED


def test_a_barrier_answers_all_when_the_last_arrives(space: KeySpace) -> None:
    clients = [Client(space) for _ in range(4)]
    for client in clients[:3]:
        assert client.ask(Opcode.BARRIER, b"b", 4) == b""
        assert client.session.is_waiting
    assert clients[3].ask(Opcode.BARRIER, b"b", 4) == STOP_WAITING
    assert [client.heard() for client in clients[:3]] == [STOP_WAITING] * 3


def test_one_that_is_gone_is_not_woken_and_takes_nobodys_turn(space: KeySpace) -> None:
    gone, first, second = (Client(space) for _ in range(3))
    for client in (gone, first, second):
        client.ask(Opcode.WAIT, [b"q"])
    gone.session.close()
    gone.session.close()
    space.queue_push(b"q", b"")
    assert [client.heard() for client in (gone, first, second)] == [b"", STOP_WAITING, b""]


# ---- who is cut off ---------------------------------------------------------------------------------------


@pytest.mark.rule("J4")
@pytest.mark.parametrize(
    "first",
    [
        [Opcode.SET, b"k", b"v"],
        [Opcode.PING, MAGIC],
        [Opcode.GETNUMKEYS],
        [Opcode.VALIDATE, 0],
        [Opcode.VALIDATE, MAGIC ^ 1],
    ],
)
def test_one_that_does_not_begin_as_torch_does(space: KeySpace, first: list[Any]) -> None:
    client = Client(space, greet=False)
    with pytest.raises(BadCommand, match="does not begin"):
        client.feed(first, [Opcode.SET, b"k", b"v"], [Opcode.PING, 1])
    assert client.heard() == b""
    assert space.values == {}


@pytest.mark.rule("J4")
def test_nothing_is_held_for_one_that_has_not_greeted(space: KeySpace) -> None:
    for opcode in range(1, 256):
        session = Client(space, greet=False).session
        with pytest.raises(BadCommand, match="does not begin"):
            session.feed(bytes([opcode]))
        assert session.held_bytes == 0


def test_a_greeting_may_come_in_pieces(space: KeySpace) -> None:
    client = Client(space, greet=False)
    client.session.feed(b"")
    for byte in encode([Opcode.VALIDATE, MAGIC]) + encode([Opcode.PING, 5]):
        client.session.feed(bytes([byte]))
    assert client.heard() == b"\5\0\0\0"


def test_one_that_validates_twice(client: Client) -> None:
    with pytest.raises(BadCommand, match="twice"):
        client.ask(Opcode.VALIDATE, MAGIC)


@pytest.mark.rule("I5")
@pytest.mark.parametrize("bad", [b"\xff", encode([Opcode.ADD, b"text", 1]), encode([Opcode.SET, GUARD, b""])])
def test_what_was_asked_before_a_failure_is_done_and_answered(space: KeySpace, client: Client, bad: bytes) -> None:
    good = encode([Opcode.SET, b"text", b"x"]) + encode([Opcode.GET, b"text"])
    after = encode([Opcode.SET, b"text", b"y"]) + encode([Opcode.PING, 1])
    with pytest.raises(BadCommand):
        client.session.feed(good + bad + after)
    assert client.heard() == text(b"x")
    assert space.values == {b"text": b"x"}


def test_what_is_not_whole_is_held(client: Client) -> None:
    data = encode([Opcode.SET, b"k", b"value"])
    client.session.feed(data[:-1])
    assert client.session.held_bytes == len(data) - 1
    client.session.feed(data[-1:])
    assert client.session.held_bytes == 0
    assert client.ask(Opcode.GET, b"k") == text(b"value")


# ---- read-only keys ---------------------------------------------------------------------------------------


def writing(key: bytes) -> list[list[Any]]:
    """Every command that changes what is below a key."""
    return [
        [Opcode.SET, key, b"x"],
        [Opcode.COMPARE_SET, key, b"", b"x"],
        [Opcode.COMPARE_SET, key, b"unlike", b"x"],
        [Opcode.ADD, key, 1],
        [Opcode.DELETE_KEY, key],
        [Opcode.APPEND, key, b"x"],
        [Opcode.MULTI_SET, [b"fine", b"", key, b"x"]],
        [Opcode.QUEUE_PUSH, key, b"x"],
        [Opcode.QUEUE_POP, key],
        [Opcode.BARRIER, key, 1],
        [Opcode.BARRIER, key, 2],
    ]


READING: list[list[Any]] = [
    [Opcode.GET, b"/nvrx/k"],
    [Opcode.CHECK, [b"/nvrx/k"]],
    [Opcode.WAIT, [b"/nvrx/k"]],
    [Opcode.MULTI_GET, [b"/nvrx/k"]],
    [Opcode.MULTI_SET, []],
    [Opcode.CANCEL_WAIT],
    [Opcode.QUEUE_LEN, b"/nvrx/k"],
    [Opcode.GETNUMKEYS],
    [Opcode.LIST_KEYS],
    [Opcode.PING, 1],
]


def test_every_command_reads_or_writes() -> None:
    assert {one[0] for one in (*writing(b""), *READING)} == set(Opcode) - {Opcode.VALIDATE}


@pytest.mark.rule("I3")
@pytest.mark.parametrize("command", writing(b"/nvrx/k") + writing(GUARD))
def test_only_the_privileged_write_below_the_prefix(space: KeySpace, command: list[Any]) -> None:
    with pytest.raises(BadCommand, match="read-only"):
        Client(space).feed(command)
    assert not [key for key in space.values if key.startswith(GUARD)]
    assert not space.has(b"/nvrx/k")
    Client(space, privileged=True).feed(command)


@pytest.mark.rule("I3")
@pytest.mark.parametrize("command", [*READING, *writing(b"/nvrx"), *writing(b"nvrx/k"), *writing(b"/runs/a/nvrx/")])
def test_all_others_are_for_everybody(client: Client, command: list[Any]) -> None:
    client.feed(command)


def test_without_a_prefix_nothing_is_read_only() -> None:
    for command in writing(b"/nvrx/k"):
        Client(KeySpace()).feed(command)


@pytest.mark.rule("I3")
def test_who_waits_below_the_prefix_is_woken_by_the_privileged(space: KeySpace, client: Client) -> None:
    client.ask(Opcode.WAIT, [b"/nvrx/run/cycle"])
    Client(space, privileged=True).ask(Opcode.SET, b"/nvrx/run/cycle", b"1")
    assert client.heard() == STOP_WAITING


# ---- bounds -----------------------------------------------------------------------------------------------


@pytest.mark.rule("J4")
def test_no_reply_is_over_its_limit(space: KeySpace, client: Client) -> None:
    space.set(b"k", bytes(MAX_VALUE_BYTES))
    most = MAX_REPLY_BYTES // (MAX_VALUE_BYTES + 8)
    with pytest.raises(BadCommand, match="MULTI_GET"):
        client.ask(Opcode.MULTI_GET, [b"k"] * (most + 1))
    assert client.heard() == b""
    assert len(Client(space).ask(Opcode.MULTI_GET, [b"k"] * 4)) == 4 * (MAX_VALUE_BYTES + 8)


@pytest.mark.rule("J4")
def test_no_list_of_keys_is_over_the_limit_of_a_reply(space: KeySpace, client: Client) -> None:
    class Long(bytes):
        """A key that says it is long: a quarter of a gigabyte of real ones takes its time."""

        def __len__(self) -> int:
            return MAX_REPLY_BYTES // 2

    space.values |= {Long(b"1"): b"", Long(b"2"): b""}
    with pytest.raises(BadCommand, match="LIST_KEYS"):
        client.ask(Opcode.LIST_KEYS)
    assert client.heard() == b""


@pytest.mark.rule("J4")
def test_a_space_is_bounded() -> None:
    space = KeySpace()
    space.held_bytes = MAX_SPACE_BYTES
    with pytest.raises(BadCommand, match=str(MAX_SPACE_BYTES)):
        Client(space).ask(Opcode.SET, b"k", b"")


@pytest.mark.rule("J4")
def test_one_that_does_not_read_has_its_commands_wait(space: KeySpace) -> None:
    answers: list[bytes] = []

    def send(answer: bytes) -> None:
        answers.append(answer)
        session.pause()

    session = Session(space, send)
    pings = b"".join(encode([Opcode.PING, number]) for number in range(100))
    session.feed(encode([Opcode.VALIDATE, MAGIC]) + pings + encode([Opcode.SET, b"k", b""]))
    assert answers == [bytes(4)]
    session.feed(encode([Opcode.PING, 100]) + b"\xff")
    assert len(answers) == 1
    for number in range(1, 100):
        session.resume()
        assert answers[-1] == number.to_bytes(4, "little")
    assert not space.has(b"k")
    session.resume()
    assert space.has(b"k")
    assert answers[-1] == (100).to_bytes(4, "little")
    with pytest.raises(BadCommand, match="255"):
        session.resume()
    assert len(answers) == 101


def test_one_that_is_paused_is_still_told_that_its_keys_have_come(space: KeySpace, client: Client) -> None:
    client.ask(Opcode.WAIT, [b"k"])
    client.session.pause()
    space.set(b"k", b"")
    assert client.heard() == STOP_WAITING
    client.session.resume()
    assert client.ask(Opcode.PING, 1) == b"\1\0\0\0"
