"""The coordinator as a process: journal, engine and gRPC server put together, started and ended."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha import reflection_pb2 as reflection_messages

from nvrx.core.endpoint import HostPort
from nvrx.core.ids import RunId
from nvrx.core.presence import StoreMode, Timing
from nvrx.v1 import (
    heartbeat_pb2,
    heartbeat_pb2_grpc,
    join_pb2,
    join_pb2_grpc,
    promote_pb2,
    promote_pb2_grpc,
    rank_map_pb2,
    rank_map_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
)

from .access import RequireToken
from .engine import Engine
from .journals import Journal, JournalError
from .journals.memory import MemoryJournal
from .journals.sqlite import SqliteJournal
from .services.heartbeat import HeartbeatService
from .services.join import JoinService
from .services.promote import PromoteService
from .services.rank_map import RankMapService
from .services.run import RunService
from .services.store import MAX_REQUEST_BYTES, StoreService
from .store_host.host import StoreConfig, StoreHost, StoreNotStarted, paths_for
from .store_host.mirror import Mirror
from .store_host.ports import PortRange

log = logging.getLogger("nvrx.coord")

STOP_WITHIN_S = 3.0
STORE_LOG = "store.log"
_GC_THRESHOLDS = (50_000, 20, 100)
"""Default thresholds put a full collection over all streams into broadcasts: 170 ms became 400 ms at 4,000."""

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),
    # gRPC sheds calls above 1,000 pending ones by default, silently: a join storm would lose nodes (rule J5).
    ("grpc.server.max_pending_requests", 30_000),
    ("grpc.server.max_pending_requests_hard_limit", 40_000),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    # Agents ping every 10 s, also when idle; the server must not answer that with too_many_pings.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


class AddressTaken(Exception):
    """The address to listen on cannot be had; the message is one line."""


@dataclass(frozen=True)
class ServeConfig:
    """What `nvrx-coord serve` was asked to do. `state_dir` None keeps facts in memory only."""

    listen: HostPort
    state_dir: Path | None
    timing: Timing = Timing()
    store: StoreMode = StoreMode.BRIDGE
    store_port: int = 0
    store_ports: PortRange | None = None
    advertise_addr: str | None = None
    runtime_dir: str = ""
    run_id: RunId | None = None
    token: str | None = None
    once: bool = False
    allow_network_state: bool = False


def open_journal(config: ServeConfig) -> Journal:
    """The journal of a configuration. Raises JournalError."""
    if config.state_dir is None:
        return MemoryJournal()
    return SqliteJournal(config.state_dir, allow_network_file_system=config.allow_network_state)


class Coordinator:
    """A running coordinator. `start` it, `run` it, and it ends by itself, by `stop` or by failing."""

    def __init__(self, config: ServeConfig, journal: Journal, version: str) -> None:
        self._config = config
        self._journal = journal
        self._version = version
        self._stopping = asyncio.Event()
        self.engine = Engine(
            journal,
            clock=time.monotonic,
            wall=time.time,
            timing=config.timing,
            store=config.store,
            declared_run=config.run_id,
        )
        self._heartbeats = HeartbeatService(self.engine, asyncio.Event())
        interceptors = [RequireToken(config.token)] if config.token is not None else []
        self._server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        self._mirror: Mirror | None = None
        self._stores = self._make_stores()
        self._store_service = StoreService(self._stores)
        self.address = config.listen

    async def start(self) -> HostPort:
        """Load the journal and listen; the address with its real port.

        Raises JournalError, AddressTaken or StoreNotStarted, and then nothing is left that was started.
        """
        self.engine.load()
        self._register()
        listen = self._config.listen
        try:
            port = self._server.add_insecure_port(str(listen))
        except RuntimeError as error:
            raise AddressTaken(
                f"cannot listen on {listen}: the port is taken or the address is not this machine's; give another with "
                "--listen HOST:PORT"
            ) from error
        if port == 0:
            raise AddressTaken(f"cannot listen on {listen}; give another with --listen HOST:PORT")
        if self._stores is not None:
            try:
                await self._stores.start()
            except StoreNotStarted:
                await self._server.stop(None)
                raise
            for hosted in self.engine.runs.values():
                self._stores.observe(hosted)
        await self._server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        self.address = HostPort(listen.host, port)
        return self.address

    def _register(self) -> None:
        server, engine = self._server, self.engine
        join_pb2_grpc.add_JoinServiceServicer_to_server(JoinService(engine, self._version), server)
        heartbeat_pb2_grpc.add_HeartbeatServiceServicer_to_server(self._heartbeats, server)
        rank_map_pb2_grpc.add_RankMapServiceServicer_to_server(RankMapService(engine), server)
        run_pb2_grpc.add_RunServiceServicer_to_server(RunService(engine), server)
        promote_pb2_grpc.add_PromoteServiceServicer_to_server(PromoteService(engine), server)
        store_pb2_grpc.add_StoreServiceServicer_to_server(self._store_service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        modules = (join_pb2, heartbeat_pb2, rank_map_pb2, promote_pb2, run_pb2, store_pb2)
        names = [service.full_name for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
        _enable_reflection([*names, health.SERVICE_NAME], server)

    def _make_stores(self) -> StoreHost | None:
        config = self._config
        if not config.store.is_hosted:
            return None
        stores = StoreHost(
            StoreConfig(
                kind="torch" if config.store is StoreMode.TORCH else "bridge",
                host=config.listen.host,
                address=_told_address(config),
                paths=paths_for(config.runtime_dir, self.engine.journal_id),
                log_file=(config.state_dir or Path(config.runtime_dir)) / STORE_LOG,
                lasting_port=config.store_port,
                cycle_ports=config.store_ports,
            ),
            self.engine.offer_stores,
        )
        self._mirror = Mirror(stores)
        self.engine.observers += [stores.observe, self._mirror.observe]
        return stores

    def stop(self) -> None:
        """End as asked (rule E7)."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until stopped. Raises JournalError when facts can no longer be kept."""
        deciding = asyncio.create_task(self.engine.serve(), name="engine")
        endings: list[asyncio.Task[object]] = [asyncio.create_task(self._stopping.wait(), name="stop")]
        if self._stores is not None:
            endings.append(asyncio.create_task(self._stores.keep(), name="stores"))
        if self._mirror is not None:
            endings.append(asyncio.create_task(self._mirror.keep(), name="mirror"))
        if self._config.once:
            endings.append(asyncio.create_task(self._over(), name="once"))
        try:
            done, _ = await asyncio.wait([deciding, *endings], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                # Facts can no longer be kept: say nothing more (persist, then speak); agents carry on without us.
                task.result()
        finally:
            for task in (deciding, *endings):
                task.cancel()
            await self._close()

    async def _over(self) -> None:
        """`--once`: a run has closed, and each member has heard it or its lease is over."""
        while True:
            closed = [one for one in self.engine.runs.values() if not one.run.is_open]
            if closed and len(closed) == len(self.engine.runs):
                break
            await self.engine.closed.wait()
            self.engine.closed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.timing.lease_ttl_s):
                for hosted in closed:
                    while hosted.sessions:
                        hosted.session_ended.clear()
                        await hosted.session_ended.wait()

    async def _close(self) -> None:
        self._heartbeats.close()
        self._store_service.close()
        self.engine.end_watches()
        await self._server.stop(STOP_WITHIN_S)
        if self._stores is not None:
            await self._stores.close()
        self.engine.close()


def _enable_reflection(names: list[str], server: grpc.aio.Server) -> None:
    """Reflection under both of its names: newer tools ask for v1, which grpcio-reflection does not register."""
    servicer = reflection.aio.ReflectionServicer(names)
    reflection.enable_server_reflection(names, server)
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_messages.ServerReflectionRequest.FromString,
        response_serializer=reflection_messages.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(
        "grpc.reflection.v1.ServerReflection", {"ServerReflectionInfo": method}
    )
    server.add_generic_rpc_handlers((handler,))


def _told_address(config: ServeConfig) -> str:
    """What workers are told as the store's address; empty: where their node reaches this coordinator."""
    everywhere = config.listen.host in {"0.0.0.0", "::"}
    return config.advertise_addr or ("" if everywhere else config.listen.host)


def _raise_descriptor_limit() -> None:
    """One descriptor per node: the soft limit of 1,024 is too few (rule J5)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve(config: ServeConfig, version: str) -> None:
    """Run a coordinator in this process until SIGTERM, SIGINT or its end. Raises what `Coordinator.start` does."""
    _raise_descriptor_limit()
    gc.set_threshold(*_GC_THRESHOLDS)
    gc.disable()
    journal = open_journal(config)
    coordinator = Coordinator(config, journal, version)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, coordinator.stop)
    try:
        address = await coordinator.start()
    except (JournalError, AddressTaken, StoreNotStarted):
        journal.close()
        raise
    # What was loaded stays: collections would only go through it again and again.
    gc.freeze()
    gc.enable()
    print(f"nvrx-coord listening on {address}", flush=True)
    await coordinator.run()
