"""Random walks: anything may happen in any order, the invariants hold after each step (they are in the driver).

Ends by asking for two laws: the journal gives the state back, and enough healthy nodes left in peace train again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nvrx.core.commands import Undrain
from nvrx.core.ids import CycleNumber, NodeId
from nvrx.core.presence import WELL, AgentPhase, Health
from nvrx.core.refused import Refused
from nvrx.core.shape import SettingsWish
from nvrx.core.topology import OrderSource

from .driver import World, ended

NAMES = [f"n{number}" for number in range(6)]
names = st.sampled_from(NAMES)
indices = st.integers(0, len(NAMES) - 1)
LIVELY_WITHIN_S = 60.0
"""Leases, reconnect grace, recovery span, the longest stop grace and the longest backoff, one after the other."""


class Walk(RuleBasedStateMachine):
    """A run of 2 or 3 nodes with standbys, and everything that may happen to it."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(1, 1)

    @initialize(
        min_nodes=st.sampled_from([2, 3, 1]),
        more=st.sampled_from([1, 2, 0]),
        workers=st.integers(1, 2),
        max_restarts=st.sampled_from([50, 50, 0, 1]),
        max_replacements=st.sampled_from([None, None, None, 1, 0]),
        last_call_s=st.sampled_from([0.0, 1.0]),
        procids=st.sampled_from(["", "012345", "543210", "012300"]),
        restart_backoff_s=st.sampled_from([0.0, 1.0, 0.0]),
        max_no_progress_cycles=st.sampled_from([0, 3]),
        max_node_failures=st.sampled_from([2, 0, 3]),
        quarantine_s=st.sampled_from([None, 5.0]),
        settle_s=st.sampled_from([0.5, 5.0]),
    )
    def begin(
        self,
        min_nodes: int,
        more: int,
        workers: int,
        max_restarts: int,
        max_replacements: int | None,
        last_call_s: float,
        procids: str,
        **limits: Any,
    ) -> None:
        wish = SettingsWish(max_restarts, max_replacements, join_timeout_s=120.0, last_call_s=last_call_s, **limits)
        self.world = World(min_nodes, min_nodes + more, workers, wish)
        for name, procid in zip(NAMES, procids, strict=False):
            self.world.node(name, {OrderSource.PROCID: procid})
        self.world.join(*NAMES[:min_nodes])

    def one_of(self, index: int, *, active: bool = False) -> str:
        """Some live member, an active one where there are any and it is asked for."""
        run = self.world.run
        there = [str(one.info.node_id) for one in run.live_members()]
        if active and self.world.is_training:
            there = [name for name in there if name in self.world.active()] or there
        return there[index % len(there)] if there else NAMES[index]

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
        was = (node.life, node.phase, node.cycle, node.restart_count)
        node.restart_count += requeued
        try:
            self.world.rejoin(name, reopen=reopen)
        except Refused:
            node.life, node.phase, node.cycle, node.restart_count = was

    @precondition(lambda self: not self.world.run.is_open)
    @rule(count=st.integers(1, 4))
    def reopen(self, count: int) -> None:
        for name in NAMES[:count]:
            self.rejoin(name, True, False)

    @rule(index=indices)
    def connect(self, index: int) -> None:
        name = self.one_of(index)
        node = self.world.node(name)
        member = self.world.run.live(node.name)
        if member is not None and member.info.incarnation == node.incarnation:
            self.world.connect(name)

    @rule()
    def all_connect(self) -> None:
        for index, _ in enumerate(list(self.world.run.live_members())):
            self.connect(index)

    @rule(
        some=st.lists(indices, min_size=1, max_size=2), silently=st.booleans(), wait_s=st.sampled_from([0.0, 3.0, 11.0])
    )
    def lose(self, some: list[int], silently: bool, wait_s: float) -> None:
        gone = {self.one_of(index) for index in some} & set(map(str, self.world.nodes))
        if silently:
            self.world.freeze(*sorted(gone))
        else:
            self.world.kill(*sorted(gone))
        self.world.advance(wait_s)

    @rule(index=indices, stopped=st.booleans())
    def leave(self, index: int, stopped: bool) -> None:
        name = self.one_of(index)
        self.world.node(name)
        try:
            self.world.leave(name, stopped=stopped)
        except Refused:
            return

    @rule(name=names)
    def workers_of_a_leaver_are_gone(self, name: str) -> None:
        node = self.world.node(name)
        if node.name in self.world.run.stopping:
            self.world.leave(name, stopped=True)

    @precondition(lambda self: self.world.is_training)
    @rule()
    def start(self) -> None:
        self.world.start()

    @precondition(lambda self: self.world.is_training)
    @rule(index=indices, step=st.integers(0, 20))
    def progress(self, index: int, step: int) -> None:
        name = self.one_of(index, active=True)
        self.world.node(name)
        self.world.progress(name, step)

    @precondition(lambda self: self.world.is_training)
    @rule(index=indices, knows=st.booleans(), wait_s=st.sampled_from([0.0, 2.5]))
    def acknowledge(self, index: int, knows: bool, wait_s: float) -> None:
        """A node says which assignment it has: this one, or the one before."""
        node = self.world.node(self.one_of(index, active=True))
        node.acknowledged = CycleNumber(self.world.cycle.number - (0 if knows else 1))
        self.world.advance(wait_s)

    @rule(
        index=indices,
        state=st.sampled_from([Health.UNHEALTHY, Health.UNHEALTHY, Health.DEGRADED, Health.HEALTHY]),
        check=st.sampled_from(["disk", "gpu"]),
        wait_s=st.sampled_from([0.0, 0.0, 3.0]),
    )
    def ail(self, index: int, state: Health, check: str, wait_s: float) -> None:
        name = self.one_of(index)
        node = self.world.node(name)
        if node.is_heard:
            self.world.ails(name, state, check)
        self.world.advance(wait_s)

    @rule(index=indices)
    def heal(self, index: int) -> None:
        self.ail(index, Health.HEALTHY, "", 0.0)

    @rule(index=indices, immediate=st.booleans(), returns=st.booleans())
    def drain(self, index: int, immediate: bool, returns: bool) -> None:
        name = self.one_of(index)
        with suppress(Refused):
            self.world.drain(name, immediate=immediate)
        if returns:
            with suppress(Refused):
                self.world.submit(Undrain(NodeId(name)))

    @rule(index=indices, immediate=st.booleans())
    def promote(self, index: int, immediate: bool) -> None:
        with suppress(Refused):
            self.world.promote(self.one_of(index), immediate=immediate)

    @precondition(lambda self: self.world.is_training)
    @rule(index=indices, local_rank=st.integers(0, 1), starts=st.booleans())
    def fail(self, index: int, local_rank: int, starts: bool) -> None:
        if starts:
            self.world.start()
        self.exit(self.one_of(index, active=True), local_rank, 0, 1, False)

    @precondition(lambda self: self.world.is_training)
    @rule(index=indices, returns=st.booleans(), other=indices)
    def promote_and_fail(self, index: int, returns: bool, other: int) -> None:
        """A node is lost and replaced, perhaps returns as a standby, then a worker fails: nobody is displaced."""
        gone = self.one_of(index, active=True)
        self.world.kill(gone)
        self.world.advance(3.0)
        if self.world.is_training:
            self.world.start()
        if returns:
            self.rejoin(gone, False, False)
        if self.world.is_training:
            self.fail(other, 0, True)

    @precondition(lambda self: self.world.is_training)
    @rule(index=indices)
    def finish(self, index: int) -> None:
        name = self.one_of(index, active=True)
        for local_rank in range(self.world.workers):
            self.exit(name, local_rank, 0, 0, False)

    @precondition(lambda self: self.world.run.cycles)
    @rule(
        name=names, local_rank=st.integers(0, 2), back=st.integers(0, 1), code=st.integers(0, 1), stopped=st.booleans()
    )
    def exit(self, name: str, local_rank: int, back: int, code: int, stopped: bool) -> None:
        """Of any node, in this cycle or the one before, of a worker that may not exist."""
        self.world.node(name)
        cycle = CycleNumber(self.world.cycle.number - back)
        try:
            self.world.report(name, [ended(local_rank, code, stopped=stopped)], cycle)
        except Refused:
            return

    @rule(name=names, back=st.integers(1, 2))
    def late_words(self, name: str, back: int) -> None:
        """Of an incarnation that was replaced: refused, and nothing changes (rule B2)."""
        node = self.world.node(name)
        if node.life < back or not self.world.run.cycles or node.name not in self.world.run.members:
            return
        node.life -= back
        try:
            with pytest.raises(Refused):
                self.world.exit(name, 0, 1)
        finally:
            node.life += back

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5, 11.0, 70.0]))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(back=st.lists(indices, max_size=3), wait_s=st.sampled_from([0.0, 3.0, 16.0]))
    def restart_coordinator(self, back: list[int], wait_s: float) -> None:
        self.world.restart_coordinator()
        for index in back:
            self.connect(index)
        self.world.advance(wait_s)

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
        for node in world.nodes.values():
            node.acknowledged = None
            node.health = WELL
        for node_id in run.drained:
            with suppress(Refused):
                world.submit(Undrain(node_id))
        for member in list(run.live_members()):
            world.connect(str(member.info.node_id))
        for name in NAMES:
            run = world.run
            if run.is_open and sum(1 for _ in run.live_members()) < run.shape.min_nodes:
                node = world.node(name)
                if run.live(node.name) is None:
                    node.phase, node.cycle = AgentPhase.IDLE, None
                    with suppress(Refused):  # another node has its place in order
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
