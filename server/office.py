"""What a coordinator has while it decides: engine, services and the way to its store process, over one journal.

Knows no port and no election: whoever made it hands it calls, and ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import grpc

from nvrx.core.ids import RunId
from nvrx.core.presence import RECOVERY_AT_LEAST_S, StoreMode
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

from .engine import ONLY_TERM, Engine
from .journals import Journal
from .partings import Leaving, all_over
from .services.heartbeat import HeartbeatService
from .services.join import JoinService
from .services.promote import PromoteService
from .services.rank_map import RankMapService
from .services.run import RunService
from .services.store import StoreService
from .settings import ServeConfig
from .store_host.host import StoreConfig, StoreHost, paths_for
from .store_host.mirror import Mirror

log = logging.getLogger("nvrx.coord")

STORE_LOG = "store.log"
_MODULES = (join_pb2, heartbeat_pb2, rank_map_pb2, promote_pb2, run_pb2, store_pb2)
SERVICES = {
    service.full_name: service for module in _MODULES for service in module.DESCRIPTOR.services_by_name.values()
}
"""Descriptors of all services that an office has, by full name."""


class Office:
    """An engine with all that belongs to it."""

    def __init__(
        self,
        config: ServeConfig,
        journal: Journal,
        version: str,
        *,
        term: int = ONLY_TERM,
        coordinators: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._config = config
        self._version = version
        self._coordinators = coordinators
        self.engine = Engine(
            journal,
            clock=time.monotonic,
            wall=time.time,
            timing=config.timing,
            store=config.store,
            declared_run=config.run_id,
            term=term,
        )
        self.heartbeats = HeartbeatService(self.engine, asyncio.Event())
        self._mirror: Mirror | None = None
        self._stores = self._make_stores()
        self._store_service = StoreService(self._stores)

    def register(self, server: grpc.aio.Server) -> None:
        """Have a server, or what takes its place, answer with this office's services."""
        engine = self.engine
        join_service = JoinService(engine, self._version, self._coordinators)
        join_pb2_grpc.add_JoinServiceServicer_to_server(join_service, server)
        heartbeat_pb2_grpc.add_HeartbeatServiceServicer_to_server(self.heartbeats, server)
        rank_map_pb2_grpc.add_RankMapServiceServicer_to_server(RankMapService(engine), server)
        run_pb2_grpc.add_RunServiceServicer_to_server(RunService(engine), server)
        promote_pb2_grpc.add_PromoteServiceServicer_to_server(PromoteService(engine), server)
        store_pb2_grpc.add_StoreServiceServicer_to_server(self._store_service, server)

    def _make_stores(self) -> StoreHost | None:
        config = self._config
        if not config.store.is_hosted:
            return None
        stores = StoreHost(
            StoreConfig(
                kind="torch" if config.store is StoreMode.TORCH else "bridge",
                host=config.listen.host,
                address=config.told_address,
                paths=paths_for(config.runtime_dir, self.engine.journal_id),
                log_file=(config.state_dir or Path(config.runtime_dir)) / STORE_LOG,
                lasting_port=config.store_port,
                cycle_ports=config.store_ports,
                is_one_of_several=config.etcd is not None,
            ),
            self.engine.offer_stores,
        )
        self._mirror = Mirror(stores)
        self.engine.observers += [stores.observe, self._mirror.observe]
        return stores

    async def load(self) -> None:
        """Take all runs from the journal. Raises JournalError."""
        await asyncio.to_thread(self.engine.load)

    async def start_stores(self) -> None:
        """Have the store process, for the runs that were loaded. Raises StoreNotStarted."""
        if self._stores is None:
            return
        await self._stores.start()
        for hosted in self.engine.runs.values():
            self._stores.observe(hosted)

    async def run(self, stopping: asyncio.Event) -> None:
        """Decide until `stopping` is set, or `--once` is over. Raises JournalError when facts can no longer be kept."""
        deciding = asyncio.create_task(self.engine.serve(), name="engine")
        endings: list[asyncio.Task[object]] = [asyncio.create_task(stopping.wait(), name="stop")]
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

    async def _over(self) -> None:
        """`--once`: all runs have closed, and each member has heard it or its lease is over."""
        engine = self.engine

        def runs() -> dict[RunId, Leaving]:
            return {
                run_id: Leaving(one.run, one.presence, one.partings, partial(engine.now, one))
                for run_id, one in engine.runs.items()
            }

        if engine.runs and all(not one.run.is_open for one in engine.runs.values()):
            log.info("--once: all runs are closed; waiting for nodes that may not know, or that open another")
        await all_over(runs, self._config.run_id, engine.parted, max(engine.timing.lease_ttl_s, RECOVERY_AT_LEAST_S))

    def end_streams(self) -> None:
        """Have every stream end with a reason that means: come back (rule E7)."""
        self.heartbeats.close()
        self._store_service.close()
        self.engine.end_watches()

    async def close(self, *, is_deposed: bool = False) -> None:
        """Finish what is being written, and leave the store process to whoever comes next."""
        if self._stores is not None:
            await self._stores.close(is_deposed=is_deposed)
        await asyncio.to_thread(self.engine.close)
