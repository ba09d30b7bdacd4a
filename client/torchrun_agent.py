"""One node's membership while torch's own agent starts and stops its workers.

The same machine as nvrx-node's (`nvrx.core.agent`), with other hands: to start workers is to offer torch's agent a
place, to stop them is to let it know, when it next asks, that it should come for another. Never imports torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable

from nvrx.commandline import EXIT_FAILED, EXIT_USAGE
from nvrx.core import agent as machine
from nvrx.core.endpoint import HostPort
from nvrx.core.facts import WorkerExit
from nvrx.core.ids import CycleNumber, LocalRank, global_rank
from nvrx.core.ranks import Assignment

from .config import NodeConfig
from .coordinator import Coordinator, GivenUp
from .membership import Life, Membership
from .torchrun_seat import Ended, Given, Parting, Seat
from .torchrun_workers import WorkerWatch, our_variables
from .worker_environment import Place
from .worker_specs import describe_place

log = logging.getLogger("nvrx.node")

LOOK_FOR_WORKERS_EVERY_S = 0.02
OUTCOME_WITHIN_S = 2.0
"""How long a node that has finished waits to hear that all have (rule D8)."""
HOW_UNKNOWN = "torchrun stopped this node's workers by itself; how they ended is not known"


class TorchrunAgent(Membership):
    """Runs in an event loop of its own, beside torch's agent."""

    LOGGER = "nvrx"
    LOG_DIR_OPTION = "log_dir"

    def __init__(self, config: NodeConfig, coordinator: Coordinator, seat: Seat, version: str) -> None:
        super().__init__(config, coordinator, version)
        self._seat = seat
        self._watch: WorkerWatch | None = None
        self._last_success: WorkerExit | None = None
        """The end that makes all workers of this node finished, not told yet: when it is, the cycle's store may close,
        and torch's agents meet there once more before they end."""

    # ---- the run of it ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Be a member until the run ends for this node; the seat says how."""
        try:
            ending = await self._live_on()
            self._end(ending.code, ending.reason)
        except GivenUp as error:
            self._end(error.exit_code, str(error))
        except Exception as error:
            # A bug of ours: torch's agent must not wait for ever for a thread that is gone.
            log.error("internal error", exc_info=error)
            self._end(EXIT_FAILED, f"internal error: {error!r}")
        finally:
            self._forget_workers()
            for task in self._chores:
                task.cancel()

    def _end(self, code: int, reason: str) -> None:
        self._seat.end(Ended(self._exit_code(code), reason))

    def _not_joined(self) -> machine.Exit:
        return machine.Exit(EXIT_FAILED, "torch's agent ended before the coordinator answered")

    async def _begin(self, life: Life) -> machine.Exit | None:
        if self._signal is None and self._told_to_end.is_set():
            await self._leave(life, machine.Leave("torch's agent ended", workers_stopped=True))
            return machine.Exit(EXIT_FAILED, "torch's agent ended")
        return await super()._begin(life)

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
        self._signalled(number, name)

    def part(self, parting: Parting) -> None:
        """torch's agent ends, and has no workers any more: tell how they ended, hear the outcome, or leave.

        Then `run` ends.
        """
        if not self._told_to_end.is_set():
            self._told_to_end.set()
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
        self._workers_run(cycle)

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

    # ---- deeds --------------------------------------------------------------------------------------------

    def _do(self, deed: machine.Deed) -> None:
        life = self._life
        assert life is not None
        match deed:
            case machine.Spawn():
                if not self._told_to_end.is_set():
                    self._offer(life, deed.assignment)
            case machine.Stop():
                self._stop(life, deed.reason)
            case machine.Kill():
                pass  # torch's agent ends them by itself when it is told to end a second time
            case _:
                self._do_as_member(deed)

    def _offer(self, life: Life, given: Assignment) -> None:
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

    def _variables(self, life: Life, given: Assignment) -> dict[str, str]:
        failed = self._agent.desired.failed_cycle if self._agent.desired is not None else None
        place = Place(life.joined.run_id, life.command.node.node_id, self._coordinator.endpoint)
        return our_variables(place, given, life.files, failed)

    def _stop(self, life: Life, reason: str) -> None:
        log.info("stopping the workers of cycle %s: %s", self._agent.cycle, reason)
        if self._seat.withdraw():  # torch's agent never heard of that place: there is nothing to stop
            asyncio.get_running_loop().call_soon(self.came_for_next, self._agent.cycle)
        elif self._last_success is not None:
            self._chore(self._leave_finished(life))
        else:
            self._seat.unseat()

    async def _leave_finished(self, life: Life) -> None:
        """All workers of this node had finished when the cycle ended: torch's agent waits for the others, starts no
        more, and ends with success (unlike D8)."""
        self._tell_missing((), lambda rank: WorkerExit(rank, 0))
        reason = "its workers had finished, and torch's agent starts no others"
        await life.conversation.reports_kept()
        await self._leave(life, machine.Leave(reason, workers_stopped=True))
        self._finish(machine.Exit(0, reason))
