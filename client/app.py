"""The agent as a process: membership, supervisor, logs, health and hangs put together. Decides nothing itself."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import signal
import uuid

from nvrx.commandline import EXIT_FAILED, Failed
from nvrx.core import agent as machine
from nvrx.core.facts import WorkerExit
from nvrx.core.ids import CycleNumber, LocalRank, global_rank
from nvrx.core.numa import describe_bindings
from nvrx.core.ranks import Assignment

from .config import NodeConfig
from .conversation import Actual
from .coordinator import Coordinator, GivenUp
from .hangs import Hangs
from .health.monitor import HealthMonitor
from .log_link import LogError, LogLink
from .membership import Life, Membership
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
)
from .worker_specs import describe_place, prewarm, worker_specs
from .worker_start import signal_name

log = logging.getLogger("nvrx.node")


class NodeAgent(Membership):
    """Runs one node's share of a run, from joining to the exit code."""

    def __init__(
        self, config: NodeConfig, coordinator: Coordinator, link: SupervisorLink, logs: LogLink, version: str
    ) -> None:
        super().__init__(config, coordinator, version)
        self._link = link
        self._logs = logs
        self._health = HealthMonitor(config.health, config.environment, self._health_changed)
        self._has_spawned = False
        self._hangs = Hangs(config.options.hangs, config.runtime_dir, config.environment, self._observe)
        self._bindings_said = False

    # ---- the run of it ------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Join, work, and return the exit code. Raises Failed with one line where it cannot go on."""
        self._catch_signals()
        listening = asyncio.create_task(self._hear_supervisor(), name="supervisor events")
        listening.add_done_callback(self._task_done)
        self._health.start(self._task_done)
        try:
            ending = await self._live_on()
            code = self._exit_code(ending.code)
            _say_ending(code, ending.reason)
            return code
        except GivenUp as error:
            raise Failed(str(error), self._exit_code(error.exit_code)) from error
        finally:
            listening.cancel()
            self._hangs.watch.close()
            self._health.close()
            await self._link.close(grace_s=self._config.options.stop_grace_s)
            await self._logs.close()

    def _not_joined(self) -> machine.Exit:
        assert self._signal is not None
        log.info("%s came before the coordinator answered", self._signal.name)
        return machine.Exit(machine.SIGNALLED + self._signal.number, f"received {self._signal.name}")

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
        self._told_to_end.set()
        self._signalled(int(number), number.name)

    def _actual(self) -> Actual:
        return dataclasses.replace(super()._actual(), health=self._health.report)

    def _health_changed(self) -> None:
        if self._life is not None:
            self._life.conversation.changed()

    def _step_told(self, cycle: CycleNumber) -> int | None:
        return self._hangs.watch.step(cycle)

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
                self._workers_run(CycleNumber(event.cycle))
            case Exited():
                if self._progress is not None:
                    self._progress.look()
                self._hangs.watch.ended(LocalRank(event.local_rank))
                self._observe(machine.WorkerEnded(CycleNumber(event.cycle), await self._worker_exit(event)))
            case Gone(cycle=None):
                pass
            case Gone():
                self._hangs.watch.gone(CycleNumber(event.cycle or 0))
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
            case _:
                self._do_as_member(deed)

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

    async def _spawn(self, life: Life, given: Assignment) -> None:
        try:
            await self._gpu_memory_free(given)
            if not self._is_wanted(given):
                self._observe(machine.SpawnFailed(given.cycle, "its cycle is over"))
                return
            sockets = self._hangs.open(given, life.files)
            specs = worker_specs(self._config, life.files, self._place(life), given, self._failed_cycle, sockets)
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
