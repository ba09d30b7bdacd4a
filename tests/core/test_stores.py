"""Stores that the coordinator has served: which port a cycle gets, how long it is needed, what its loss costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvrx.core.facts import Cause, Endpoint, WorkerExit
from nvrx.core.ids import CycleNumber, LocalRank
from nvrx.core.presence import AgentPhase, HostedStores, StoreMode
from nvrx.core.shape import SettingsWish
from nvrx.core.stores import hosted_ports, ports_in_use

from .driver import World, ended

PORTS = (30_001, 30_002, 30_003, 30_004)
OFFER = HostedStores("10.9.9.9", 7701, PORTS[:2])


def served(min_nodes: int = 2, max_nodes: int = 3, offer: HostedStores = OFFER) -> World:
    """Cycle 0 runs and meets in a hosted store."""
    world = World(min_nodes, max_nodes, 2, SettingsWish(max_restarts=1), store=StoreMode.BRIDGE)
    world.presence.stores = offer
    world.join(*(f"n{number}" for number in range(max_nodes)))
    world.start()
    return world


def in_use(world: World) -> set[int]:
    return set(ports_in_use(world.run, world.presence))


@pytest.mark.rule("I1", "I2")
def test_each_cycle_gets_a_port_of_its_own() -> None:
    world = served()
    assert world.cycle.master == Endpoint("10.9.9.9", PORTS[0], 7701)
    world.exit("n0", 0, 1)
    assert world.cycle.master == Endpoint("10.9.9.9", PORTS[1], 7701)
    assert hosted_ports(world.run) == set(PORTS[:2])


@pytest.mark.rule("I2")
def test_no_cycle_begins_without_a_port() -> None:
    world = World(1, 1, store=StoreMode.BRIDGE)
    world.join("n0")
    assert world.waiting() == "the store process has yet to open a port for the next cycle"
    world.presence.stores = HostedStores(problem="every port of --store-ports 1-2 is taken")
    assert world.waiting() == "every port of --store-ports 1-2 is taken"
    world.presence.stores = OFFER
    world.tick()
    assert world.cycle.master == Endpoint("10.9.9.9", PORTS[0], 7701)


@pytest.mark.rule("I2")
def test_a_port_that_is_in_use_or_was_just_now_is_not_given_again() -> None:
    """Also while the store process has not yet taken it back."""
    world = served()
    world.presence.stores = replace(OFFER, ports=PORTS[:1])
    world.exit("n0", 0, 1)
    assert world.waiting() == "the store process has yet to open a port for the next cycle"
    zero = CycleNumber(0)
    world.report("n0", [ended(1, signal="SIGTERM", stopped=True)], zero)
    world.report("n1", [ended(rank, signal="SIGTERM", stopped=True) for rank in range(2)], zero)
    assert in_use(world) == set()
    assert world.waiting() == "the store process has yet to open a port for the next cycle"
    world.presence.stores = OFFER
    world.tick()
    assert world.cycle.master == Endpoint("10.9.9.9", PORTS[1], 7701)


@pytest.mark.rule("I2")
def test_a_store_is_needed_until_its_workers_are_gone() -> None:
    world = served()
    assert in_use(world) == {PORTS[0]}
    world.exit("n0", 0, 1)
    assert in_use(world) == set(PORTS[:2]), "n1 has not told yet"
    zero = CycleNumber(0)
    world.report("n0", [ended(1, signal="SIGTERM", stopped=True)], zero)
    world.report("n1", [ended(rank, signal="SIGTERM", stopped=True) for rank in range(2)], zero)
    assert in_use(world) == {PORTS[1]}


@pytest.mark.rule("I2")
def test_a_lost_nodes_workers_need_no_store() -> None:
    world = served()
    zero = CycleNumber(0)
    world.freeze("n1")
    world.advance(world.timing.lease_ttl_s + 1)
    assert world.active() == ["n0", "n2"]
    assert PORTS[0] in in_use(world), "n0 may still have workers of cycle 0"
    world.report("n0", [ended(rank, signal="SIGTERM", stopped=True) for rank in range(2)], zero)
    assert in_use(world) == {PORTS[1]}


@pytest.mark.rule("I2")
def test_a_node_that_left_may_still_write_its_checkpoint() -> None:
    world = served()
    zero = CycleNumber(0)
    world.leave("n1", grace_s=5.0)
    world.report("n0", [ended(rank, signal="SIGTERM", stopped=True) for rank in range(2)], zero)
    assert in_use(world) == {PORTS[0]}, "and no other cycle has begun"
    world.advance(8)
    assert in_use(world) == {PORTS[1]}


@pytest.mark.rule("I2")
def test_who_started_the_next_cycle_has_nothing_left_of_the_last() -> None:
    world = served()
    world.exit("n0", 0, 1)
    for name in world.active():
        node = world.node(name)
        node.phase, node.cycle = AgentPhase.STARTING, world.cycle.number
        world.hear(name)
    assert PORTS[0] in in_use(world), "an agent that says STARTING may still be stopping old workers"
    world.start()
    assert in_use(world) == {PORTS[1]}


@pytest.mark.rule("I2")
def test_a_closed_run_needs_its_store_until_all_have_told_or_gone() -> None:
    world = served()
    world.finish("n0", "n1")
    assert not world.run.is_open
    assert in_use(world) == set()
    world = served()
    world.exit("n0", 0, 1)
    world.exit("n0", 0, 1)
    assert not world.run.is_open
    assert in_use(world) == {*PORTS[:2]}
    world.kill("n0", "n1")
    assert in_use(world) == set()


@pytest.mark.rule("I6", "D5")
@pytest.mark.parametrize(("code", "signal"), [(1, ""), (0, "SIGABRT")])
def test_who_fails_for_want_of_the_store_costs_no_restart(code: int, signal: str) -> None:
    world = served()
    for number in range(3):
        port = PORTS[number]
        world.presence.stores = HostedStores("10.9.9.9", 7701, (PORTS[number + 1],), lost=frozenset({port}))
        world.tick()
        assert world.cycle.is_live, "training that does not need the store goes on"
        world.exit("n0", 0, code, signal)
        world.start()
        failure = world.run.cycles[-2].failure
        assert failure is not None
        assert (failure.cause, failure.rank) == (Cause.STORE_LOST, 0)
    assert world.run.is_open


@pytest.mark.rule("I6")
def test_the_store_does_not_explain_everything() -> None:
    """Out of memory, a fault in the program, a hang: a store's loss has nothing to do with it, nor that of another."""
    for signal, lost in (("SIGKILL", PORTS[0]), ("SIGSEGV", PORTS[0]), ("SIGABRT", PORTS[3])):
        world = served()
        world.presence.stores = replace(OFFER, lost=frozenset({lost}))
        world.exit("n0", 0, 0, signal)
        failure = world.run.cycles[0].failure
        assert failure is not None
        assert failure.cause is Cause.WORKER_FAILED
    world = served()
    world.presence.stores = replace(OFFER, lost=frozenset({PORTS[0]}))
    world.report("n0", [WorkerExit(LocalRank(0), message="no heartbeat for 30.0 s", hung=True)])
    failure = world.run.cycles[0].failure
    assert failure is not None
    assert failure.cause is Cause.HANG
