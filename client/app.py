"""The agent as a process: supervisor, coordinator and the pure machine put together.

What is observed goes into `nvrx.core.agent.step`; the deeds that come out are done here. Decides nothing itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import random
import signal
import uuid
from collections.abc import Coroutine
from dataclasses import dataclass

from nvrx.commandline import EXIT_FAILED, EXIT_USAGE, Failed
from nvrx.core import agent as machine
from nvrx.core.budgets import EXIT_NO_RESTART
from nvrx.core.commands import Join
from nvrx.core.facts import NodeInfo, WorkerExit
from nvrx.core.ids import CycleNumber, Incarnation, LocalRank, global_rank
from nvrx.core.numa import describe_bindings
from nvrx.core.presence import AgentPhase
from nvrx.core.ranks import Action, Assignment, Desired
from nvrx.core.refused import Refused
from nvrx.logs import add_file

from .config import NodeConfig
from .conversation import Actual, Conversation, ExpelledByCoordinator, GraceOver, LeaseOver, Patience
from .coordinator import Coordinator, GivenUp, Joined, OutOfReach, admission
from .hangs import Hangs
from .health.monitor import HealthMonitor
from .log_link import LogError, LogLink
from .processes import pid_space
from .progress import CheckpointProgress
from .rank_maps import KeptMaps, Wanted
from .store_ports import StorePorts
from .supervisor_link import (
    Event,
    Exited,
    Gone,
    Identity,
    Note,
    Spawned,
    SpawnRefused,
    Stuck,
    SupervisorDied,
    SupervisorError,
    SupervisorLink,
    Waiting,
    WorkerSpec,
)
from .worker_environment import Place
from .worker_files import WorkerFiles
from .worker_specs import describe_place, prewarm, worker_specs
from .worker_start import signal_name

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
class _Life:
    """One incarnation's membership."""

    command: Join
    joined: Joined
    files: WorkerFiles
    maps: KeptMaps
    conversation: Conversation


class NodeAgent:
    """Runs one node's share of a run, from joining to the exit code."""

    def __init__(
        self, config: NodeConfig, coordinator: Coordinator, link: SupervisorLink, logs: LogLink, version: str
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._link = link
        self._logs = logs
        self._version = version
        self._agent = machine.Agent(config.leaves_when_excluded)
        self._host = pid_space()
        file = config.options.checkpoint_iteration_file
        self._progress = CheckpointProgress(file) if file is not None else None
        self._health = HealthMonitor(config.health, config.environment, self._health_changed)
        self._has_spawned = False
        self._incarnation: Incarnation | None = None
        self._ports = StorePorts()
        self._hangs = Hangs(config.options.hangs, config.runtime_dir, config.environment, self._observe)
        self._life: _Life | None = None
        self._ending: asyncio.Future[machine.Exit | machine.Rejoin] = asyncio.get_running_loop().create_future()
        self._chores: set[asyncio.Task[None]] = set()
        self._signal: machine.SignalReceived | None = None
        self._signalled = asyncio.Event()
        self._waiting: asyncio.TimerHandle | None = None
        self._stopping_supervisor = False
        self._bindings_said = False

    # ---- the run of it ------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Join, work, and return the exit code. Raises Failed with one line where it cannot go on."""
        self._catch_signals()
        listening = asyncio.create_task(self._hear_supervisor(), name="supervisor events")
        listening.add_done_callback(self._task_done)
        if self._progress is not None:
            self._chore(self._progress.keep_up())
        self._health.start(self._task_done)
        try:
            while True:
                ending = await self._live()
                if isinstance(ending, machine.Exit):
                    code = self._exit_code(ending.code)
                    _say_ending(code, ending.reason)
                    return code
                log.warning("joining anew: %s", ending.reason)
        finally:
            listening.cancel()
            self._hangs.watch.close()
            self._health.close()
            self._ports.close()
            await self._link.close(grace_s=self._config.options.stop_grace_s)
            await self._logs.close()

    async def _live(self) -> machine.Exit | machine.Rejoin:
        """One incarnation, from joining to its end."""
        # A signal that comes meanwhile is for the next life: the one before can do nothing about it any more.
        self._life = None
        admitted = await self._join()
        if admitted is None:
            assert self._signal is not None
            return machine.Exit(machine.SIGNALLED + self._signal.number, f"received {self._signal.name}")
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
        self._life = _Life(command, joined, files, maps, conversation)
        self._ending = asyncio.get_running_loop().create_future()
        log.info("joined run %s as %s through %s", joined.run_id, command.node.node_id, self._coordinator.endpoint)
        talking = asyncio.create_task(self._talk(conversation), name="conversation")
        talking.add_done_callback(self._task_done)
        if self._signal is not None:
            self._observe(self._signal)
        try:
            ending = await self._ending
            if isinstance(ending, machine.Exit):
                await self._say_last_words(conversation)
            return ending
        finally:
            talking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await talking

    async def _join(self) -> tuple[Joined, Join] | None:
        """None where a signal came first."""
        incarnation = Incarnation(uuid.uuid4().hex)
        options = self._config.options
        joining = asyncio.create_task(
            admission(
                self._coordinator,
                self._config.run_id,
                lambda address, dead: self._command(incarnation, address, dead or self._incarnation),
                self._config.options.advertise_addr,
                options.join_timeout_s if self._incarnation is None else options.coordinator_grace_s,
                self._signalled,
                is_known_there=self._incarnation is not None,
            )
        )
        stopped = asyncio.create_task(self._signalled.wait())
        try:
            await asyncio.wait([joining, stopped], return_when=asyncio.FIRST_COMPLETED)
            # A Join that is under way may make this node a member, who then has to leave.
            await asyncio.wait([joining], timeout=ANSWER_WITHIN_S)
            admitted = joining.result() if joining.done() else None
            if admitted is not None:
                self._incarnation = incarnation
            else:
                log.info("%s came before the coordinator answered", self._signal.name if self._signal else "a signal")
            return admitted
        except GivenUp as error:
            raise Failed(str(error), self._exit_code(error.exit_code)) from error
        finally:
            joining.cancel()
            stopped.cancel()

    def _exit_code(self, code: int) -> int:
        """D6: what says to a scheduler that the run is not to be started again may be another number there."""
        return self._config.options.no_restart_exit_code if code == EXIT_NO_RESTART else code

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
            add_file(files.agent_log)
        except OSError as error:
            raise Failed(
                f"cannot write {files.directory}: {error.strerror}; give another --log-dir", EXIT_USAGE
            ) from error

    async def _talk(self, conversation: Conversation) -> None:
        try:
            await conversation.keep_up()
        except ExpelledByCoordinator as error:
            self._observe(machine.Expelled(str(error)))
        except LeaseOver as error:
            self._observe(machine.LeaseOver(str(error)))
        except GraceOver as error:
            self._observe(machine.CoordinatorGraceOver(str(error)))

    async def _say_last_words(self, conversation: Conversation) -> None:
        """Before the agent ends: have its reports kept and the failed map fetched, if that takes no time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_WITHIN_S):
                await conversation.reports_kept()
                while self._chores:
                    await asyncio.wait(self._chores)

    # ---- observations -------------------------------------------------------------------------------------

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        endings = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
            endings.append(signal.SIGHUP)
        for number in endings:
            loop.add_signal_handler(number, self._on_signal, number)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(number, self._link.signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        self._signal = machine.SignalReceived(int(number), number.name)
        self._signalled.set()
        log.warning("received %s", number.name)
        if self._life is not None:
            self._observe(self._signal)

    def _actual(self) -> Actual:
        agent = self._agent
        return Actual(
            agent.phase, agent.cycle, self._ports.offer(), agent.acknowledged, self._step(), self._health.report
        )

    def _health_changed(self) -> None:
        if self._life is not None:
            self._life.conversation.changed()

    def _step(self) -> int | None:
        """How far training came, told by the first node of the world alone: all see the same file, and steps alike."""
        workers = self._agent.workers
        if workers is None or workers.assignment.group_rank != 0:
            return None
        in_file = self._progress.step if self._progress is not None else None
        told = self._hangs.watch.step(workers.assignment.cycle)
        return max((one for one in (in_file, told) if one is not None), default=None)

    def _on_desired(self, wanted: Desired) -> None:
        self._say_waiting(wanted)
        if wanted.assignment is not None and wanted.assignment.master is not None:
            self._ports.use(wanted.assignment.master.port)
        self._observe(machine.DesiredChanged(wanted))
        assert self._life is not None
        self._life.maps.heed(wanted)
        if wanted.action is not Action.RUN or self._agent.phase is AgentPhase.RUNNING:
            self._fetch_maps(wanted)  # else once the workers have started: nobody waits for a map

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

    async def _hear_supervisor(self) -> None:
        while True:
            await self._on_supervisor(await self._link.events.get())

    async def _on_supervisor(self, event: Event) -> None:
        match event:
            case Spawned():
                self._hangs.started(event)
                if self._config.options.prewarm:
                    warm = sum(worker.warm for worker in event.workers)
                    log.info("cycle %d: %d of %d workers forked warm", event.cycle, warm, len(event.workers))
                self._observe(machine.WorkersStarted(CycleNumber(event.cycle)))
                if self._agent.desired is not None:
                    self._fetch_maps(self._agent.desired, after_s=random.uniform(*FETCH_MAP_AFTER_S))
            case Exited():
                if self._progress is not None:
                    self._progress.look()
                self._hangs.watch.ended(LocalRank(event.local_rank))
                self._observe(machine.WorkerEnded(CycleNumber(event.cycle), await self._worker_exit(event)))
            case Gone(cycle=None):
                pass
            case Gone():
                self._hangs.watch.close()
                self._observe(machine.TreeGone(CycleNumber(event.cycle or 0)))
            case Waiting():
                log.warning("waiting for the workers of an earlier agent of this node to end (%s)", event.holder_pid)
            case Note():
                log.log(logging.WARNING if event.is_problem else logging.INFO, "%s", event.text)
            case Stuck():
                log.error("processes %s survive SIGKILL; waiting for the kernel to end them", list(event.pids))
            case SupervisorDied():
                log.error("the supervisor ended (%s), and this node's workers with it", event.message)
                self._finish(machine.Exit(EXIT_FAILED, "the supervisor ended"))

    async def _worker_exit(self, event: Exited) -> WorkerExit:
        assert self._life is not None
        files = self._life.files
        workers = self._agent.workers
        name = signal_name(event.signal) if event.signal is not None else ""
        succeeded = event.exit_code == 0
        message, tail = "", ""
        if not succeeded and not event.stopped_by_agent and workers is not None:
            rank = global_rank(
                workers.assignment.group_rank, LocalRank(event.local_rank), workers.assignment.workers_per_node
            )
            cycle = CycleNumber(event.cycle)
            flushed = await self._logs.flush(*(str(files.output(cycle, rank, kind)) for kind in ("err", "out")))
            words = files.last_words(cycle, rank, flushed.missing_tail)
            message, tail = words.message or _unusual(event), words.stderr_tail
            log.error(
                "cycle %d: rank %d (local rank %d) failed: %s%s",
                event.cycle,
                rank,
                event.local_rank,
                name or f"exit {event.exit_code}",
                f": {message}" if message else "",
            )
        return WorkerExit(
            LocalRank(event.local_rank),
            event.exit_code,
            name,
            message,
            event.stopped_by_agent,
            tail,
        )

    def _observe(self, observed: machine.Observation) -> None:
        before = self._agent.phase
        taken = machine.step(self._agent, observed)
        self._agent = taken.agent
        for deed in taken.deeds:
            self._do(deed)
        if self._agent.phase is not before and self._agent.phase in TOLD_AT_ONCE and self._life is not None:
            self._life.conversation.changed()

    # ---- deeds --------------------------------------------------------------------------------------------

    def _do(self, deed: machine.Deed) -> None:
        assert self._life is not None
        match deed:
            case machine.Spawn():
                self._chore(self._spawn(self._life, deed.assignment))
            case machine.TakeStacks():
                self._chore(self._hangs.take_stacks(deed))
            case machine.Stop():
                self._hangs.watch.stop()
                log.info("stopping the workers of cycle %s: %s", self._agent.cycle, deed.reason)
                self._link.stop(self._config.options.stop_grace_s)
            case machine.Kill():
                self._link.kill()
            case machine.Report():
                self._life.conversation.report(deed.cycle, deed.exits, at_once=deed.at_once)
            case machine.Leave():
                self._chore(self._leave(self._life, deed))
            case machine.Rejoin() | machine.Exit():
                self._finish(deed)

    def _finish(self, ending: machine.Exit | machine.Rejoin) -> None:
        if not self._ending.done():
            self._ending.set_result(ending)

    def _chore(self, work: Coroutine[None, None, None]) -> None:
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

    async def _leave(self, life: _Life, deed: machine.Leave) -> None:
        grace_s = self._config.options.stop_grace_s
        try:
            await self._coordinator.leave(life.joined.run_id, life.command, deed.reason, deed.workers_stopped, grace_s)
        except (OutOfReach, Refused) as error:
            log.warning("could not tell the coordinator that this node leaves: %s", error)

    def _specs(self, life: _Life, given: Assignment) -> list[WorkerSpec]:
        place = Place(life.joined.run_id, life.command.node.node_id, self._coordinator.endpoint)
        failed = self._agent.desired.failed_cycle if self._agent.desired is not None else None
        sockets = self._hangs.open(given, life.files)
        return worker_specs(self._config, life.files, place, given, failed, sockets)

    def _say_bindings(self) -> None:
        """Once: they are the same in each cycle."""
        if self._config.numa.bindings and not self._bindings_said:
            log.info("NUMA: %s", describe_bindings(self._config.numa.bindings))
            self._bindings_said = True

    def _is_wanted(self, given: Assignment) -> bool:
        """Whether the workers of an assignment that were to be started are still to be."""
        workers = self._agent.workers
        return workers is not None and workers.assignment.cycle == given.cycle and not workers.stopping

    async def _gpu_memory_free(self, given: Assignment) -> None:
        """G12: what is left of the workers before may still hold the GPUs' memory when they have gone."""
        memory, had_workers = self._health.gpu_memory, self._has_spawned
        self._has_spawned = True
        if memory is not None and had_workers:
            await memory.free(self._config.options.gpu_reclaim_timeout_s, lambda: self._is_wanted(given))

    async def _spawn(self, life: _Life, given: Assignment) -> None:
        try:
            await self._gpu_memory_free(given)
            if not self._is_wanted(given):
                self._observe(machine.SpawnFailed(given.cycle, "its cycle is over"))
                return
            specs = self._specs(life, given)
            log.info("%s; output in %s", describe_place(given), life.files.cycle(given.cycle))
            self._say_bindings()
            await self._link.spawn(given.cycle, specs)
        except (SpawnRefused, OSError) as error:
            log.warning("the workers of cycle %d were not started: %s", given.cycle, error)
            self._observe(machine.SpawnFailed(given.cycle, str(error)))
        except SupervisorError as error:
            self._finish(machine.Exit(EXIT_FAILED, str(error)))


def _say_ending(code: int, reason: str) -> None:
    as_asked = code == 0 or code > machine.SIGNALLED
    level = logging.INFO if as_asked else logging.ERROR
    log.log(level, "ending with exit code %d: %s", code, reason)


def _unusual(event: Exited) -> str:
    """The supervisor's text where it says more than the exit code, as `x: not found`."""
    return event.message if event.exit_code in {126, 127} and ": " in event.message else ""


async def run_node(config: NodeConfig, version: str) -> int:
    """Run an agent in this process; its exit code. Raises Failed."""
    for note in config.numa.notes:
        log.warning("%s", note)
    identity = Identity(config.run_id, config.node_id, uuid.uuid4().hex)
    where = ",".join(str(one) for one in config.options.coordinators)
    key = hashlib.sha256(f"{where}\0{config.run_id}\0{config.node_id}".encode()).hexdigest()[:32]
    try:
        logs = await LogLink.start(config.options.log_rotation)
    except LogError as error:
        raise Failed(str(error)) from error
    try:
        link = await SupervisorLink.start(
            config.runtime_dir,
            key,
            identity,
            stop_grace_s=config.options.stop_grace_s,
            handover_fd=logs.handover_fd,
        )
    except SupervisorError as error:
        await logs.close()
        raise Failed(f"cannot start the supervisor of workers: {error}") from error
    logs.supervised(link.hand_outputs_over_again)
    prewarm(link, config)
    coordinator = Coordinator(config.options.coordinators, config.options.token)
    try:
        return await NodeAgent(config, coordinator, link, logs, version).run()
    finally:
        await coordinator.close()
