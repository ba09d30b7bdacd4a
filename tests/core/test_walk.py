"""Random walks: anything may happen in any order, the invariants hold after each step (they are in the driver).

Ends by asking for two laws: the journal gives the state back, and enough healthy nodes left in peace train again.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nvrx.core.ids import CycleNumber
from nvrx.core.presence import AgentPhase
from nvrx.core.refused import Refused
from nvrx.core.shape import SettingsWish

from .driver import World, ended

NAMES = [f"n{number}" for number in range(6)]
names = st.sampled_from(NAMES)
LIVELY_WITHIN_S = 30.0
"""Leases, reconnect grace, recovery span and the longest stop grace of the walk, one after the other."""


class Walk(RuleBasedStateMachine):
    """A run of 2 or 3 nodes with standbys, and everything that may happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(1, 1)

    @initialize(
        min_nodes=st.integers(1, 3),
        more=st.integers(0, 2),
        workers=st.integers(1, 2),
        max_restarts=st.sampled_from([0, 1, 50]),
        max_replacements=st.sampled_from([None, 0, 1]),
        last_call_s=st.sampled_from([0.0, 1.0]),
    )
    def begin(
        self,
        min_nodes: int,
        more: int,
        workers: int,
        max_restarts: int,
        max_replacements: int | None,
        last_call_s: float,
    ) -> None:
        wish = SettingsWish(max_restarts, max_replacements, join_timeout_s=60.0, last_call_s=last_call_s)
        self.world = World(min_nodes, min_nodes + more, workers, wish)
        self.world.join(*NAMES[:min_nodes])

    def known(self, name: str) -> bool:
        return any(str(node_id) == name for node_id in self.world.run.members)

    @rule(name=names)
    def join(self, name: str) -> None:
        """Perhaps again, perhaps as an incarnation that was declared lost."""
        try:
            self.world.join(name)
        except Refused:
            return

    @rule(name=names, reopen=st.booleans(), requeued=st.booleans())
    def rejoin(self, name: str, reopen: bool, requeued: bool) -> None:
        node = self.world.node(name)
        node.restart_count += requeued
        was = (node.life, node.phase, node.cycle)
        try:
            self.world.rejoin(name, reopen=reopen)
        except Refused:
            node.life, node.phase, node.cycle = was

    @rule(name=names)
    def connect(self, name: str) -> None:
        node = self.world.node(name)
        member = self.world.run.live(node.name)
        if member is not None and member.info.incarnation == node.incarnation:
            self.world.connect(name)

    @rule(gone=st.lists(names, min_size=1, unique=True), silently=st.booleans())
    def lose(self, gone: list[str], silently: bool) -> None:
        there = [name for name in gone if self.known(name)]
        if silently:
            self.world.freeze(*there)
        else:
            self.world.kill(*there)

    @rule(name=names, stopped=st.booleans())
    def leave(self, name: str, stopped: bool) -> None:
        self.world.node(name)
        try:
            self.world.leave(name, stopped=stopped)
        except Refused:
            return

    @precondition(lambda self: self.world.opened is not None and self.world.is_training)
    @rule()
    def start(self) -> None:
        self.world.start()

    @precondition(lambda self: self.world.opened is not None and self.world.run.cycles)
    @rule(
        name=names,
        local_rank=st.integers(0, 2),
        back=st.integers(0, 1),
        how=st.sampled_from(["finished", "finished", "failed", "stopped"]),
    )
    def exit(self, name: str, local_rank: int, back: int, how: str) -> None:
        self.world.node(name)
        code = 0 if how == "finished" else 1
        cycle = CycleNumber(self.world.cycle.number - back)
        try:
            self.world.report(name, [ended(local_rank, code, stopped=how == "stopped")], cycle)
        except Refused:
            return

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5, 11.0, 70.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule()
    def restart_coordinator(self) -> None:
        self.world.restart_coordinator()

    @rule(late_s=st.sampled_from([0.5, 20.0]))
    def stall(self, late_s: float) -> None:
        """The coordinator is suspended, and knows it (rule E1)."""
        self.world.now += late_s
        self.world.presence.extend(late_s)
        self.world.next_beat += late_s

    @invariant()
    def someone_is_told_what_to_do(self) -> None:
        run = self.world.opened
        if run is None or not self.world.is_training:
            return
        told = [self.world.desired(str(one.info.node_id)).assignment for one in run.live_members()]
        ranks = [one.group_rank for one in told if one is not None and one.cycle == self.world.cycle.number]
        assert len(ranks) == len(set(ranks)) <= run.shape.min_nodes

    def teardown(self) -> None:
        if self.world.opened is not None:
            self.world.restart_coordinator()
            self._quiet()

    def _quiet(self) -> None:
        """C4, D2, D9: MIN healthy nodes and quiet, and the run is closed or has a live cycle within a bound."""
        world = self.world
        run = world.run
        if not run.is_open:
            return
        for member in list(run.live_members()):
            world.connect(str(member.info.node_id))
        for name in NAMES:
            run = world.run
            if run.is_open and sum(1 for _ in run.live_members()) < run.shape.min_nodes:
                node = world.node(name)
                if run.live(node.name) is None:
                    node.phase, node.cycle = AgentPhase.IDLE, None
                    world.rejoin(name)
        world.advance(LIVELY_WITHIN_S)
        assert world.is_training or not world.run.is_open, f"nothing runs: {world.waiting()}"


class LongWalk(Walk):
    """The same, for hundreds of steps."""


TestWalk = pytest.mark.rule("C5", "D1", "D2", "D5", "E5")(Walk.TestCase)
TestLongWalk = pytest.mark.rule("C5", "D1", "D2", "D5", "E5")(LongWalk.TestCase)
TestLongWalk.settings = settings(
    max_examples=8,
    stateful_step_count=300,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    deadline=None,
    database=None,
)
TestWalk.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    deadline=None,
    database=None,
)
