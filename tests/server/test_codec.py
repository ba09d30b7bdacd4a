"""Facts as JSON: what goes in comes out the same, and what cannot be read is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from google.protobuf import json_format
from hypothesis import HealthCheck, given, settings

from nvrx.core.facts import Fact, WorkerExit, WorkersExited, WorldChosen
from nvrx.core.ids import LocalRank, Revision
from nvrx.server.journals.codec import ManyDecoder, UnreadableFact, decode, encode, kind_of, to_plain
from nvrx.wire.views import fact_message

from .facts import EXAMPLES, KINDS, any_fact


@pytest.mark.rule("E5")
def test_there_is_an_example_of_every_kind() -> None:
    assert {type(one) for one in EXAMPLES} == set(KINDS)


@pytest.mark.rule("E5")
@pytest.mark.parametrize("fact", EXAMPLES, ids=lambda fact: type(fact).__name__)
def test_a_fact_comes_back_as_it_was(fact: Fact) -> None:
    text = encode(fact)
    assert "\n" not in text
    again = decode(kind_of(fact), text)
    assert again == fact
    assert encode(again) == text


@pytest.mark.rule("E5")
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(any_fact())
def test_any_fact_comes_back_as_it_was(fact: Fact) -> None:
    assert decode(kind_of(fact), encode(fact)) == fact
    many = ManyDecoder()
    for _ in range(2):
        assert many.decode(kind_of(fact), encode(fact).encode()) == fact


@pytest.mark.rule("E5")
def test_facts_of_a_whole_journal_share_what_comes_again() -> None:
    chosen = next(one for one in EXAMPLES if isinstance(one, WorldChosen))
    exited = next(one for one in EXAMPLES if isinstance(one, WorkersExited))
    many = ManyDecoder()
    first, second = (many.decode("WorldChosen", encode(replace(chosen, at=at)).encode()) for at in (1.0, 2.0))
    assert (first, second) == (replace(chosen, at=1.0), replace(chosen, at=2.0))
    assert isinstance(first, WorldChosen)
    assert isinstance(second, WorldChosen)
    assert first.seats[0] is second.seats[0]
    one, other = (many.decode("WorkersExited", encode(replace(exited, at=at)).encode()) for at in (1.0, 2.0))
    assert isinstance(one, WorkersExited)
    assert isinstance(other, WorkersExited)
    assert one.exits is other.exits


@pytest.mark.rule("E5")
@pytest.mark.parametrize("fact", EXAMPLES, ids=lambda fact: type(fact).__name__)
def test_a_fact_can_be_shown(fact: Fact) -> None:
    message = fact_message(Revision(1), fact, to_plain(fact))
    assert message.kind == kind_of(fact)
    assert message.text
    assert "\n" not in message.text
    assert json.loads(json_format.MessageToJson(message.detail)).keys() == to_plain(fact).keys()


@pytest.mark.rule("A8")
def test_fields_of_a_later_version_are_ignored_and_missing_ones_take_their_defaults() -> None:
    fact = decode("NodeLeft", '{"at": 1.0, "node_id": "n", "incarnation": "i", "reason": "", "colour": "blue"}')
    assert fact == decode("NodeLeft", '{"at": 1, "node_id": "n", "incarnation": "i", "reason": "", "time": 0}')


@pytest.mark.rule("A8", "G9")
def test_rows_from_before_hangs_were_known_are_read() -> None:
    old = (
        '{"local_rank": 1, "exit_code": null, "signal": "SIGKILL", "message": "", "stopped_by_agent": false, '
        '"stderr_tail": ""}'
    )
    fact = decode("WorkersExited", f'{{"at": 1, "cycle": 0, "node_id": "n", "exits": [{old}], "time": 2}}')
    assert isinstance(fact, WorkersExited)
    assert fact.exits[0] == WorkerExit(LocalRank(1), None, "SIGKILL")
    assert not fact.exits[0].hung


@pytest.mark.rule("E5")
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("NodePainted", "{}"),
        ("Happened", '{"at": 1}'),
        ("CycleRunning", "{"),
        ("CycleRunning", ""),
        ("CycleRunning", "[]"),
        ("CycleRunning", "null"),
        ("CycleRunning", '{"at": 1}'),
        ("CycleRunning", '{"at": "x", "cycle": 0}'),
        ("RunClosed", '{"at": 1, "state": "PAINTED", "reason": "", "exit_code": 0}'),
        ("WorkersExited", '{"at": 1, "cycle": 0, "node_id": "n"}'),
        ("WorkersExited", '{"at": 1, "cycle": 0, "node_id": "n", "exits": [{"local_rank": "x"}]}'),
        (
            "WorldChosen",
            '{"at": 1, "cycle": 0, "order_source": "PROCID", "seats": [1], "standbys": [], "master": null}',
        ),
    ],
)
def test_what_is_no_fact_is_named(kind: str, body: str) -> None:
    with pytest.raises(UnreadableFact, match=kind):
        decode(kind, body)
    with pytest.raises(UnreadableFact, match=kind):
        ManyDecoder().decode(kind, body.encode())
