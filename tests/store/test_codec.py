"""The parser against a slow, plain one; its limits; what it holds, copies and reads again."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx.store.codec import Parser
from nvrx.store.opcodes import GRAMMAR, MAX_COMMAND_BYTES, MAX_KEY_BYTES, MAX_KEYS, MAX_VALUE_BYTES, Kind, Opcode

from .reference import encode, judge

MIB = 1024 * 1024
SLIGHT = 64 * 1024
"""More than a parser needs to refuse what is announced."""

examples = settings(deadline=None, derandomize=True, database=None, max_examples=150)

texts = st.binary(max_size=12)
FIELDS: dict[Kind, st.SearchStrategy[Any]] = {
    Kind.U32: st.integers(0, 2**32 - 1),
    Kind.I64: st.integers(-(2**63), 2**63 - 1),
    Kind.KEY: texts,
    Kind.VALUE: st.one_of(texts, st.binary(min_size=200, max_size=400)),
    Kind.KEYS: st.lists(texts, max_size=5),
    Kind.PAIRS: st.lists(st.tuples(texts, texts), max_size=4).map(
        lambda pairs: [one for pair in pairs for one in pair]
    ),
}
commands = st.sampled_from(Opcode).flatmap(
    lambda opcode: st.tuples(st.just(int(opcode)), *(FIELDS[kind] for kind in GRAMMAR[opcode])).map(list)
)
# Headers that nearly make sense get further than plain noise.
noise = st.lists(
    st.one_of(
        st.binary(max_size=20),
        commands.map(encode),
        st.integers(0, 20).map(lambda opcode: bytes([opcode])),
        st.sampled_from([0, 1, MAX_KEY_BYTES, MAX_KEY_BYTES + 1, MAX_KEYS + 1, 2**60, 2**63]).map(
            lambda length: length.to_bytes(8, "little")
        ),
    ),
    max_size=8,
).map(b"".join)


def cut(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    """In pieces of these sizes, over and over."""
    position = turn = 0
    while position < len(data):
        size = sizes[turn % len(sizes)]
        yield data[position : position + size]
        position += size
        turn += 1


def check_agrees(data: bytes, sizes: list[int]) -> None:
    """After every piece the parser knows what a plain reader would know."""
    parser = Parser()
    parsed: list[Any] = []
    fed = b""
    for piece in cut(data, sizes):
        fed += piece
        parsed += parser.feed(piece)
        expected = judge(fed)
        assert parsed == expected.commands
        assert (parser.failure is not None) == expected.failed
        if expected.failed:
            return
        # The opcode and count of a list that is under way are not counted.
        assert expected.unfinished - 9 <= parser.held_bytes <= expected.unfinished


@examples
@given(st.lists(commands, max_size=12), st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_commands_in_any_pieces_are_the_same_commands(sent: list[list[Any]], sizes: list[int]) -> None:
    data = b"".join(map(encode, sent))
    parser = Parser()
    assert [one for piece in cut(data, sizes) for one in parser.feed(piece)] == sent
    assert parser.failure is None
    assert parser.held_bytes == 0
    check_agrees(data, sizes)


@examples
@given(st.lists(commands, min_size=1, max_size=6))
def test_commands_byte_by_byte_are_the_same_commands(sent: list[list[Any]]) -> None:
    check_agrees(b"".join(map(encode, sent)), [1])


@pytest.mark.rule("J4")
@examples
@given(noise, st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_anything_else_gets_the_same_verdict(data: bytes, sizes: list[int]) -> None:
    check_agrees(data, sizes)


@examples
@given(noise)
def test_an_empty_piece_changes_nothing(data: bytes) -> None:
    parser, other = Parser(), Parser()
    assert parser.feed(b"") == []
    assert parser.feed(data) + parser.feed(b"") == other.feed(data)
    assert (parser.failure is None) == (other.failure is None)
    assert parser.held_bytes == other.held_bytes


# ---- limits -----------------------------------------------------------------------------------------------


def with_a_key(opcode: Opcode, size: int) -> bytes:
    values = {Kind.KEY: b"k" * size, Kind.VALUE: b"", Kind.I64: 0, Kind.KEYS: [b"k" * size]}
    values[Kind.PAIRS] = [b"k" * size, b""]
    return encode([opcode, *(values[kind] for kind in GRAMMAR[opcode])])


def with_a_value(opcode: Opcode, size: int) -> bytes:
    values: dict[Kind, Any] = {Kind.KEY: b"k", Kind.VALUE: b"v" * size, Kind.PAIRS: [b"k", b"v" * size]}
    return encode([opcode, *(values[kind] for kind in GRAMMAR[opcode])])


KEYED = [opcode for opcode in Opcode if set(GRAMMAR[opcode]) & {Kind.KEY, Kind.KEYS, Kind.PAIRS}]
VALUED = [opcode for opcode in Opcode if set(GRAMMAR[opcode]) & {Kind.VALUE, Kind.PAIRS}]
LISTED = [opcode for opcode in Opcode if set(GRAMMAR[opcode]) & {Kind.KEYS, Kind.PAIRS}]


@pytest.mark.parametrize("opcode", KEYED)
def test_a_key_at_the_limit_and_one_over(opcode: Opcode) -> None:
    check_agrees(with_a_key(opcode, MAX_KEY_BYTES), [4096])
    assert len(Parser().feed(with_a_key(opcode, MAX_KEY_BYTES))) == 1
    parser = Parser()
    assert parser.feed(with_a_key(opcode, MAX_KEY_BYTES + 1)) == []
    assert opcode.name in str(parser.failure)
    assert str(MAX_KEY_BYTES + 1) in str(parser.failure)


@pytest.mark.parametrize("opcode", VALUED)
def test_a_value_at_the_limit_and_one_over(opcode: Opcode) -> None:
    assert len(Parser().feed(with_a_value(opcode, MAX_VALUE_BYTES))) == 1
    parser = Parser()
    assert parser.feed(with_a_value(opcode, MAX_VALUE_BYTES + 1)) == []
    assert opcode.name in str(parser.failure)


@pytest.mark.parametrize("opcode", LISTED)
def test_keys_at_the_limit_and_one_over(opcode: Opcode) -> None:
    per_key = 2 if opcode is Opcode.MULTI_SET else 1
    (command,) = Parser().feed(encode([opcode, [b""] * MAX_KEYS * per_key]))
    assert len(command[1]) == MAX_KEYS * per_key
    parser = Parser()
    assert parser.feed(bytes([opcode]) + (MAX_KEYS + 1).to_bytes(8, "little")) == []
    assert str(MAX_KEYS) in str(parser.failure)


@pytest.mark.parametrize("size", [256 * 1024, 10**9])
@pytest.mark.parametrize("more", [0, 1])
def test_a_command_at_the_limit_and_one_over(size: int, more: int) -> None:
    """However it comes, a command over the limit is not carried out."""
    entries = [b"", bytes(MAX_VALUE_BYTES)] * 7
    rest = MAX_COMMAND_BYTES - 7 * (16 + MAX_VALUE_BYTES) - 16
    entries += [b"", bytes(rest + more)]
    data = encode([Opcode.MULTI_SET, entries]) + encode([Opcode.CANCEL_WAIT])
    parser = Parser()
    found = [one for piece in cut(data, [size]) for one in ([] if parser.failure else parser.feed(piece))]
    assert [one[0] for one in found] == ([] if more else [Opcode.MULTI_SET, Opcode.CANCEL_WAIT])
    assert (parser.failure is not None) == bool(more)


@pytest.mark.rule("J4")
@pytest.mark.parametrize("announced", [2**32, 2**60, 2**63, 2**64 - 1])
@pytest.mark.parametrize(
    "before",
    [
        encode([Opcode.SET, b"k", b""])[:-8],
        encode([Opcode.COMPARE_SET, b"k", b"e", b""])[:-8],
        *(bytes([opcode]) for opcode in (*KEYED, *LISTED)),
        *(bytes([opcode]) + (3).to_bytes(8, "little") for opcode in LISTED),
        bytes([Opcode.MULTI_SET]) + (3).to_bytes(8, "little") + bytes(8),
    ],
)
def test_what_is_announced_beyond_all_limits_is_refused_at_once(before: bytes, announced: int) -> None:
    tracemalloc.start()
    try:
        parser = Parser()
        found = [one for byte in before + announced.to_bytes(8, "little") for one in parser.feed(bytes([byte]))]
        assert tracemalloc.get_traced_memory()[1] < SLIGHT
    finally:
        tracemalloc.stop()
    assert found == []
    assert parser.failure is not None
    assert parser.held_bytes == 0


@pytest.mark.rule("J4")
@pytest.mark.parametrize("opcode", LISTED)
def test_what_is_announced_within_the_limits_is_not_reserved(opcode: Opcode) -> None:
    tracemalloc.start()
    try:
        parser = Parser()
        parser.feed(bytes([opcode]) + MAX_KEYS.to_bytes(8, "little") + MAX_KEY_BYTES.to_bytes(8, "little"))
        parser.feed(b"x")
        assert tracemalloc.get_traced_memory()[1] < SLIGHT
    finally:
        tracemalloc.stop()
    assert parser.failure is None
    assert parser.held_bytes <= 18


def test_nothing_is_read_after_a_failure() -> None:
    parser = Parser()
    good = encode([Opcode.GET, b"k"])
    assert parser.feed(good + b"\xff" + good) == [[Opcode.GET, b"k"]]
    failure = parser.failure
    assert "255" in str(failure)
    assert parser.feed(good) == []
    assert parser.failure is failure
    assert parser.held_bytes == 0
    unfinished = Parser()
    unfinished.feed(good[:5])
    unfinished.feed(b"\xff" * 20)
    assert unfinished.failure is not None
    assert unfinished.held_bytes == 0
    assert unfinished.feed(good) == []


# ---- work -------------------------------------------------------------------------------------------------


class Piece(bytes):
    """Bytes that count how much is copied when something is put before them."""

    copied = 0

    def __radd__(self, left: bytes) -> bytes:
        Piece.copied += len(left)
        return bytes(left) + bytes(self)


def feed_counting(parser: Parser, data: bytes, size: int) -> tuple[list[Any], Counter[str]]:
    """Feed it in pieces; how often each C function was called meanwhile."""
    pieces = [Piece(piece) for piece in cut(data, [size])]
    calls: Counter[str] = Counter()

    def count(_frame: object, event: str, argument: Any) -> None:
        if event == "c_call":
            calls[argument.__name__] += 1

    found: list[Any] = []
    Piece.copied = 0
    sys.setprofile(count)
    try:
        for piece in pieces:
            found += parser.feed(piece)
    finally:
        sys.setprofile(None)
    return found, calls


@pytest.mark.parametrize("opcode", VALUED)
def test_a_large_value_in_small_pieces_is_joined_a_few_times(opcode: Opcode) -> None:
    """Else the work grows with the square of its size."""
    found, calls = feed_counting(Parser(), with_a_value(opcode, MAX_VALUE_BYTES), 1024)
    assert len(found) == 1
    assert calls["join"] <= 8
    assert calls["unpack_from"] <= 24
    assert Piece.copied <= 2 * MAX_VALUE_BYTES


def test_many_keys_in_small_pieces_are_read_once() -> None:
    pairs = [b"%07d" % number for number in range(4000)]
    data = encode([Opcode.MULTI_SET, pairs])
    found, calls = feed_counting(Parser(), data, 7)
    assert found == [[Opcode.MULTI_SET, pairs]]
    # A length may be looked at once more when what it announces has come.
    assert calls["unpack_from"] <= 2 * len(pairs) + 8
    assert calls["join"] <= 2 * len(pairs) + 8


def test_a_command_that_waits_for_more_holds_what_came_and_no_more() -> None:
    parser = Parser()
    data = encode([Opcode.SET, b"k", bytes(MAX_VALUE_BYTES)])[:-1]
    tracemalloc.start()
    try:
        for piece in cut(data, [64 * 1024]):
            parser.feed(bytes(bytearray(piece)))
        assert tracemalloc.get_traced_memory()[0] < MAX_VALUE_BYTES + MIB
    finally:
        tracemalloc.stop()
    assert parser.held_bytes == len(data)
    assert [one[0] for one in parser.feed(b"\0")] == [Opcode.SET]
    assert parser.held_bytes == 0
