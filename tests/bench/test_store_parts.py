"""The parts of the store's benchmark that could make figures wrong without anyone noticing."""

from __future__ import annotations

import struct

from bench import hostnames, store_figures
from bench.store_load import OPERATIONS, operations
from bench.store_measure import Sample, in_turn
from nvrx.store.opcodes import MAGIC, Opcode
from nvrx.store.session import Session
from nvrx.store.space import KeySpace


def test_each_request_is_answered_with_as_many_bytes_as_are_awaited() -> None:
    replies: list[bytes] = []
    session = Session(KeySpace(), replies.append)
    session.feed(struct.pack("<BI", Opcode.VALIDATE, MAGIC))
    for number in range(16):
        for request in operations(number)["set"][0].requests:
            session.feed(request)
    for name in OPERATIONS:
        for step in operations(3)[name]:
            replies.clear()
            for request in step.requests:
                session.feed(request)
            assert sum(map(len, replies)) == step.reply_bytes, name
    assert not session.held_bytes


def test_kinds_take_turns() -> None:
    assert [in_turn(["a", "b"], rep) for rep in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_a_ratio_is_that_of_what_was_measured_together() -> None:
    values = {"bridge": (3.0, 30.0, 6.0), "torch": (2.0, 15.0, 5.0)}
    samples = [
        Sample(kind, rep, "check/8/cpu_us", value) for kind, each in values.items() for rep, value in enumerate(each)
    ]
    measure = next(one for one in store_figures.COSTS if one.key == "check/8/cpu_us")
    quotient = store_figures.ratio(samples, measure)
    assert quotient is not None
    assert (quotient.median, quotient.least, quotient.most) == (1.5, 1.2, 2.0)
    table = store_figures.tables(samples, ["bridge", "torch"])
    assert "6.0 (3.0-30.0)" in table
    assert "1.50 (1.20-2.00)" in table
    assert "multi_get" not in table  # was not measured
    assert store_figures.ratio(samples[:3], measure) is None


def test_the_late_resolver_denies_the_name_that_was_asked_for() -> None:
    question = b"\x011\x010\x010\x03127\x07in-addr\x04arpa\0\0\x0c\0\1"
    answer = hostnames.no_such_name(struct.pack(">HHHHHH", 0xBEEF, 0x0100, 1, 0, 0, 0) + question)
    identity, flags, *counts = struct.unpack(">HHHHHH", answer[:12])
    assert (identity, flags >> 15, flags & 0xF, counts) == (0xBEEF, 1, 3, [1, 0, 0, 0])
    assert answer[12:] == question
