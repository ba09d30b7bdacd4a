"""One node's membership while torch's own agent starts and stops its workers.

The same machine as nvrx-node's (`nvrx.core.agent`), with other hands: to start workers is to offer torch's agent a
place, to stop them is to let it know, when it next asks, that it should come for another. Never imports torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import random
import uuid
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass

from nvrx.commandline import EXIT_FAILED, EXIT_USAGE
from nvrx.core import agent as machine
from nvrx.core.budgets import EXIT_NO_RESTART
from nvrx.core.commands import Join
from nvrx.core.endpoint import HostPort
from nvrx.core.facts import NodeInfo, WorkerExit
from nvrx.core.ids import CycleNumber, Incarnation, LocalRank, global_rank
from nvrx.core.presence import AgentPhase
from nvrx.core.ranks import Action, Assignment, Desired
from nvrx.core.refused import Refused
from nvrx.logs import add_file

from .app import ANSWER_WITHIN_S, FETCH_MAP_AFTER_S, LAST_WORDS_WITHIN_S, SAY_WAITING_AFTER_S, TOLD_AT_ONCE
from .config import NodeConfig
from .conversation import Actual, Conversation, ExpelledByCoordinator, GraceOver, LeaseOver, Patience
from .coordinator import Coordinator, GivenUp, Joined, OutOfReach, admission
from .processes import pid_space
from .progress import CheckpointProgress
from .rank_maps import KeptMaps, Wanted
from .store_ports import StorePorts
from .torchrun_seat import Ended, Given, Parting, Seat
from .torchrun_workers import WorkerWatch, our_variables
from .worker_environment import Place
from .worker_files import WorkerFiles
from .worker_specs import describe_place

log = logging.getLogger("nvrx.node")

LOOK_FOR_WORKERS_EVERY_S = 0.02
OUTCOME_WITHIN_S = 2.0
"""How long a node that has finished waits to hear that all have (rule D8)."""
HOW_UNKNOWN = "torchrun stopped this node's workers by itself; how they ended is not known"


@dataclass
class _Life:
    """One incarnation's membership."""

    command: Join
    joined: Joined
    files: WorkerFiles
    maps: KeptMaps
    conversation: Conversation


class TorchrunAgent:
    """Runs in an event loop of its own, beside torch's agent; every method is called in that loop."""

    def __init__(self, config: NodeConfig, coordinator: Coordinator, seat: Seat, version: str) -> None:
        self._config = config
        self._coordinator = coordinator
        self._seat = seat
        self._version = version
        self._agent = machine.Agent(config.leaves_when_excluded)
        self._host = pid_space()
        file = config.options.checkpoint_iteration_file
        self._progress = CheckpointProgress(file) if file is not None else None
        self._incarnation: Incarnation | None = None
        self._ports = StorePorts()
        self._life: _Life | None = None
        self._ending: asyncio.Future[machine.Exit | machine.Rejoin] = asyncio.get_running_loop().create_future()
        self._chores: set[asyncio.Task[None]] = set()
        self._waiting: asyncio.TimerHandle | None = None
        self._watch: WorkerWatch | None = None
        self._last_success: WorkerExit | None = None
        """The end that makes all workers of this node finished, not told yet: when it is, the cycle's store may close,
        and torch's agents meet there once more before they end."""
        self._parting = asyncio.Event()
        self._signal: machine.SignalReceived | None = None

    # ---- the run of it ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Be a member until the run ends for this node; the seat says how."""
        reading = asyncio.create_task(self._progress.keep_up()) if self._progress is not None else None
        try:
            while True:
                ending = await self._live()
                if isinstance(ending, machine.Exit):
                    self._end(ending.code, ending.reason)
                    return
                log.warning("joining anew: %s", ending.reason)
        except GivenUp as error:
            self._end(error.exit_code, str(error))
        except Exception as error:
            # A bug of ours: torch's agent must not wait for ever for a thread that is gone.
            log.error("internal error", exc_info=error)
            self._end(EXIT_FAILED, f"internal error: {error!r}")
        finally:
            self._ports.close()
            self._forget_workers()
            for task in (*self._chores, *([reading] if reading is not None else [])):
                task.cancel()

    def _end(self, code: int, reason: str) -> None:
        """D6: what says to a scheduler that the run is not to be started again may be another number there."""
        number = self._config.options.no_restart_exit_code if code == EXIT_NO_RESTART else code
        self._seat.end(Ended(number, reason))

    async def _live(self) -> machine.Exit | machine.Rejoin:
        """One incarnation, from joining to its end."""
        self._life = None
        admitted = await self._join()
        if admitted is None:
            return machine.Exit(EXIT_FAILED, "torch's agent ended before the coordinator answered")
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
        self._life = life = _Life(command, joined, files, maps, conversation)
        self._ending = asyncio.get_running_loop().create_future()
        log.info("joined run %s as %s through %s", joined.run_id, command.node.node_id, self._coordinator.endpoint)
        talking = asyncio.create_task(self._talk(conversation), name="conversation")
        talking.add_done_callback(self._task_done)
        try:
            if self._signal is not None:
                self._observe(self._signal)
            elif self._parting.is_set():
                await self._leave(life, machine.Leave("torch's agent ended", workers_stopped=True))
                return machine.Exit(EXIT_FAILED, "torch's agent ended")
            ending = await self._ending
            if isinstance(ending, machine.Exit):
                await self._say_last_words(conversation)
            return ending
        finally:
            talking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await talking

    async def _join(self) -> tuple[Joined, Join] | None:
        """None where torch's agent ended first. Raises GivenUp."""
        incarnation = Incarnation(uuid.uuid4().hex)
        joining = asyncio.create_task(
            admission(
                self._coordinator,
                self._config.run_id,
                lambda address, dead: self._command(incarnation, address, dead or self._incarnation),
                self._config.options.advertise_addr,
                self._config.options.join_timeout_s,
                self._parting,
            )
        )
        parting = asyncio.create_task(self._parting.wait())
        try:
            await asyncio.wait([joining, parting], return_when=asyncio.FIRST_COMPLETED)
            # A Join that is under way may make this node a member, who then has to leave.
            await asyncio.wait([joining], timeout=ANSWER_WITHIN_S)
            admitted = joining.result() if joining.done() else None
            if admitted is not None:
                self._incarnation = incarnation
            return admitted
        finally:
            joining.cancel()
            parting.cancel()

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
            add_file(files.agent_log, of="nvrx")
        except OSError as error:
            raise GivenUp(
                f"cannot write {files.directory}: {error.strerror}; give another log_dir", EXIT_USAGE
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
        """Before this node ends: have its reports kept and the failed map fetched, if that takes no time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_WITHIN_S):
                await conversation.reports_kept()
                while chores := self._chores - {asyncio.current_task()}:
                    await asyncio.wait(chores)

    # ---- what torch's agent does --------------------------------------------------------------------------

    def came_for_next(self, held: CycleNumber | None) -> None:
        """torch's agent wants a place: nothing is left of the workers of the cycle that it took part in last."""
        workers = self._agent.workers
        if workers is None or workers.assignment.cycle != held or workers.tree_gone:
            return
        asked = workers.stopping
        if self._watch is not None:
            self._watch.settle()
        self._tell_missing((), lambda rank: WorkerExit(rank, stopped_by_agent=True), blames_one=not asked)
        self._observe(machine.TreeGone(held))

    def look_for_workers(self, cycle: CycleNumber, pids: Callable[[], list[int] | None]) -> None:
        """torch's agent is about to start workers; `pids` tells theirs by local rank, once it has."""
        self._chore(self._find_workers(cycle, pids))

    def are_healthy(self, cycle: CycleNumber) -> None:
        """torch's agent found all workers of a cycle running."""
        self._started(cycle)

    def has_no_store(self, cycle: CycleNumber, message: str) -> None:
        """torch's agent could not start workers in the place that it took."""
        log.warning("the workers of cycle %d were not started: %s", cycle, message)
        self._observe(machine.SpawnFailed(cycle, message))

    def signalled(self, number: int, name: str) -> None:
        """This process was told to end: torch's agent stops its workers by itself."""
        log.warning("received %s", name)
        self._signal = machine.SignalReceived(number, name)
        if self._life is not None:
            self._observe(self._signal)

    def part(self, parting: Parting) -> None:
        """torch's agent ends, and has no workers any more: tell how they ended, hear the outcome, or leave.

        Then `run` ends.
        """
        if not self._parting.is_set():
            self._parting.set()
            self._chore(self._part(parting))

    async def _part(self, parting: Parting) -> None:
        life, workers = self._life, self._agent.workers
        if life is None:
            return
        if workers is not None and not workers.tree_gone:
            if self._watch is not None:
                self._watch.settle()
            code = 0 if parting.succeeded else None
            self._tell_missing(
                parting.exits, lambda rank: WorkerExit(rank, code, stopped_by_agent=not parting.succeeded)
            )
            life.conversation.changed()
            self._observe(machine.TreeGone(workers.assignment.cycle))
        if parting.succeeded:
            await asyncio.wait([self._ending], timeout=OUTCOME_WITHIN_S)
        await self._say_last_words(life.conversation)
        if not self._ending.done():
            await self._leave(life, machine.Leave(parting.reason, workers_stopped=True))
            self._finish(machine.Exit(0 if parting.succeeded else EXIT_FAILED, parting.reason))

    # ---- workers ------------------------------------------------------------------------------------------

    async def _find_workers(self, cycle: CycleNumber, pids: Callable[[], list[int] | None]) -> None:
        while (found := pids()) is None:
            await asyncio.sleep(LOOK_FOR_WORKERS_EVERY_S)
            if self._works_in() != cycle:
                return
        if self._works_in() != cycle:
            return
        self._started(cycle)
        self._watch = WorkerWatch(lambda ended: self._on_exit(cycle, ended))
        for rank, pid in enumerate(found):
            self._watch.add(LocalRank(rank), pid)

    def _works_in(self) -> CycleNumber | None:
        """The cycle whose workers torch's agent may have; None without any."""
        workers = self._agent.workers
        return workers.assignment.cycle if workers is not None and not workers.tree_gone else None

    def _started(self, cycle: CycleNumber) -> None:
        workers = self._agent.workers
        if workers is None or workers.started or self._works_in() != cycle:
            return
        self._observe(machine.WorkersStarted(cycle))
        if self._agent.desired is not None:
            self._fetch_maps(self._agent.desired, after_s=random.uniform(*FETCH_MAP_AFTER_S))

    def _on_exit(self, cycle: CycleNumber, ended: WorkerExit) -> None:
        workers = self._agent.workers
        if workers is None or self._works_in() != cycle or ended.local_rank in workers.exits:
            return
        if self._progress is not None:
            self._progress.look()
        ended = dataclasses.replace(ended, stopped_by_agent=workers.stopping)
        if ended.succeeded and len(workers.exits) == workers.assignment.workers_per_node - 1:
            self._last_success = ended
            return
        if ended.failed:
            rank = global_rank(workers.assignment.group_rank, ended.local_rank, workers.assignment.workers_per_node)
            log.error(
                "cycle %d: rank %d (local rank %d) failed: %s%s",
                cycle,
                rank,
                ended.local_rank,
                ended.signal or f"exit {ended.exit_code}",
                f": {ended.message}" if ended.message else "",
            )
        self._observe(machine.WorkerEnded(cycle, ended))

    def _tell_missing(
        self, known: Iterable[WorkerExit], otherwise: Callable[[LocalRank], WorkerExit], blames_one: bool = False
    ) -> None:
        """Say how each worker ended of which that was not said; `blames_one`: one must have failed, if none is known to
        have."""
        workers = self._agent.workers
        assert workers is not None
        told = {one.local_rank: one for one in known}
        if self._last_success is not None:
            told[self._last_success.local_rank] = self._last_success
        self._forget_workers()
        missing = [
            rank for rank in map(LocalRank, range(workers.assignment.workers_per_node)) if rank not in workers.exits
        ]
        if blames_one and missing and not workers.has_failed and not any(one.failed for one in told.values()):
            blamed = next((rank for rank in missing if rank not in told), missing[0])
            told[blamed] = WorkerExit(blamed, EXIT_FAILED, message=HOW_UNKNOWN)
        for rank in missing:
            self._observe(machine.WorkerEnded(workers.assignment.cycle, told.get(rank) or otherwise(rank)))

    def _forget_workers(self) -> None:
        self._last_success = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    # ---- observations -------------------------------------------------------------------------------------

    def _actual(self) -> Actual:
        agent = self._agent
        return Actual(agent.phase, agent.cycle, self._ports.offer(), agent.acknowledged, self._step())

    def _step(self) -> int | None:
        """How far training came, told by the first node of the world alone: all see the same file."""
        workers = self._agent.workers
        is_first = workers is not None and workers.assignment.group_rank == 0
        return self._progress.step if self._progress is not None and is_first else None

    def _on_desired(self, wanted: Desired) -> None:
        self._say_waiting(wanted)
        if wanted.assignment is not None and wanted.assignment.master is not None:
            self._ports.use(wanted.assignment.master.port)
        self._observe(machine.DesiredChanged(wanted))
        assert self._life is not None
        self._life.maps.heed(wanted)
        if wanted.action is not Action.RUN or self._agent.phase is AgentPhase.RUNNING:
            self._fetch_maps(wanted)

    def _fetch_maps(self, wanted: Desired, after_s: float = 0.0) -> None:
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
        life = self._life
        assert life is not None
        match deed:
            case machine.Spawn():
                if not self._parting.is_set():
                    self._offer(life, deed.assignment)
            case machine.Stop():
                self._stop(life, deed.reason)
            case machine.Kill():
                pass  # torch's agent ends them by itself when it is told to end a second time
            case machine.Report():
                life.conversation.report(deed.cycle, deed.exits, at_once=deed.at_once)
            case machine.Leave():
                self._chore(self._leave(life, deed))
            case machine.Rejoin() | machine.Exit():
                self._finish(deed)

    def _offer(self, life: _Life, given: Assignment) -> None:
        if given.master is None:
            self._finish(
                machine.Exit(
                    EXIT_USAGE, "the coordinator has no store (--store off), which torchrun needs; use another"
                )
            )
            return
        is_hosted = given.master.lasting_port is not None
        store = HostPort(given.master.address or self._coordinator.endpoint.host, given.master.port)
        log.info("%s", describe_place(given))
        self._seat.offer(Given(given, store, not is_hosted and given.group_rank == 0, self._variables(life, given)))

    def _variables(self, life: _Life, given: Assignment) -> dict[str, str]:
        failed = self._agent.desired.failed_cycle if self._agent.desired is not None else None
        place = Place(life.joined.run_id, life.command.node.node_id, self._coordinator.endpoint)
        return our_variables(place, given, life.files, failed)

    def _stop(self, life: _Life, reason: str) -> None:
        log.info("stopping the workers of cycle %s: %s", self._agent.cycle, reason)
        if self._seat.withdraw():  # torch's agent never heard of that place: there is nothing to stop
            asyncio.get_running_loop().call_soon(self.came_for_next, self._agent.cycle)
        elif self._last_success is not None:
            self._chore(self._leave_finished(life))
        else:
            self._seat.unseat()

    async def _leave_finished(self, life: _Life) -> None:
        """All workers of this node had finished when the cycle ended: torch's agent waits for the others, starts no
        more, and ends with success (unlike D8)."""
        self._tell_missing((), lambda rank: WorkerExit(rank, 0))
        reason = "its workers had finished, and torch's agent starts no others"
        await life.conversation.reports_kept()
        await self._leave(life, machine.Leave(reason, workers_stopped=True))
        self._finish(machine.Exit(0, reason))

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
