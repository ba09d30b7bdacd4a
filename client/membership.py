"""One node's membership in a run, whoever starts its workers: joins, talks, joins anew, and ends.

What is observed goes into `nvrx.core.agent.step`; the deeds that come out are a subclass's, where they touch workers.
Decides nothing itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import uuid
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import dataclass

from nvrx.commandline import EXIT_FAILED, EXIT_USAGE
from nvrx.core import agent as machine
from nvrx.core.budgets import EXIT_NO_RESTART
from nvrx.core.commands import Join
from nvrx.core.facts import NodeInfo
from nvrx.core.ids import CycleNumber, Incarnation
from nvrx.core.presence import AgentPhase
from nvrx.core.ranks import Action, Desired
from nvrx.core.refused import Refused
from nvrx.logs import add_file

from .config import NodeConfig
from .conversation import Actual, Conversation, Patience, talk
from .coordinator import Coordinator, GivenUp, Joined, OutOfReach, admission
from .processes import pid_space
from .progress import CheckpointProgress
from .rank_maps import KeptMaps, Wanted
from .store_ports import StorePorts
from .worker_environment import Place
from .worker_files import WorkerFiles

log = logging.getLogger("nvrx.node")

LAST_WORDS_WITHIN_S = 2.0
"""How long an agent that ends still tries to tell how its workers ended, and to fetch the failed map."""

SAY_WAITING_AFTER_S = 1.0

FETCH_MAP_AFTER_S = (0.5, 1.5)
"""How long after its workers' start a node reads the map of the failed cycle, at random between the two: starting
interpreters need the processors first, and a thousand nodes should not ask in the same instant."""

TOLD_AT_ONCE = {AgentPhase.RUNNING, AgentPhase.FAILED, AgentPhase.SUCCEEDED}
"""Phases that the coordinator waits for; others come with the next heartbeat."""

ANSWER_WITHIN_S = 1.0
"""How long an agent told to end waits for the answer to a Join that is under way."""


@dataclass
class Life:
    """One incarnation's membership."""

    command: Join
    joined: Joined
    files: WorkerFiles
    maps: KeptMaps
    conversation: Conversation


class Membership(ABC):
    """Lives in one event loop; every method is called there."""

    LOGGER = ""
    """The logger whose lines go into `agent.log`; all of them unless said otherwise."""
    LOG_DIR_OPTION = "--log-dir"

    def __init__(self, config: NodeConfig, coordinator: Coordinator, version: str) -> None:
        self._config = config
        self._coordinator = coordinator
        self._version = version
        self._agent = machine.Agent(config.leaves_when_excluded)
        self._host = pid_space()
        file = config.options.checkpoint_iteration_file
        self._progress = CheckpointProgress(file) if file is not None else None
        self._incarnation: Incarnation | None = None
        self._ports = StorePorts()
        self._life: Life | None = None
        self._ending: asyncio.Future[machine.Exit | machine.Rejoin] = asyncio.get_running_loop().create_future()
        self._chores: set[asyncio.Task[None]] = set()
        self._signal: machine.SignalReceived | None = None
        self._told_to_end = asyncio.Event()
        """It is not to wait for a coordinator that does not answer."""
        self._waiting: asyncio.TimerHandle | None = None

    # ---- what a subclass is -------------------------------------------------------------------------------

    @abstractmethod
    def _not_joined(self) -> machine.Exit:
        """How it ends where it was told to before the coordinator answered."""

    @abstractmethod
    def _do(self, deed: machine.Deed) -> None:
        """Do a deed that concerns workers; `_do_as_member` has all others."""

    async def _begin(self, life: Life) -> machine.Exit | None:
        """A life has begun; not None where it is over already."""
        if self._signal is not None:
            self._observe(self._signal)
        return None

    # ---- lives --------------------------------------------------------------------------------------------

    async def _live_on(self) -> machine.Exit:
        """Be a member, as one incarnation after another, until the run ends for this node. Raises GivenUp."""
        reading = asyncio.create_task(self._progress.keep_up()) if self._progress is not None else None
        if reading is not None:
            reading.add_done_callback(self._task_done)
        try:
            while isinstance(ending := await self._live(), machine.Rejoin):
                log.warning("joining anew: %s", ending.reason)
            return ending
        finally:
            self._ports.close()
            if reading is not None:
                reading.cancel()

    async def _live(self) -> machine.Exit | machine.Rejoin:
        """One incarnation, from joining to its end."""
        # A signal that comes meanwhile is for the next life: the one before can do nothing about it any more.
        self._life = None
        admitted = await self._join()
        if admitted is None:
            return self._not_joined()
        joined, command = admitted
        files = WorkerFiles(self._config.options.log_dir, joined.run_id, command.node.node_id)
        self._open_log(files)
        info_dir = self._config.options.cycle_info_dir
        maps = KeptMaps(self._coordinator, joined.run_id, files, info_dir, self._chore)
        conversation = Conversation(
            self._coordinator,
            joined,
            command,
            Patience(self._config.options.coordinator_grace_s, self._config.options.stops_on_partition),
            self._actual,
            self._on_desired,
            maps.keep_sent,
        )
        self._life = life = Life(command, joined, files, maps, conversation)
        self._ending = asyncio.get_running_loop().create_future()
        log.info("joined run %s as %s through %s", joined.run_id, command.node.node_id, self._coordinator.endpoint)
        talking = asyncio.create_task(talk(conversation, self._observe), name="conversation")
        talking.add_done_callback(self._task_done)
        try:
            over = await self._begin(life)
            if over is not None:
                return over
            ending = await self._ending
            if isinstance(ending, machine.Exit):
                await self._say_last_words(conversation)
            return ending
        finally:
            talking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await talking

    async def _join(self) -> tuple[Joined, Join] | None:
        """None where it was told to end first. Raises GivenUp."""
        incarnation = Incarnation(uuid.uuid4().hex)
        options = self._config.options
        joining = asyncio.create_task(
            admission(
                self._coordinator,
                self._config.run_id,
                lambda address, dead: self._command(incarnation, address, dead or self._incarnation),
                options.advertise_addr,
                options.join_timeout_s if self._incarnation is None else options.coordinator_grace_s,
                self._told_to_end,
                is_known_there=self._incarnation is not None,
            )
        )
        told = asyncio.create_task(self._told_to_end.wait())
        try:
            await asyncio.wait([joining, told], return_when=asyncio.FIRST_COMPLETED)
            # A Join that is under way may make this node a member, who then has to leave.
            await asyncio.wait([joining], timeout=ANSWER_WITHIN_S)
            admitted = joining.result() if joining.done() else None
            if admitted is not None:
                self._incarnation = incarnation
            return admitted
        finally:
            joining.cancel()
            told.cancel()

    def _command(self, incarnation: Incarnation, address: str, replaces: Incarnation | None) -> Join:
        config = self._config
        group = config.surroundings.group
        return Join(
            NodeInfo(
                node_id=config.node_id,
                incarnation=incarnation,
                address=address,
                pid=os.getpid(),
                version=self._version,
                order_sources=config.order_sources,
                array_rank=config.array_rank,
                replacement_group_id=group.group_id if group is not None else None,
                domain_id=config.surroundings.domain_id,
                devices=config.numa.devices,
                stop_grace_s=config.options.stop_grace_s,
                restart_count=config.restart_count,
                last_cycle=self._agent.cycle,
                group_array_job_id=group.array_job_id if group is not None else "",
                host=self._host,
            ),
            config.shape,
            config.wish,
            config.options.reopen,
            replaces,
        )

    def _open_log(self, files: WorkerFiles) -> None:
        try:
            add_file(files.agent_log, self.LOGGER)
        except OSError as error:
            text = f"cannot write {files.directory}: {error.strerror}; give another {self.LOG_DIR_OPTION}"
            raise GivenUp(text, EXIT_USAGE) from error

    async def _say_last_words(self, conversation: Conversation) -> None:
        """Before the agent ends: have its reports kept and the failed map fetched, if that takes no time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_WITHIN_S):
                await conversation.reports_kept()
                while chores := self._chores - {asyncio.current_task()}:
                    await asyncio.wait(chores)

    def _exit_code(self, code: int) -> int:
        """D6: what says to a scheduler that the run is not to be started again may be another number there."""
        return self._config.options.no_restart_exit_code if code == EXIT_NO_RESTART else code

    # ---- observations -------------------------------------------------------------------------------------

    def _actual(self) -> Actual:
        agent = self._agent
        return Actual(agent.phase, agent.cycle, self._ports.offer(), agent.acknowledged, self._step())

    def _step(self) -> int | None:
        """How far training came, told by the first node of the world alone: all see the same file, and steps alike."""
        workers = self._agent.workers
        if workers is None or workers.assignment.group_rank != 0:
            return None
        in_file = self._progress.step if self._progress is not None else None
        told = self._step_told(workers.assignment.cycle)
        return max((one for one in (in_file, told) if one is not None), default=None)

    def _step_told(self, cycle: CycleNumber) -> int | None:
        """The furthest step that workers of a cycle told by themselves; None where they do not."""
        return None

    def _on_desired(self, wanted: Desired) -> None:
        self._say_waiting(wanted)
        if wanted.assignment is not None and wanted.assignment.master is not None:
            self._ports.use(wanted.assignment.master.port)
        self._observe(machine.DesiredChanged(wanted))
        assert self._life is not None
        self._life.maps.heed(wanted)
        if wanted.action is not Action.RUN or self._agent.phase is AgentPhase.RUNNING:
            self._fetch_maps(wanted)  # else once the workers have started: nobody waits for a map

    def _workers_run(self, cycle: CycleNumber) -> None:
        """All workers of a cycle are there."""
        self._observe(machine.WorkersStarted(cycle))
        if self._agent.desired is not None:
            self._fetch_maps(self._agent.desired, after_s=random.uniform(*FETCH_MAP_AFTER_S))

    def _fetch_maps(self, wanted: Desired, after_s: float = 0.0) -> None:
        """Have maps that do not come by themselves; at once when the agent ends before `after_s`."""
        assert self._life is not None
        missing = self._life.maps.missing(wanted)
        if missing:
            self._chore(self._fetch(self._life.maps, missing, after_s))

    async def _fetch(self, maps: KeptMaps, missing: list[Wanted], after_s: float) -> None:
        await asyncio.wait([self._ending], timeout=after_s)
        await maps.fetch(missing)

    def _say_waiting(self, wanted: Desired) -> None:
        """Log what is waited for, once it has been so for a moment: most waits are over before anybody could read."""
        if wanted == self._agent.desired:
            return
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
        if wanted.action in {Action.WAIT, Action.STOP} and wanted.reason:
            loop = asyncio.get_running_loop()
            self._waiting = loop.call_later(SAY_WAITING_AFTER_S, log.info, "waiting: %s", wanted.reason)

    def _signalled(self, number: int, name: str) -> None:
        """This process was told to end."""
        log.warning("received %s", name)
        self._signal = machine.SignalReceived(number, name)
        if self._life is not None:
            self._observe(self._signal)

    def _observe(self, observed: machine.Observation) -> None:
        before = self._agent.phase
        taken = machine.step(self._agent, observed)
        self._agent = taken.agent
        for deed in taken.deeds:
            self._do(deed)
        if self._agent.phase is not before and self._agent.phase in TOLD_AT_ONCE and self._life is not None:
            self._life.conversation.changed()

    # ---- deeds --------------------------------------------------------------------------------------------

    def _do_as_member(self, deed: machine.Deed) -> None:
        assert self._life is not None
        match deed:
            case machine.Report():
                self._life.conversation.report(deed.cycle, deed.exits, at_once=deed.at_once)
            case machine.Leave():
                self._chore(self._leave(self._life, deed))
            case machine.Rejoin() | machine.Exit():
                self._finish(deed)

    def _finish(self, ending: machine.Exit | machine.Rejoin) -> None:
        if not self._ending.done():
            self._ending.set_result(ending)

    async def _leave(self, life: Life, deed: machine.Leave) -> None:
        grace_s = self._config.options.stop_grace_s
        try:
            await self._coordinator.leave(life.joined.run_id, life.command, deed.reason, deed.workers_stopped, grace_s)
        except (OutOfReach, Refused) as error:
            log.warning("could not tell the coordinator that this node leaves: %s", error)

    def _place(self, life: Life) -> Place:
        """Where workers belong."""
        return Place(life.joined.run_id, life.command.node.node_id, self._coordinator.endpoint)

    @property
    def _failed_cycle(self) -> CycleNumber | None:
        """The latest cycle that failed with this node in it."""
        return self._agent.desired.failed_cycle if self._agent.desired is not None else None

    def _chore(self, work: Coroutine[None, None, None]) -> None:
        """Have something done that ends by itself, and that the agent waits for a moment when it ends."""
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # A bug of ours: end loudly rather than sit as a member that hears or does nothing.
            log.error("internal error", exc_info=error)
            self._finish(machine.Exit(EXIT_FAILED, f"internal error: {error!r}"))
