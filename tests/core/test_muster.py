"""Joining many at once is joining one after another: the same run, or the same refusal of the same node."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx.core.commands import Join
from nvrx.core.facts import NodeInfo, NodeLost, RunOpened
from nvrx.core.ids import CycleNumber, GroupId, Incarnation, NodeId, RunId
from nvrx.core.join import decide_join
from nvrx.core.muster import Muster
from nvrx.core.presence import Presence
from nvrx.core.refused import Refused
from nvrx.core.run import Run, evolve
from nvrx.core.shape import Settings, SettingsWish, Shape
from nvrx.core.topology import OrderSource

SOURCES = [OrderSource.CROSS, OrderSource.PROCID, OrderSource.GROUP_RANK]


@st.composite
def joins(draw: st.DrawFn) -> list[Join]:
    size = draw(st.sampled_from([1, 1, 2, 3]))
    shape = Shape(size, draw(st.integers(size, 7)), 2, replacement_group_size=size)
    found = []
    for number in range(draw(st.integers(0, 9))):
        # mostly numbered through, so that many get in before one is refused
        order = {
            source: str(draw(st.sampled_from([number, number, number, 0])))
            for source in SOURCES
            if draw(st.sampled_from([True, True, True, False]))
        }
        node_id = NodeId(draw(st.sampled_from([f"n{number}", f"n{number}", f"n{number}", "n0"])))
        group = draw(st.sampled_from([f"g{number // size}", f"g{number // size}", "g0", None]))
        info = NodeInfo(
            node_id=node_id,
            incarnation=Incarnation(f"life-{number}"),
            address=draw(st.sampled_from(["10.0.0.1", "10.0.0.1", "10.0.0.1", "10.0.0.1", "10.0.0.1", ""])),
            pid=1,
            order_sources={OrderSource.NODE_ID: node_id, **order},
            replacement_group_id=GroupId(group) if group is not None else None,
            group_array_job_id=draw(st.sampled_from(["7", "7", "7", "7", "8"])),
            restart_count=draw(st.sampled_from([0, 0, 0, 0, 1])),
            last_cycle=draw(st.sampled_from([None, None, None, CycleNumber(7)])),
        )
        other = Shape(size, shape.max_nodes, 3, replacement_group_size=size)
        found.append(Join(info, draw(st.sampled_from([shape] * 9 + [other])), SettingsWish()))
    return found


class Outcome:
    """What came of joins: the run, and who was refused how."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.refused: list[object] = []


def one_by_one(run: Run, commands: list[Join]) -> Outcome:
    out = Outcome(run)
    presence = Presence()
    for command in commands:
        try:
            facts = decide_join(out.run, presence, command, 0.0)
        except Refused as error:
            out.refused.append((command.node.incarnation, error.reason, error.message, error.details))
            return out
        for fact in facts:
            out.run = evolve(out.run, fact)
            if isinstance(fact, NodeLost):
                presence.forget(fact.node_id)
        presence.joined(command.node.node_id, command.node.incarnation, 0.0)
        presence.connected(command.node.node_id, 0.0)
    return out


def at_once(run: Run, commands: list[Join]) -> Outcome:
    out = Outcome(run)
    muster = Muster(run, Presence(), 0.0)
    for command in commands:
        try:
            muster.join(command)
        except Refused as error:
            out.refused.append((command.node.incarnation, error.reason, error.message, error.details))
            break
    out.run = muster.run()
    return out


@pytest.mark.rule("A5", "B4", "B6")
@settings(max_examples=600)
@given(joins())
def test_at_once_is_one_by_one(commands: list[Join]) -> None:
    shape = commands[0].shape if commands else Shape(1, 1, 1)
    run = evolve(None, RunOpened(0.0, RunId("run"), shape, Settings()))
    slow, quick = one_by_one(run, commands), at_once(run, commands)
    assert quick.refused == slow.refused
    assert quick.run == slow.run
    assert list(quick.run.members) == list(slow.run.members)


def test_a_run_of_4096_gathers_without_deciding_each() -> None:
    shape = Shape(4096, 4096, 8, replacement_group_size=4)
    run = evolve(None, RunOpened(0.0, RunId("run"), shape, Settings()))
    muster = Muster(run, Presence(), 0.0)
    for number in range(4096):
        info = NodeInfo(
            node_id=NodeId(f"n{number}"),
            incarnation=Incarnation("1"),
            address="10.0.0.1",
            pid=1,
            order_sources={OrderSource.PROCID: str(number)},
            replacement_group_id=GroupId(str(number // 4)),
        )
        muster.join(Join(info, shape, SettingsWish()))
    assert len(muster.run().members) == 4096
    assert muster.run().short_since is None
