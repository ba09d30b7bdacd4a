"""A simulated node: power, its agent process, its workers, its way to the coordinator.

Tells an ear (the checks) what happens on it. Decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from nvrx.core import agent as machine
from nvrx.core.commands import Join
from nvrx.core.facts import NodeInfo
from nvrx.core.ids import CycleNumber, DomainId, GroupId, Incarnation, LocalRank, NodeId
from nvrx.core.presence import WELL, Health, HealthReport
from nvrx.core.shape import SettingsWish, Shape
from nvrx.core.topology import OrderSource

from .agent import AgentProcess
from .calls import Caller, Server
from .network import Link
from .supervisor import Machine, Supervisor

FIRST_PORT = 20_000
STEP_S = 5.0
FIRST_PID = 2_000_000_000
"""Beyond what any kernel gives: the joining agent looks for its predecessor among this machine's processes."""


class Ear(Protocol):
    """Hears what happens on nodes."""

    def joining(self, node: Node, incarnation: Incarnation) -> None: ...
    def joined(self, node: Node, incarnation: Incarnation) -> None: ...
    def did(self, node: Node, incarnation: Incarnation, deed: machine.Deed, agent: machine.Agent) -> None: ...
    def spawned(self, node: Node, incarnation: Incarnation, cycle: CycleNumber) -> None: ...
    def agent_ended(self, node: Node, process: AgentProcess, code: int, reason: str) -> None: ...


@dataclass
class Checkpoint:
    """How far training has come, on the storage that all nodes share."""

    step: int = 0
    saved_s: float = 0.0

    def save(self, now_s: float) -> int:
        """The workers of the first node train: a step more, if the last is long enough ago."""
        if now_s - self.saved_s >= STEP_S:
            self.saved_s = now_s
            self.step += 1
        return self.step


class Node:
    """One node. `agent` None: no agent process runs on it."""

    run_id = "run"

    def __init__(
        self,
        number: int,
        *,
        seed: str,
        shape: Shape,
        wish: SettingsWish,
        group_id: GroupId | None,
        domain_id: DomainId | None,
        stop_grace_s: float,
        coordinator_grace_s: float,
        stops_on_partition: bool,
        leaves_when_excluded: bool,
        checkpoint: Checkpoint | None,
        find_server: Callable[[], Server | None],
        ear: Ear,
    ) -> None:
        self.node_id = NodeId(f"n{number}")
        self.address = f"10.0.0.{number}"
        self._number = number
        self._shape = shape
        self._wish = wish
        self._group_id = group_id
        self._domain_id = domain_id
        self.stop_grace_s = stop_grace_s
        self.coordinator_grace_s = coordinator_grace_s
        self.stops_on_partition = stops_on_partition
        self.leaves_when_excluded = leaves_when_excluded
        self._checkpoint = checkpoint
        self.join_timeout_s = coordinator_grace_s
        self.first_port = FIRST_PORT
        self._find_server = find_server
        self._ear = ear
        self._lives = 0
        self.link = Link(self.node_id, Random(f"{seed}/{number}/link"))
        self.machine = Machine(Random(f"{seed}/{number}/machine"), shape.workers_per_node, stop_grace_s)
        self.agent: AgentProcess | None = None
        self.has_power = True
        self.last_exit: int | None = None
        self.sigterms = 0
        self.health = WELL
        self.ailed_of: set[str] = set()
        """Every check that ever failed on it."""

    # ---- what may happen to it --------------------------------------------------------------------------

    def start_agent(self) -> None:
        """Somebody starts the agent, unless one runs or there is no power."""
        if self.agent is None and self.has_power:
            self.agent = AgentProcess(self, Caller(self.link, self._find_server), self._make_supervisor)

    def _make_supervisor(self, process: AgentProcess) -> Supervisor:
        return Supervisor(self.machine, process.observe, lambda cycle: self.spawned(process.incarnation, cycle))

    def kill_agent(self) -> None:
        if self.agent is not None:
            self.agent.die(silently=False)
            self.agent = None

    def terminate_agent(self) -> None:
        if self.agent is not None:
            self.sigterms += 1
            self.agent.terminate()

    def lose_power(self, duration_s: float) -> None:
        if not self.has_power:
            return
        self.has_power = False
        if self.agent is not None:
            self.agent.die(silently=True)
            self.agent = None
        self.machine.lose_power()
        self.link.block((self.link.up, self.link.down), duration_s)
        asyncio.get_running_loop().call_later(duration_s, self._power_returns)

    def _power_returns(self) -> None:
        self.has_power = True
        self.link.break_all("the node was started again")

    def end_worker(self, rank: LocalRank, code: int) -> bool:
        return self.agent is not None and self.agent.supervisor.end_worker(rank, code, None)

    def hang_worker(self, rank: LocalRank) -> bool:
        return self.agent is not None and self.agent.supervisor.hang_worker(rank)

    def ail(self, state: Health, check: str, duration_s: float) -> None:
        """Its checks tell something bad for so long, or until they tell something else."""
        self.health = told = HealthReport(state, check, f"since {asyncio.get_running_loop().time():.3f}")
        if state is Health.UNHEALTHY:
            self.ailed_of.add(check)
        if self.agent is not None:
            self.agent.health_changed()
        asyncio.get_running_loop().call_later(duration_s, self.heal, told)

    def heal(self, told: HealthReport | None = None) -> None:
        if self.health is told or told is None:
            self.health = WELL
            if self.agent is not None:
                self.agent.health_changed()

    # ---- what its agent asks and tells ------------------------------------------------------------------

    def next_incarnation(self) -> Incarnation:
        self._lives += 1
        return Incarnation(f"{self.node_id}-{self._lives}")

    def join_command(
        self, incarnation: Incarnation, last_cycle: CycleNumber | None, replaces: Incarnation | None
    ) -> Join:
        info = NodeInfo(
            node_id=self.node_id,
            incarnation=incarnation,
            address=self.address,
            pid=FIRST_PID + self._lives,
            order_sources={OrderSource.PROCID: str(self._number), OrderSource.NODE_ID: str(self.node_id)},
            replacement_group_id=self._group_id,
            domain_id=self._domain_id,
            stop_grace_s=self.stop_grace_s,
            last_cycle=last_cycle,
            host=f"boot of {self.node_id}",
        )
        return Join(info, self._shape, self._wish, replaces=replaces)

    def trained_to(self) -> int | None:
        """The step that workers of the first node have come to; None where progress is not told."""
        now_s = asyncio.get_running_loop().time()
        return self._checkpoint.save(now_s) if self._checkpoint is not None else None

    def joining(self, incarnation: Incarnation) -> None:
        self._ear.joining(self, incarnation)

    def joined(self, incarnation: Incarnation) -> None:
        self._ear.joined(self, incarnation)

    def did(self, incarnation: Incarnation, deed: machine.Deed, agent: machine.Agent) -> None:
        self._ear.did(self, incarnation, deed, agent)

    def spawned(self, incarnation: Incarnation, cycle: CycleNumber) -> None:
        self._ear.spawned(self, incarnation, cycle)

    def ended(self, process: AgentProcess, code: int, reason: str) -> None:
        if self.agent is process:
            self.agent = None
            self.last_exit = code
        self._ear.agent_ended(self, process, code, reason)
