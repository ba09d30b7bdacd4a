"""The rendezvous backend of torchrun: `torchrun --rdzv-backend=nvrx --rdzv-endpoint=HOST:PORT ...`.

torch's own agent starts, watches and stops the workers; where they stand in the world, and when they have to move,
comes from the coordinator. Imports torch, as none of ours beside it does. Whoever imports torch's rendezvous imports
this, too: nothing else of ours is imported before this backend is asked for.
"""

from __future__ import annotations

import atexit
import inspect
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import ElasticAgent

    from nvrx.core.facts import WorkerExit

    from .torchrun_launch import Launch, Rendezvous
    from .torchrun_seat import Given
    from .torchrun_thread import MembershipThread

log = logging.getLogger("nvrx.node")

BACKEND = "nvrx"
CONNECT_WITHIN_S = 30.0
STORE_WAITS_S = 300.0
"""torch's own default for what waits in a store."""
_IDENTICAL = "TORCH_ELASTIC_WORKER_IDENTICAL"
_FAILED, _LOST_COORDINATOR = 1, 4
_PASSED_ON_ABOVE = 4
"""Exit codes that mean something to a scheduler: excluded, not worth starting again."""


def create_handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point in `torchrun.handlers`: gives what makes a handler."""
    return _create


def _create(params: RendezvousParameters) -> RendezvousHandler:
    from .torchrun_thread import grpc_environment

    with grpc_environment():
        from .torchrun_launch import Rendezvous, conf_problem
    problem = conf_problem(params.config)
    if problem is not None:
        raise RendezvousError(problem)
    asked = Rendezvous(
        params.endpoint or "", params.run_id, params.min_nodes, params.max_nodes, params.local_addr, params.config
    )
    return NvrxRendezvous(asked)


class NvrxRendezvous(RendezvousHandler):
    """One torchrun's way to its places in the run's worlds. Joins when torch's agent first wants a place."""

    def __init__(self, asked: Rendezvous) -> None:
        from .torchrun_seat import Seat

        self._asked = asked
        self._seat = Seat()
        self._thread: MembershipThread | None = None
        self._given: Given | None = None
        self._store: Store | None = None
        self._is_seated = False
        """torch's agent has a place, and workers in it."""
        self._said_healthy = False
        self._handlers_before: dict[int, Any] = {}

    # ---- what torch's agent asks --------------------------------------------------------------------------

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return str(self._asked.run_id)

    @property
    def use_agent_store(self) -> bool:
        """Workers meet in a store that is there already."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a place in a world: as a standby for as long as the run lives.

        Ends the process with SystemExit where the run ended well without this node, or with an exit code that says
        something to a scheduler. Raises RendezvousError with one line otherwise.
        """
        agent = _agent_under_way()
        if self._thread is None:
            self._thread = self._join(agent)
        self._listen_for_signals()
        while True:
            self._store, self._is_seated = None, False
            held = self._given.assignment.cycle if self._given is not None else None
            self._thread.post(lambda membership, held=held: membership.came_for_next(held))  # type: ignore[misc]
            given = self._seat.take()
            if given is None:
                self._raise_ended()
            self._given = given
            cycle = given.assignment.cycle
            try:
                store = self._open_store(given)
            except DistError as error:
                text = f"cannot reach the store of cycle {cycle} at {given.store}: {_first_line(error)}"
                self._thread.post(lambda membership, cycle=cycle, text=text: membership.has_no_store(cycle, text))  # type: ignore[misc]
                continue
            if self._seat.is_unwanted:
                continue  # that cycle is over already
            self._begin(given, store, agent)
            return RendezvousInfo(
                PrefixStore(f"torchrun/{cycle}", store),
                given.assignment.group_rank,
                given.assignment.group_world_size,
                RendezvousStoreInfo(given.store.host, given.store.port),
            )

    def num_nodes_waiting(self) -> int:
        """1 where this node's workers have to go. torch's agent asks while all of them run, many times a second."""
        self._listen_for_signals()
        if self._is_seated and not self._said_healthy and self._given is not None and self._thread is not None:
            self._said_healthy = True
            cycle = self._given.assignment.cycle
            self._thread.post(lambda membership: membership.are_healthy(cycle))
        return int(self._seat.is_unwanted)

    def is_closed(self) -> bool:
        return self._seat.ended is not None

    def set_closed(self) -> None:
        """The run is not one node's to close: it leaves."""
        self._part("torch's agent closed its rendezvous")

    def shutdown(self) -> bool:
        """torch's agent ends, well or not; its workers are gone. What it raises, if anything, says which."""
        error = sys.exception()
        exits = _exits_in(error)
        reason = "its torchrun ended"
        if exits:
            reason += ": its workers failed more often than its --max-restarts allows"
        self._part(reason, succeeded=error is None and self._is_seated, exits=exits)
        return True

    # ---- joining and leaving ------------------------------------------------------------------------------

    def _join(self, agent: ElasticAgent | None) -> MembershipThread:
        from nvrx import logs
        from nvrx.commandline import Failed, program_version
        from nvrx.core.shape import DEFAULT_MAX_RESTARTS

        from .config import resolve
        from .torchrun_launch import join_options
        from .torchrun_thread import MembershipThread, grpc_environment

        launch = self._launch(agent)
        try:
            # An earlier launch in this process may have set what is set below: no difference between nodes.
            around = {name: value for name, value in os.environ.items() if name != _IDENTICAL}
            config = resolve(join_options(self._asked, launch), around)
        except Failed as error:
            raise RendezvousError(str(error)) from error
        if not logging.getLogger("nvrx").hasHandlers():
            logs.start("info", "text", of="nvrx")
        allowed = DEFAULT_MAX_RESTARTS if config.options.max_restarts is None else config.options.max_restarts
        if launch.max_restarts < allowed:
            log.warning(
                "torchrun --max-restarts %d is less than the run's own %d (--rdzv-conf max_restarts=N): torchrun ends "
                "this node when its workers have failed more often; give it a larger number",
                launch.max_restarts,
                allowed,
            )
        # torch's agents agree on ranks through their store, and wait there for a node that is lost meanwhile. Here all
        # have as many workers, which Join has checked: each can say by itself.
        os.environ.setdefault(_IDENTICAL, "1")
        atexit.register(self._at_exit)
        with grpc_environment():
            return MembershipThread(config, self._seat, program_version())

    def _launch(self, agent: ElasticAgent | None) -> Launch:
        from .torchrun_launch import Launch, command_of

        if agent is not None:
            spec = agent.get_worker_group().spec
            entrypoint = spec.entrypoint if spec.entrypoint is not None else spec.fn
            return Launch(spec.local_world_size, command_of(entrypoint, spec.args), spec.max_restarts)
        workers = str(self._asked.config.get("nproc_per_node", ""))
        if not workers.isdecimal():
            raise RendezvousError("no torch agent is under way here; say --rdzv-conf nproc_per_node=N")
        return Launch(int(workers), (sys.executable,), sys.maxsize)

    def _at_exit(self) -> None:
        """Told to end by a signal, torch's agent does not shut a rendezvous down."""
        self._part("its torchrun ended")

    def _part(self, reason: str, *, succeeded: bool = False, exits: tuple[WorkerExit, ...] = ()) -> None:
        """Leave the run, once."""
        from .torchrun_seat import Parting

        atexit.unregister(self._at_exit)
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.part(Parting(reason, succeeded, exits))

    def _raise_ended(self) -> NoReturn:
        ended = self._seat.ended
        assert ended is not None
        if ended.exit_code == 0:
            # torch 2.13's agent answers RendezvousGracefulExitError, meant for this, with a traceback and exit code 1.
            log.info("ending with exit code 0: %s", ended.reason)
            raise SystemExit(0)
        if ended.exit_code > _PASSED_ON_ABOVE:
            log.error("ending with exit code %d: %s", ended.exit_code, ended.reason)
            raise SystemExit(ended.exit_code)
        if ended.exit_code == _LOST_COORDINATOR:
            raise RendezvousConnectionError(ended.reason)
        if ended.exit_code == _FAILED:
            raise RendezvousClosedError(ended.reason)
        raise RendezvousError(ended.reason)

    # ---- a place ------------------------------------------------------------------------------------------

    def _open_store(self, given: Given) -> TCPStore:
        """Raises DistError where it cannot be reached."""
        store = TCPStore(
            given.store.host,
            given.store.port,
            is_master=given.hosts_store,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_WITHIN_S),
        )
        store.set_timeout(timedelta(seconds=STORE_WAITS_S))
        return store

    def _begin(self, given: Given, store: TCPStore, agent: ElasticAgent | None) -> None:
        """torch's agent is about to start workers, who inherit this process's environment."""
        from .worker_environment import OURS

        self._store, self._is_seated, self._said_healthy = store, True, False
        for name in OURS:
            if name.startswith("NVRX_"):
                os.environ.pop(name, None)
        os.environ.update(given.environment)
        if agent is not None and self._thread is not None:
            cycle, pids = given.assignment.cycle, _pids_to_come(agent)
            self._thread.post(lambda membership: membership.look_for_workers(cycle, pids))

    # ---- signals ------------------------------------------------------------------------------------------

    def _listen_for_signals(self) -> None:
        """Hear of a signal before torch's agent does, which takes as long to end as its workers, and tells nobody."""
        if threading.current_thread() is not threading.main_thread():
            return
        names = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
        for number in (getattr(signal, name.strip(), None) for name in names.split(",")):
            if number is None:
                continue
            before = signal.getsignal(number)
            if before in (self._on_signal, signal.SIG_IGN, None):
                continue
            self._handlers_before[number] = before
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        from torch.distributed.elastic.multiprocessing.api import SignalException

        name = signal.Signals(number).name
        if self._thread is not None:
            self._thread.post(lambda membership: membership.signalled(number, name))
        before = self._handlers_before[number]
        if callable(before):
            before(number, frame)
            return
        # A standby has started no workers yet, so that torch's agent has set no handler.
        raise SignalException(f"Process {os.getpid()} got signal: {name}", sigval=signal.Signals(number))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _agent_under_way() -> ElasticAgent | None:
    """torch's agent that is asking: it knows how many workers it starts, and of what. It tells a handler nothing."""
    from torch.distributed.elastic.agent.server.api import ElasticAgent

    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, ElasticAgent):
            return found
        frame = frame.f_back
    return None


def _pids_to_come(agent: ElasticAgent) -> Callable[[], list[int] | None]:
    """Tells the pids of the workers that the agent starts next, by local rank, once it has started all."""
    group = agent.get_worker_group()
    before = group.workers

    def pids() -> list[int] | None:
        workers = group.workers
        ids = [one.id for one in workers]
        return ids if workers is not before and all(isinstance(one, int) for one in ids) else None

    return pids


def _exits_in(error: BaseException | None) -> tuple[WorkerExit, ...]:
    """How workers ended, as torch's agent says when it gives up."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from nvrx.core.facts import MAX_MESSAGE, WorkerExit
    from nvrx.core.ids import LocalRank

    from .worker_start import signal_name

    if not isinstance(error, ChildFailedError):
        return ()
    return tuple(
        WorkerExit(LocalRank(one.local_rank), one.exitcode, message=one.message[:MAX_MESSAGE])
        if one.exitcode >= 0
        else WorkerExit(LocalRank(one.local_rank), None, signal_name(-one.exitcode), one.message[:MAX_MESSAGE])
        for one in error.failures.values()
    )
