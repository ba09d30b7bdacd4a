"""How each kind of fault is brought about in a simulation. One function for each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nvrx.core.facts import Cause
from nvrx.core.ids import LocalRank
from nvrx.core.presence import Health

from .decisions import Operated
from .hearing import Span
from .node import Node
from .plan import Fault, Kind

if TYPE_CHECKING:
    from .simulation import Simulation

SLOW_LATENCY_S = (0.2, 1.5)
SLOW_DISK_S = (0.3, 2.0)


class Faults:
    """Brings faults about in one simulation."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def bring_about(self, fault: Fault) -> None:
        node = list(self._simulation.nodes.values())[fault.node]
        _DO[fault.kind](self, node, fault)

    def _later(self, after_s: float, call: Callable[[], None]) -> None:
        self._simulation.loop.call_later(after_s, call)

    # ---- nodes ------------------------------------------------------------------------------------------

    def worker_fails(self, node: Node, fault: Fault) -> None:
        rank = LocalRank(fault.amount % node.machine.workers_per_node)
        self._that_works(node).end_worker(rank, 1 + fault.amount % 100)

    def worker_finishes(self, node: Node, fault: Fault) -> None:
        rank = LocalRank(fault.amount % node.machine.workers_per_node)
        self._that_works(node).end_worker(rank, 0)

    def worker_hangs(self, node: Node, fault: Fault) -> None:
        rank = LocalRank(fault.amount % node.machine.workers_per_node)
        self._that_works(node).hang_worker(rank)

    def _that_works(self, node: Node) -> Node:
        """The node, or if it has no workers the first one that has."""
        having = (one for one in self._simulation.nodes.values() if one.machine.living())
        return node if node.machine.living() else next(having, node)

    def spawn_fails(self, node: Node, fault: Fault) -> None:
        node.machine.fails_next_spawn = True

    def spawn_slow(self, node: Node, fault: Fault) -> None:
        node.machine.spawns_slowly = True

    def ignore_term(self, node: Node, fault: Fault) -> None:
        node.machine.ignores_term = True

    def agent_terminated(self, node: Node, fault: Fault) -> None:
        node.terminate_agent()

    def agent_killed(self, node: Node, fault: Fault) -> None:
        node.kill_agent()

    def agent_started(self, node: Node, fault: Fault) -> None:
        node.start_agent()

    def power_lost(self, node: Node, fault: Fault) -> None:
        node.lose_power(fault.duration_s)

    # ---- network ----------------------------------------------------------------------------------------

    def stream_breaks(self, node: Node, fault: Fault) -> None:
        node.link.break_all("reset on the way")

    def up_stalls(self, node: Node, fault: Fault) -> None:
        node.link.block((node.link.up,), fault.duration_s)

    def down_stalls(self, node: Node, fault: Fault) -> None:
        node.link.block((node.link.down,), fault.duration_s)

    def partition(self, node: Node, fault: Fault) -> None:
        node.link.block((node.link.up, node.link.down), fault.duration_s)

    def slow(self, node: Node, fault: Fault) -> None:
        usual_s, node.link.latency_s = node.link.latency_s, SLOW_LATENCY_S

        def mend() -> None:
            node.link.latency_s = usual_s

        if usual_s != SLOW_LATENCY_S:
            self._later(fault.duration_s, mend)

    def answer_lost(self, node: Node, fault: Fault) -> None:
        node.link.answers_to_lose += 1

    # ---- coordinator ------------------------------------------------------------------------------------

    def coordinator_crashes(self, node: Node, fault: Fault) -> None:
        self._crash(fault, keep_unsynced=True)

    def coordinator_crashes_unsynced(self, node: Node, fault: Fault) -> None:
        self._crash(fault, keep_unsynced=False)

    def _crash(self, fault: Fault, *, keep_unsynced: bool) -> None:
        simulation = self._simulation
        process, simulation.coordinator = simulation.coordinator, None
        if process is not None:
            process.crash(keep_unsynced=keep_unsynced)
            self._later(fault.duration_s, simulation.start_coordinator)

    def state_lost(self, node: Node, fault: Fault) -> None:
        simulation = self._simulation
        self._crash(fault, keep_unsynced=False)
        simulation.disk.lose_all()
        simulation.checks.state_lost()
        simulation.operator.begin_anew()

    def coordinator_stops(self, node: Node, fault: Fault) -> None:
        simulation = self._simulation
        process = simulation.coordinator

        async def stop() -> None:
            assert process is not None
            await process.stop()
            if simulation.coordinator is process:
                simulation.coordinator = None
                self._later(fault.duration_s, simulation.start_coordinator)

        if process is not None:
            simulation.loop.watched(stop(), "the coordinator stops")

    def coordinator_stalls(self, node: Node, fault: Fault) -> None:
        simulation = self._simulation
        if simulation.coordinator is not None and not simulation.loop.is_suspended:
            now_s = simulation.loop.time()
            simulation.coordinator.stall(fault.duration_s)
            simulation.checks.hearing.stalls.append(Span(now_s, now_s + fault.duration_s))

    def journal_fails(self, node: Node, fault: Fault) -> None:
        self._simulation.disk.fails_next = True

    def disk_slow(self, node: Node, fault: Fault) -> None:
        usual_s, self._simulation.disk_s = self._simulation.disk_s, SLOW_DISK_S

        def mend() -> None:
            self._simulation.disk_s = usual_s

        if usual_s != SLOW_DISK_S:
            self._later(fault.duration_s, mend)

    def clock_steps(self, node: Node, fault: Fault) -> None:
        self._simulation.wall_step_s += (fault.amount - 500) * 100.0

    # ---- operators --------------------------------------------------------------------------------------

    def promote(self, node: Node, fault: Fault) -> None:
        simulation = self._simulation
        cycle = simulation.checks.durable.cycle
        replace = None
        if cycle is not None and fault.amount % 2 == 0:
            replace = list(cycle.ranks)[fault.amount % len(cycle.ranks)]
        simulation.truth.operated.add(Operated(Cause.PROMOTED, node.node_id))
        asked = simulation.operator.promote(node.node_id, replace, immediate=fault.amount % 3 != 0)
        simulation.loop.watched(asked, "promote")

    def drain(self, node: Node, fault: Fault) -> None:
        simulation = self._simulation
        simulation.truth.operated.add(Operated(Cause.DRAINED, node.node_id))
        asked = simulation.operator.drain(node.node_id, immediate=fault.amount % 3 != 0)
        simulation.loop.watched(asked, "drain")

    def undrain(self, node: Node, fault: Fault) -> None:
        self._simulation.loop.watched(self._simulation.operator.undrain(node.node_id), "undrain")

    def stop_run(self, node: Node, fault: Fault) -> None:
        simulation = self._simulation
        simulation.truth.operated.add(Operated(Cause.STOPPED, None))
        simulation.loop.watched(simulation.operator.stop_run(), "stop")

    # ---- health -----------------------------------------------------------------------------------------

    def unhealthy(self, node: Node, fault: Fault) -> None:
        node.ail(Health.UNHEALTHY, f"check {fault.amount % 3}", fault.duration_s)

    def degraded(self, node: Node, fault: Fault) -> None:
        node.ail(Health.DEGRADED, f"check {fault.amount % 3}", fault.duration_s)

    def all_unhealthy(self, node: Node, fault: Fault) -> None:
        for one in self._simulation.nodes.values():
            after_s = fault.amount % 7 * len(one.ailed_of)
            self._later(after_s, lambda one=one: one.ail(Health.UNHEALTHY, "check 0", fault.duration_s))  # type: ignore[misc]


_DO: dict[Kind, Callable[[Faults, Node, Fault], None]] = {kind: getattr(Faults, kind.name.lower()) for kind in Kind}
