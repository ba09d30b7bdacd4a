"""One simulation: a plan, carried out under simulated time, and whether all rules held.

The faults come first; then everything is healed, and the run has to train again within a stated bound, to end well
when its workers do, and to take all its agents with it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nvrx.core.facts import Fact
from nvrx.core.ids import DomainId, GroupId, LocalRank, NodeId

from .checks import Checks
from .coordinator import CoordinatorProcess
from .decisions import Truth, Violation, require
from .disk import Disk
from .faults import Faults
from .ledger import Seated
from .loop import NothingToDo, SimulatedLoop, Spinning
from .node import Node
from .operator import Operator
from .plan import Plan

WALL_S = 1_700_000_000.0
START_WITHIN_S = 3.0
DISK_S = (0.0005, 0.02)
LOOK_AGAIN_S = 0.25
AGENT_RESTARTS_AFTER_S = 1.0
UNDER_WAY_S = 6.0
"""How long calls of before may still be under way."""
STAYS_S = 3.0
KEEPALIVE_AND_RECOVERY_S = 20.0 + 15.0
BACKOFF_AND_SETTLE_S = 30.0 + 2.0
MARGIN_S = 15.0
SPAWN_AT_MOST_S = 8.0
ENDS_WITHIN_S = 10.0
EXITS_WITHIN_S = 15.0


@dataclass(frozen=True)
class Outcome:
    """How a simulation went. `broken` None: all rules held."""

    plan: Plan
    broken: Violation | None
    transcript: list[str]
    facts: list[Fact]
    simulated_s: float


class Simulation:
    """Everything of one run of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._random = random.Random(f"{plan.seed}/simulation")
        self.disk_s = DISK_S
        self.loop = SimulatedLoop(lambda: self._random.uniform(*self.disk_s))
        self.loop.on_error = self._internal_error
        self.broken: Violation | None = None
        self._over = self.loop.create_future()
        self.nodes: dict[NodeId, Node] = {}
        self.truth = Truth(self.nodes)
        self.checks = Checks(self.truth, plan.timing, self.loop.time, self._failed)
        self.disk = Disk(self.checks.durable_now)
        self.coordinator: CoordinatorProcess | None = None
        self.wall_step_s = 0.0
        for number in range(len(plan.places)):
            node = self._node(number)
            self.nodes[node.node_id] = node
        self.operator = Operator(self.find_server, str(plan.seed))
        self.faults = Faults(self)

    def _node(self, number: int) -> Node:
        plan = self.plan
        place = plan.places[number]
        return Node(
            number,
            seed=str(plan.seed),
            shape=plan.shape,
            wish=plan.wish,
            group_id=GroupId(place.group_id) if place.group_id else None,
            domain_id=DomainId(place.domain_id) if place.domain_id else None,
            stop_grace_s=plan.stop_grace_s,
            coordinator_grace_s=plan.coordinator_grace_s,
            stops_on_partition=plan.stops_on_partition,
            leaves_when_excluded=plan.leaves_when_excluded,
            checkpoint=self.truth.checkpoint if plan.tells_progress else None,
            find_server=self.find_server,
            ear=self.checks,
        )

    # ---- what goes wrong with the simulation ------------------------------------------------------------

    def _failed(self, violation: Violation) -> None:
        if self.broken is None:
            self.broken = violation
        self._end()

    def _end(self, _: object = None) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _internal_error(self, text: str) -> None:
        self.checks.note(f"BROKEN internal error: {text}")
        self._failed(Violation("internal error", text))

    # ---- the coordinator --------------------------------------------------------------------------------

    def find_server(self) -> Any:
        return self.coordinator.server if self.coordinator is not None else None

    def start_coordinator(self) -> None:
        if self.coordinator is not None:
            return
        self.checks.note("the coordinator starts")
        self.checks.began()
        self.coordinator = CoordinatorProcess(
            self.disk,
            self.loop,
            timing=self.plan.timing,
            store=self.plan.store,
            wall=lambda: WALL_S + self.loop.time() + self.wall_step_s,
            ear=self.checks,
            on_decided=self.checks.decided,
            on_end=self._coordinator_ended,
        )

    def _coordinator_ended(self, why: str) -> None:
        self.checks.note(f"the coordinator ends: {why}")
        self.coordinator = None
        self.loop.call_later(self._random.uniform(0.5, 5.0), self.start_coordinator)

    # ---- the course of it -------------------------------------------------------------------------------

    def run(self) -> Outcome:
        random.seed(self.plan.seed)  # the back-off of real clients draws from the module's own
        asyncio.set_event_loop(self.loop)
        try:
            with _unlogged():
                course = self.loop.watched(self._course(), "course")
                course.add_done_callback(self._end)
                try:
                    self.loop.run_until_complete(self._over)
                except (Spinning, NothingToDo) as error:
                    self._internal_error(str(error))
        finally:
            self._tear_down()
            asyncio.set_event_loop(None)
        return Outcome(self.plan, self.broken, self.checks.lines, self.checks.facts, self.loop.time())

    def _tear_down(self) -> None:
        self.loop.on_error = lambda _: None
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        if self.coordinator is not None:
            self.coordinator.server.is_up = False
        self.loop.call_soon(self.loop.stop)
        with _unlogged():
            self.loop.run_forever()
        self.loop.close()

    async def _course(self) -> None:
        self.start_coordinator()
        self.operator.watch(self.checks)
        for node in self.nodes.values():
            self.loop.call_later(self._random.uniform(0.0, START_WITHIN_S), node.start_agent)
        for fault in self.plan.faults:
            await asyncio.sleep(max(0.0, fault.at_s - self.loop.time()))
            self.checks.note(f"FAULT n{fault.node}: {fault.kind.value} ({fault.duration_s:.2f} s)")
            self.faults.bring_about(fault)
        await asyncio.sleep(max(0.0, self.plan.quiet_from_s - self.loop.time()))
        try:
            await self._quiet()
        except Violation as violation:
            self.checks.note(f"BROKEN {violation}")
            self._failed(violation)

    async def _quiet(self) -> None:
        """C4, D2, D9: with enough healthy nodes and quiet, the run trains, or is closed, within a bound."""
        self.checks.note("QUIET: everything is healed")
        self._heal()
        keeping = self.loop.watched(self._keep_agents(), "agents are started again")
        await asyncio.sleep(UNDER_WAY_S)
        plan = self.plan
        bound_s = (
            plan.timing.lease_ttl_s
            + KEEPALIVE_AND_RECOVERY_S
            + BACKOFF_AND_SETTLE_S
            + 2 * (plan.stop_grace_s + SPAWN_AT_MOST_S)
            + MARGIN_S
        )
        await self._within(bound_s, lambda: self._is_training() or self._is_closed(), "liveness", self._how_it_stands)
        if not self._is_closed():
            number = len(self.checks.durable.cycles)
            await asyncio.sleep(STAYS_S)
            ended = len(self.checks.durable.cycles) > number or not self._is_training()
            require(not ended, "liveness", "nothing happened, and the cycle did not stay")
            self._finish()
            await self._within(ENDS_WITHIN_S, self._is_closed, "D8", self._how_it_stands)
        keeping.cancel()
        self.checks.note("the run is closed: all agents are to end")
        await self._within(EXITS_WITHIN_S + plan.stop_grace_s, self._all_exited, "D8", self._who_is_left)
        await self._within(ENDS_WITHIN_S, lambda: self.operator.seen == len(self.checks.facts), "watch", lambda: "")

    async def _within(self, bound_s: float, holds: Callable[[], bool], rule: str, how: Callable[[], str]) -> None:
        until_s = self.loop.time() + bound_s
        while not holds():
            require(self.loop.time() < until_s, rule, f"not within {bound_s:g} s: {how()}")
            await asyncio.sleep(LOOK_AGAIN_S)

    def _heal(self) -> None:
        self.disk_s = DISK_S
        self.disk.fails_next = False
        self.start_coordinator()
        for node in self.nodes.values():
            node.machine.ignores_term = False
            node.machine.fails_next_spawn = False
            node.link.answers_to_lose = 0
            node.heal()

    async def _keep_agents(self) -> None:
        """What a scheduler and an operator do who want the run to go on."""
        while True:
            for node in self.nodes.values():
                if node.agent is None and self.checks.durable.closed is None:
                    node.start_agent()
            for node_id in sorted(self.checks.durable.drained & self.checks.durable.live.keys()):
                await self.operator.undrain(node_id)
            await asyncio.sleep(AGENT_RESTARTS_AFTER_S)

    def _is_closed(self) -> bool:
        return self.checks.durable.closed is not None

    def _is_training(self) -> bool:
        """The cycle runs, and truly: each of its nodes is heard, and has all its workers or has finished."""
        cycle = self.checks.durable.cycle
        return (
            cycle is not None and cycle.is_live and cycle.ran and all(self._trains(cycle, one) for one in cycle.ranks)
        )

    def _trains(self, cycle: Seated, node_id: NodeId) -> bool:
        node, incarnation = self.nodes[node_id], cycle.incarnations[node_id]
        told = self.checks.durable.exits.get((cycle.number, node_id), {})
        if len(told) == node.machine.workers_per_node and all(one.succeeded for one in told.values()):
            return True
        if node.agent is None or node.agent.incarnation != incarnation:
            return False
        is_heard = self.checks.hearing.may_be_fresh(incarnation, self.loop.time())
        ends = [node.machine.ends.get((cycle.number, LocalRank(one))) for one in range(node.machine.workers_per_node)]
        working = {tree.cycle: len(tree.alive) for tree in node.machine.living()}.get(cycle.number, 0)
        finished = sum(1 for one in ends if one is not None and one.succeeded)
        return is_heard and working + finished == len(ends)

    def _finish(self) -> None:
        cycle = self.checks.durable.cycle
        assert cycle is not None
        self.checks.note(f"all workers of cycle {cycle.number} exit 0")
        for node_id in cycle.ranks:
            for rank in range(self.plan.shape.workers_per_node):
                self.nodes[node_id].end_worker(LocalRank(rank), 0)

    def _all_exited(self) -> bool:
        return all(node.agent is None for node in self.nodes.values())

    def _who_is_left(self) -> str:
        return ", ".join(name for name, node in self.nodes.items() if node.agent is not None) + " have not exited"

    def _how_it_stands(self) -> str:
        waiting = ""
        if self.coordinator is not None:
            waiting = "; ".join(one.waiting for one in self.coordinator.engine.runs.values())
        return f"cycle {self.checks.durable.cycle}; waiting: {waiting}"


@contextmanager
def _unlogged() -> Iterator[None]:
    """What the real parts log is not shown."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def simulate(plan: Plan) -> Outcome:
    """Carry a plan out."""
    return Simulation(plan).run()
