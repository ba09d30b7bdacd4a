"""One simulated agent process: the real machine, the real joining and the real conversation.

Does what `nvrx.client.app` does with them, without files, signals handlers and sockets: that shell is modelled here,
all that it puts together is real, but for the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from nvrx.client.conversation import Actual, Conversation, Patience, talk
from nvrx.client.coordinator import Coordinator, GivenUp, Joined, OutOfReach, admission
from nvrx.client.store_ports import OFFERED
from nvrx.core import agent as machine
from nvrx.core.commands import Join
from nvrx.core.endpoint import HostPort
from nvrx.core.ids import CycleNumber, Incarnation
from nvrx.core.presence import AgentPhase, HealthReport
from nvrx.core.ranks import Desired
from nvrx.core.refused import Refused

from .calls import Caller, Channel
from .loop import simulated_loop
from .supervisor import Supervisor

LAST_WORDS_WITHIN_S = 2.0
ANSWER_WITHIN_S = 1.0
TOLD_AT_ONCE = {AgentPhase.RUNNING, AgentPhase.FAILED, AgentPhase.SUCCEEDED}
ENDPOINT = HostPort("coordinator", 7700)


class SimulatedCoordinator(Coordinator):
    """The client's way to the coordinator, over the simulated network."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        super().__init__((ENDPOINT,), None)

    def _open(self) -> Any:
        return Channel(self._caller)


class Host(Protocol):
    """What the agent needs of its node, and tells it."""

    run_id: str
    address: str
    coordinator_grace_s: float
    stops_on_partition: bool
    leaves_when_excluded: bool
    join_timeout_s: float
    stop_grace_s: float
    first_port: int
    health: HealthReport

    def next_incarnation(self) -> Incarnation: ...
    def join_command(
        self, incarnation: Incarnation, last_cycle: CycleNumber | None, replaces: Incarnation | None
    ) -> Join: ...
    def trained_to(self) -> int | None: ...
    def joining(self, incarnation: Incarnation) -> None: ...
    def joined(self, incarnation: Incarnation) -> None: ...
    def did(self, incarnation: Incarnation, deed: machine.Deed, agent: machine.Agent) -> None: ...
    def spawned(self, incarnation: Incarnation, cycle: CycleNumber) -> None: ...
    def ended(self, process: AgentProcess, code: int, reason: str) -> None: ...


@dataclass
class _Life:
    command: Join
    joined: Joined
    conversation: Conversation


class AgentProcess:
    """From its start to its exit code, or to its death."""

    def __init__(self, host: Host, caller: Caller, make_supervisor: Callable[[AgentProcess], Supervisor]) -> None:
        self._host = host
        self.caller = caller
        self._coordinator = SimulatedCoordinator(caller)
        self.agent = machine.Agent(host.leaves_when_excluded)
        self._life: _Life | None = None
        self.incarnation = Incarnation("")
        self._joined_as: Incarnation | None = None
        self._loop = simulated_loop()
        self._ending: asyncio.Future[machine.Exit | machine.Rejoin] = self._loop.create_future()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._signal: machine.SignalReceived | None = None
        self._signalled = asyncio.Event()
        self.is_dead = False
        self.supervisor = make_supervisor(self)
        self._running = self._loop.watched(self._run(), "agent")

    def die(self, *, silently: bool) -> None:
        """SIGKILL, or the power fails."""
        self.is_dead = True
        self.caller.die(silently=silently)
        self.supervisor.die()
        self._running.cancel()
        for task in list(self._tasks):
            task.cancel()

    def terminate(self) -> None:
        """SIGTERM."""
        self._signal = machine.SignalReceived(int(signal.SIGTERM), "SIGTERM")
        self._signalled.set()
        if self._life is not None:
            self.observe(self._signal)

    async def _run(self) -> None:
        try:
            while True:
                ending = await self._live()
                if isinstance(ending, machine.Exit):
                    self._end(ending.code, ending.reason)
                    return
        except GivenUp as error:
            self._end(error.exit_code, str(error))

    def _end(self, code: int, reason: str) -> None:
        self.die(silently=False)
        self._host.ended(self, code, reason)

    async def _live(self) -> machine.Exit | machine.Rejoin:
        self._life = None
        admitted = await self._join()
        if admitted is None:
            assert self._signal is not None
            return machine.Exit(machine.SIGNALLED + self._signal.number, f"received {self._signal.name}")
        joined, command = admitted
        self._host.joined(command.node.incarnation)
        self._joined_as = command.node.incarnation
        conversation = Conversation(
            self._coordinator,
            joined,
            command,
            Patience(self._host.coordinator_grace_s, self._host.stops_on_partition),
            self._actual,
            self._on_desired,
            lambda _: None,
        )
        self._life = _Life(command, joined, conversation)
        self._ending = self._loop.create_future()
        talking = self._start(talk(conversation, self.observe), "conversation")
        if self._signal is not None:
            self.observe(self._signal)
        try:
            ending = await self._ending
            if isinstance(ending, machine.Exit):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORDS_WITHIN_S):
                        await conversation.reports_kept()
                        while len(self._tasks) > 1:
                            await asyncio.wait([one for one in self._tasks if one is not talking])
            return ending
        finally:
            talking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await talking

    async def _join(self) -> tuple[Joined, Join] | None:
        incarnation = self.incarnation = self._host.next_incarnation()
        self._host.joining(incarnation)
        joining = self._kept(
            self._loop.create_task(
                admission(
                    self._coordinator,
                    self._host.run_id,
                    lambda _, dead: self._host.join_command(incarnation, self.agent.cycle, dead or self._joined_as),
                    self._host.address,
                    self._host.join_timeout_s,
                    self._signalled,
                )
            )
        )
        stopped = self._start(self._signalled.wait(), "signal")
        try:
            await asyncio.wait([joining, stopped], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([joining], timeout=ANSWER_WITHIN_S)
            return joining.result() if joining.done() else None
        finally:
            joining.cancel()
            stopped.cancel()

    def _start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        return self._kept(self._loop.watched(work, name))

    def _kept(self, task: asyncio.Task[Any]) -> asyncio.Task[Any]:
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    def _actual(self) -> Actual:
        first = self._host.first_port
        agent = self.agent
        workers = agent.workers
        is_first = workers is not None and workers.started and workers.assignment.group_rank == 0
        step = self._host.trained_to() if is_first else None
        ports = tuple(range(first, first + OFFERED))
        return Actual(agent.phase, agent.cycle, ports, agent.acknowledged, step, self._host.health)

    def health_changed(self) -> None:
        if self._life is not None and not self.is_dead:
            self._life.conversation.changed()

    def _on_desired(self, wanted: Desired) -> None:
        if wanted.assignment is not None and wanted.assignment.master is not None and wanted.assignment.group_rank == 0:
            self._host.first_port = max(self._host.first_port, wanted.assignment.master.port + 1)
        self.observe(machine.DesiredChanged(wanted))

    def observe(self, observed: machine.Observation) -> None:
        """Take in what happened, and do what follows."""
        if self.is_dead or self._life is None:
            return
        before = self.agent.phase
        taken = machine.step(self.agent, observed)
        self.agent = taken.agent
        for deed in taken.deeds:
            self._host.did(self.incarnation, deed, self.agent)
            self._do(self._life, deed)
        if self.agent.phase is not before and self.agent.phase in TOLD_AT_ONCE:
            self._life.conversation.changed()

    def _do(self, life: _Life, deed: machine.Deed) -> None:
        match deed:
            case machine.Spawn():
                self.supervisor.spawn(deed.assignment.cycle)
            case machine.TakeStacks():
                self.supervisor.take_stacks(deed.cycle)
            case machine.Stop():
                self.supervisor.stop()
            case machine.Kill():
                self.supervisor.kill()
            case machine.Report():
                life.conversation.report(deed.cycle, deed.exits, at_once=deed.at_once)
            case machine.Leave():
                self._start(self._leave(life, deed), "leaving")
            case machine.Rejoin() | machine.Exit():
                if not self._ending.done():
                    self._ending.set_result(deed)

    async def _leave(self, life: _Life, deed: machine.Leave) -> None:
        with contextlib.suppress(OutOfReach, Refused):
            await self._coordinator.leave(
                life.joined.run_id, life.command, deed.reason, deed.workers_stopped, self._host.stop_grace_s
            )
