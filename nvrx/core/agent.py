"""The agent's brain: what it observes goes in, what it is to do comes out.

Level-triggered: the coordinator names a desired state, the agent works towards it and may be told again at any
time. At any moment it has workers of at most one cycle; the next are started only when nothing of the old ones is
left. Knows no process, socket, file or clock.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from .facts import WorkerExit
from .ids import CycleNumber, LocalRank
from .presence import AgentPhase
from .ranks import EXIT_EXCLUDED, Action, Assignment, Desired

EXIT_LOST_COORDINATOR = 4
EXIT_NOT_STARTED = 126
"""What a shell answers for a command that it cannot run."""
SIGNALLED = 128


class Ending(enum.Enum):
    """Why an agent does no more work for its membership."""

    CLOSED = "the run is closed"
    SIGNALLED = "told to stop by a signal"
    CUT_OFF = "the coordinator was out of reach for too long"
    EXPELLED = "no longer a member"
    FENCED = "out of the coordinator's reach for its lease"
    EXCLUDED = "kept out of the world"


_JOINS_ANEW = {Ending.EXPELLED, Ending.FENCED}
_LEAVES = {Ending.SIGNALLED, Ending.EXCLUDED}
"""Endings that the coordinator is told of, once more when no process is left."""


@dataclass(frozen=True)
class Workers:
    """The workers of one cycle on this node. `tree_gone`: no process of theirs is left."""

    assignment: Assignment
    started: bool = False
    stopping: bool = False
    tree_gone: bool = False
    exits: Mapping[LocalRank, WorkerExit] = field(default_factory=dict)
    unreported: tuple[WorkerExit, ...] = ()

    taking_stacks: bool = False
    """Workers hang, and are not stopped before it is written down where."""

    @property
    def has_failed(self) -> bool:
        return any(one.failed for one in self.exits.values())

    @property
    def has_succeeded(self) -> bool:
        return len(self.exits) == self.assignment.workers_per_node and all(one.succeeded for one in self.exits.values())


@dataclass(frozen=True)
class Agent:
    """What the agent knows. `leaves_when_excluded`: it ends when its node is kept out of the world (rule E8)."""

    leaves_when_excluded: bool = False
    desired: Desired | None = None
    workers: Workers | None = None
    ending: Ending | None = None
    exit_code: int = 0
    reason: str = ""
    has_exited: bool = False

    @property
    def phase(self) -> AgentPhase:
        workers = self.workers
        if workers is None:
            return AgentPhase.IDLE
        if workers.has_failed:
            return AgentPhase.FAILED
        if workers.has_succeeded:
            return AgentPhase.SUCCEEDED
        if workers.tree_gone:
            return AgentPhase.STOPPED
        if workers.stopping:
            return AgentPhase.STOPPING
        return AgentPhase.RUNNING if workers.started else AgentPhase.STARTING

    @property
    def cycle(self) -> CycleNumber | None:
        """The cycle that `phase` is about; None before the first."""
        return self.workers.assignment.cycle if self.workers is not None else None

    @property
    def acknowledged(self) -> CycleNumber | None:
        """The cycle that the coordinator told of last (rule D12); None before the first."""
        return self.desired.cycle if self.desired is not None else None

    @property
    def has_processes(self) -> bool:
        return self.workers is not None and not self.workers.tree_gone


@dataclass(frozen=True)
class DesiredChanged:
    """The coordinator said, perhaps again, what this node is to do."""

    desired: Desired


@dataclass(frozen=True)
class WorkersStarted:
    """All workers of a cycle are running."""

    cycle: CycleNumber


@dataclass(frozen=True)
class WorkerEnded:
    """One worker ended; `exit.stopped_by_agent` if it had been sent a signal by us before."""

    cycle: CycleNumber
    exit: WorkerExit


@dataclass(frozen=True)
class WorkersHung:
    """Workers were silent for too long; who fell silent first comes first. They still run."""

    cycle: CycleNumber
    hung: tuple[WorkerExit, ...]


@dataclass(frozen=True)
class StacksTaken:
    """It is written down where the hung workers of a cycle hang, as far as could be."""

    cycle: CycleNumber


@dataclass(frozen=True)
class SpawnFailed:
    """No worker of a cycle was started."""

    cycle: CycleNumber
    message: str


@dataclass(frozen=True)
class TreeGone:
    """No process that belonged to the workers of a cycle is left."""

    cycle: CycleNumber


@dataclass(frozen=True)
class SignalReceived:
    """SIGTERM or SIGINT reached the agent."""

    number: int
    name: str


@dataclass(frozen=True)
class Expelled:
    """The coordinator does not know this incarnation any more: it was declared lost, or the journal is new."""

    reason: str


@dataclass(frozen=True)
class LeaseOver:
    """The coordinator was out of reach for this node's lease, and workers are not to run on without it (rule E3)."""

    message: str


@dataclass(frozen=True)
class CoordinatorGraceOver:
    """The coordinator was out of reach for as long as is borne."""

    message: str


Observation: TypeAlias = (
    DesiredChanged
    | WorkersStarted
    | WorkerEnded
    | WorkersHung
    | StacksTaken
    | SpawnFailed
    | TreeGone
    | SignalReceived
    | Expelled
    | LeaseOver
    | CoordinatorGraceOver
)


@dataclass(frozen=True)
class Spawn:
    """Start the workers of a cycle."""

    assignment: Assignment


@dataclass(frozen=True)
class TakeStacks:
    """Write down where these workers hang; StacksTaken follows, within seconds whatever happens."""

    cycle: CycleNumber
    hung: tuple[WorkerExit, ...]


@dataclass(frozen=True)
class Stop:
    """SIGTERM to every process of the workers, SIGKILL to what is left after the stop grace."""

    reason: str


@dataclass(frozen=True)
class Kill:
    """SIGKILL to every process of the workers, now."""


@dataclass(frozen=True)
class Report:
    """Tell the coordinator that workers ended: now, or together with the start of the next ones, which follows."""

    cycle: CycleNumber
    exits: tuple[WorkerExit, ...]
    at_once: bool = True


@dataclass(frozen=True)
class Leave:
    """Tell the coordinator that this node leaves; again once its workers are gone."""

    reason: str
    workers_stopped: bool


@dataclass(frozen=True)
class Rejoin:
    """Join anew, as another incarnation."""

    reason: str


@dataclass(frozen=True)
class Exit:
    """End the agent."""

    code: int
    reason: str


Deed: TypeAlias = Spawn | TakeStacks | Stop | Kill | Report | Leave | Rejoin | Exit


@dataclass(frozen=True)
class Step:
    """The agent after an observation, and what it is to do."""

    agent: Agent
    deeds: tuple[Deed, ...]


def step(agent: Agent, observed: Observation) -> Step:
    """Take in one observation."""
    if agent.has_exited:
        return Step(agent, ())
    deeds: list[Deed] = []
    agent = _take_in(agent, observed, deeds)
    agent = _work_towards(agent, deeds)
    if any(isinstance(deed, Spawn) for deed in deeds):
        # Nobody waits for how the old ones ended while the new ones start.
        deeds = [dataclasses.replace(deed, at_once=False) if isinstance(deed, Report) else deed for deed in deeds]
    return Step(agent, tuple(deeds))


def _take_in(agent: Agent, observed: Observation, deeds: list[Deed]) -> Agent:
    if isinstance(observed, DesiredChanged):
        return _desired_changed(agent, observed.desired, deeds)
    if isinstance(observed, _OfWorkers):
        return _workers_changed(agent, observed, deeds)
    if isinstance(observed, SignalReceived):
        return _signalled(agent, observed, deeds)
    if isinstance(observed, Expelled | LeaseOver):
        if agent.ending is not None:
            return agent
        ending = Ending.EXPELLED if isinstance(observed, Expelled) else Ending.FENCED
        why = observed.reason if isinstance(observed, Expelled) else observed.message
        return dataclasses.replace(agent, ending=ending, reason=why)
    assert isinstance(observed, CoordinatorGraceOver)
    return _end(agent, Ending.CUT_OFF, EXIT_LOST_COORDINATOR, observed.message)


def _desired_changed(agent: Agent, wanted: Desired, deeds: list[Deed]) -> Agent:
    before = agent.desired
    if before is not None and wanted.cycle is not None and before.cycle is not None and wanted.cycle < before.cycle:
        return agent
    agent = dataclasses.replace(agent, desired=wanted)
    if wanted.action is Action.EXIT:
        return _end(agent, Ending.CLOSED, wanted.exit_code or 0, wanted.reason)
    if wanted.excluded and agent.leaves_when_excluded and agent.ending is None:
        deeds.append(Leave(wanted.reason, workers_stopped=not agent.has_processes))
        return _end(agent, Ending.EXCLUDED, EXIT_EXCLUDED, wanted.reason)
    return agent


def _end(agent: Agent, ending: Ending, code: int, reason: str) -> Agent:
    if agent.ending is not None and agent.ending not in _JOINS_ANEW:
        return agent
    return dataclasses.replace(agent, ending=ending, exit_code=code, reason=reason)


def _signalled(agent: Agent, observed: SignalReceived, deeds: list[Deed]) -> Agent:
    if agent.ending is Ending.SIGNALLED:
        if agent.has_processes:
            deeds.append(Kill())
        return agent
    deeds.append(Leave(f"its agent received {observed.name}", workers_stopped=not agent.has_processes))
    return dataclasses.replace(
        agent, ending=Ending.SIGNALLED, exit_code=SIGNALLED + observed.number, reason=f"received {observed.name}"
    )


_OfWorkers: TypeAlias = WorkersStarted | WorkerEnded | WorkersHung | StacksTaken | SpawnFailed | TreeGone


def _workers_changed(agent: Agent, observed: _OfWorkers, deeds: list[Deed]) -> Agent:
    workers = agent.workers
    if workers is None or workers.assignment.cycle != observed.cycle:
        return agent
    if isinstance(observed, WorkersStarted):
        workers = dataclasses.replace(workers, started=True)
    elif isinstance(observed, WorkersHung):
        workers = _hang(workers, observed, deeds)
    elif isinstance(observed, StacksTaken):
        workers = dataclasses.replace(workers, taking_stacks=False)
    elif isinstance(observed, WorkerEnded):
        ended = _as_known(workers, observed.exit)
        workers = dataclasses.replace(
            workers,
            exits={**workers.exits, ended.local_rank: ended},
            unreported=(*workers.unreported, ended),
        )
        if not ended.stopped_by_agent:
            workers = _report(workers, deeds)
    else:
        if isinstance(observed, SpawnFailed) and not workers.stopping:
            workers = _not_started(workers, observed)
        # How those ended that we stopped is no news: it is told for all of them together.
        workers = dataclasses.replace(_report(workers, deeds), tree_gone=True)
        if agent.ending in _LEAVES:
            deeds.append(Leave(agent.reason, workers_stopped=True))
    return dataclasses.replace(agent, workers=workers)


def _hang(workers: Workers, observed: WorkersHung, deeds: list[Deed]) -> Workers:
    """G9: told at once, as every second counts; stopped as soon as it is known where they hang.

    Of workers that are being stopped already silence says nothing.
    """
    if workers.stopping or workers.taking_stacks or workers.tree_gone or workers.has_failed:
        return workers
    hung = tuple(one for one in observed.hung if one.local_rank not in workers.exits)
    if not hung:
        return workers
    workers = dataclasses.replace(
        workers,
        exits={**workers.exits, **{one.local_rank: one for one in hung}},
        unreported=(*workers.unreported, *hung),
        taking_stacks=True,
    )
    workers = _report(workers, deeds)
    deeds.append(TakeStacks(observed.cycle, hung))
    return workers


def _as_known(workers: Workers, ended: WorkerExit) -> WorkerExit:
    """How a worker ended; one that hung has hung, however it was made to end."""
    known = workers.exits.get(ended.local_rank)
    if known is None or not known.hung:
        return ended
    return dataclasses.replace(
        known, exit_code=ended.exit_code, signal=ended.signal, stopped_by_agent=ended.stopped_by_agent
    )


def _not_started(workers: Workers, observed: SpawnFailed) -> Workers:
    ranks = range(workers.assignment.workers_per_node)
    exits = tuple(WorkerExit(LocalRank(one), EXIT_NOT_STARTED, message=observed.message) for one in ranks)
    return dataclasses.replace(workers, exits={one.local_rank: one for one in exits}, unreported=exits)


def _report(workers: Workers, deeds: list[Deed]) -> Workers:
    if workers.unreported:
        deeds.append(Report(workers.assignment.cycle, workers.unreported))
    return dataclasses.replace(workers, unreported=())


def _work_towards(agent: Agent, deeds: list[Deed]) -> Agent:
    """What brings the actual state nearer to the desired one."""
    workers = agent.workers
    if workers is not None and not workers.tree_gone:
        why = _why_stop(agent, workers)
        # Not even the coordinator's next word may end them sooner; a signal to this agent may.
        may_stop = not workers.taking_stacks or agent.ending is Ending.SIGNALLED
        if why is not None and not workers.stopping and may_stop:
            deeds.append(Stop(why))
            return dataclasses.replace(agent, workers=dataclasses.replace(workers, stopping=True))
        return agent
    if agent.ending in _JOINS_ANEW:
        deeds.append(Rejoin(agent.reason))
        return Agent(agent.leaves_when_excluded, workers=workers)
    if agent.ending is not None:
        deeds.append(Exit(agent.exit_code, agent.reason))
        return dataclasses.replace(agent, has_exited=True)
    wanted = agent.desired
    if wanted is None or wanted.assignment is None or wanted.action is not Action.RUN:
        return agent
    if workers is not None and workers.assignment.cycle >= wanted.assignment.cycle:
        return agent
    deeds.append(Spawn(wanted.assignment))
    return dataclasses.replace(agent, workers=Workers(wanted.assignment))


def _why_stop(agent: Agent, workers: Workers) -> str | None:
    """Why this node's workers have to go; None while they are to work on."""
    if agent.ending is not None:
        return agent.reason
    if workers.has_failed:
        return "a worker of this node failed"
    wanted = agent.desired
    if wanted is None or (wanted.action is Action.RUN and wanted.cycle == workers.assignment.cycle):
        return None
    return wanted.reason or f"cycle {wanted.cycle} follows"
