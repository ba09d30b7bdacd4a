"""Whom a closed run still has to tell, and for how long (`--once`)."""

from __future__ import annotations

import asyncio

import pytest

from nvrx.core.ids import Incarnation, NodeId
from nvrx.core.presence import Word
from nvrx.core.run import Run
from nvrx.server.partings import ASKS_AGAIN_WITHIN_S, MAX_TURNED_AWAY, Leaving, Partings, all_over
from tests.core.driver import RUN_ID, World, trained


def closed_world() -> World:
    world = trained(2, 2)
    world.finish("n0", "n1")
    assert not world.run.is_open
    return world


def leaving(world: World, partings: Partings, now: float) -> Leaving:
    return Leaving(world.run, world.presence, partings, lambda: now)


@pytest.mark.rule("D9")
def test_a_member_that_was_not_told_is_awaited_until_its_lease_is_over() -> None:
    world = closed_world()
    world.presence.heard(NodeId("n0"), Word(world.node("n0").phase), 3.0)
    partings = Partings({Incarnation(world.node("n1").incarnation)})
    assert partings.awaited_until(world.run, world.presence) == 13.0
    partings.told.add(Incarnation(world.node("n0").incarnation))
    assert partings.awaited_until(world.run, world.presence) is None


@pytest.mark.rule("A5")
def test_who_was_turned_away_is_awaited_until_it_must_have_asked_again() -> None:
    world = closed_world()
    partings = Partings({Incarnation(one.incarnation) for one in world.nodes.values()})
    partings.turn_away(NodeId("n7"), 4.0)
    assert partings.awaited_until(world.run, world.presence) == 4.0 + ASKS_AGAIN_WITHIN_S
    for number in range(2 * MAX_TURNED_AWAY):
        partings.turn_away(NodeId(f"x{number}"), 5.0)
    assert len(partings.turned_away) == MAX_TURNED_AWAY


@pytest.mark.rule("A3")
@pytest.mark.parametrize("why", ["no run", "open", "not the declared one"])
def test_what_is_not_over(why: str) -> None:
    world = closed_world()
    runs = {} if why == "no run" else {RUN_ID: leaving(world, Partings(), 1000.0)}
    if why == "open":
        runs[RUN_ID] = leaving(trained(2, 2), Partings(), 1000.0)
    declared = Run(run_id=RUN_ID, shape=world.shape, settings=world.run.settings).run_id if why == "no run" else None

    async def wait() -> None:
        changed = asyncio.Event()
        over = asyncio.create_task(
            all_over(lambda: runs, type(RUN_ID)("other") if why.startswith("not") else declared, changed, 5.0)
        )
        await asyncio.sleep(0)
        changed.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not over.done()
        over.cancel()

    asyncio.run(wait())


@pytest.mark.rule("D9")
def test_over_when_all_were_told_or_nobody_is_awaited_any_more() -> None:
    world = closed_world()
    asyncio.run(all_over(lambda: {RUN_ID: leaving(world, Partings(), 1000.0)}, None, asyncio.Event(), 5.0))


@pytest.mark.rule("D9")
def test_one_that_goes_on_talking_is_borne_for_a_while_only() -> None:
    world = closed_world()
    asyncio.run(all_over(lambda: {RUN_ID: leaving(world, Partings(), 0.0)}, None, asyncio.Event(), 0.0))
