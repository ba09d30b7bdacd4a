"""The coordinator as a process: journal, office and gRPC server put together, started and ended."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from nvrx.core.endpoint import HostPort

from .access import RequireToken
from .journals import Journal, JournalError
from .journals.memory import MemoryJournal
from .journals.sqlite import SqliteJournal
from .listening import SERVER_OPTIONS, STOP_WITHIN_S, AddressTaken, enable_reflection, listen_on
from .office import SERVICES, Office
from .settings import ServeConfig
from .store_host.host import StoreNotStarted

log = logging.getLogger("nvrx.coord")

_GC_THRESHOLDS = (50_000, 20, 100)
"""Default thresholds put a full collection over all streams into broadcasts: 170 ms became 400 ms at 4,000."""


def open_journal(config: ServeConfig) -> Journal:
    """The journal of a configuration that one coordinator has for itself. Raises JournalError."""
    if config.state_dir is None:
        return MemoryJournal()
    return SqliteJournal(config.state_dir, allow_network_file_system=config.allow_network_state)


class Coordinator:
    """The only coordinator of its journal. `start` it, `run` it, and it ends by itself, by `stop` or by failing."""

    def __init__(self, config: ServeConfig, journal: Journal, version: str) -> None:
        self._config = config
        self._stopping = asyncio.Event()
        self.office = Office(config, journal, version)
        self.engine = self.office.engine
        interceptors = [RequireToken(config.token)] if config.token is not None else []
        self._server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        self.address = config.listen

    async def start(self) -> HostPort:
        """Load the journal and listen; the address with its real port.

        Raises JournalError, AddressTaken or StoreNotStarted, and then nothing is left that was started.
        """
        await self.office.load()
        self.office.register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        enable_reflection([*SERVICES, health.SERVICE_NAME], self._server)
        self.address = listen_on(self._server, self._config.listen)
        try:
            await self.office.start_stores()
        except StoreNotStarted:
            await self._server.stop(None)
            raise
        await self._server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        return self.address

    def stop(self) -> None:
        """End as asked (rule E7)."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until stopped. Raises JournalError when facts can no longer be kept."""
        try:
            await self.office.run(self._stopping)
        finally:
            self.office.end_streams()
            await self._server.stop(STOP_WITHIN_S)
            await self.office.close()


def _raise_descriptor_limit() -> None:
    """One descriptor per node: the soft limit of 1,024 is too few (rule J5)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve(config: ServeConfig, version: str) -> None:
    """Run a coordinator in this process until SIGTERM, SIGINT or its end. Raises what its `start` and `run` do."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # sent to every process of a Slurm step; for workers (rule G6)
    _raise_descriptor_limit()
    gc.set_threshold(*_GC_THRESHOLDS)
    if config.etcd is not None:
        await _serve_one_of_several(config, version)
        return
    gc.disable()
    journal = open_journal(config)
    coordinator = Coordinator(config, journal, version)
    _end_on_signals(coordinator.stop)
    try:
        address = await coordinator.start()
    except (JournalError, AddressTaken, StoreNotStarted):
        journal.close()
        raise
    # What was loaded stays: collections would only go through it again and again.
    gc.freeze()
    gc.enable()
    _say_ready(address)
    await coordinator.run()


async def _serve_one_of_several(config: ServeConfig, version: str) -> None:
    try:
        from .candidate import Candidate
    except ImportError as error:
        raise JournalError(str(error)) from error
    candidate = Candidate(config, version)
    _end_on_signals(candidate.stop)
    _say_ready(await candidate.start())
    await candidate.run()


def _end_on_signals(stop: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop)


def _say_ready(address: HostPort) -> None:
    print(f"nvrx-coord listening on {address}", flush=True)
