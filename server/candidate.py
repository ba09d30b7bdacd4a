"""One of several coordinators on one etcd cluster: follows, leads when it is elected, and follows again (rule E6).

Puts lease, election, desk and office together. While it follows it decides nothing and tells who leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from nvrx.core.endpoint import HostPort
from nvrx.core.ids import JournalId
from nvrx.core.refused import Reason, Refused

from .access import RequireToken
from .desk import Desk, TermOfOffice, not_leading
from .etcd.client import Etcd, EtcdError
from .etcd.election import Election
from .etcd.lease import Lease, LeaseOver
from .journals import NotLeading
from .journals.etcd import EtcdJournal, shared_journal_id
from .listening import SERVER_OPTIONS, STOP_WITHIN_S, enable_reflection, listen_on
from .office import SERVICES, Office
from .settings import EtcdState, ServeConfig

log = logging.getLogger("nvrx.coord")

AGAIN_AFTER_S = 0.5
"""After a term, or a failure to take part in the election."""
CLOSE_WITHIN_S = 2.0
_GOES_DOWN = Refused(Reason.SHUTTING_DOWN, "the coordinator goes down; come back to it")


class Candidate:
    """A coordinator that leads or follows. `start` it, `run` it, and it ends by itself, by `stop` or by failing."""

    def __init__(self, config: ServeConfig, version: str) -> None:
        assert config.etcd is not None
        self._config = config
        self._state: EtcdState = config.etcd
        self._version = version
        self._stopping = asyncio.Event()
        self._is_over = False
        self.office: Office | None = None
        """While it leads, or is about to."""
        self._etcd = Etcd(self._state.address, self._state.access)
        self._desk = Desk(SERVICES, lambda: not_leading(self.address, self._election.leader))
        interceptors = [RequireToken(config.token)] if config.token is not None else []
        self._server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        self.journal_id = JournalId("")
        self.address = config.listen
        self._election = Election(self._etcd, self.address)

    async def start(self) -> HostPort:
        """Reach etcd and listen, as a follower; the address with its real port. Raises JournalError, AddressTaken."""
        try:
            self.journal_id = await shared_journal_id(self._etcd)
            listening = listen_on(self._server, self._config.listen)
        except BaseException:
            await self._etcd.close()
            raise
        self.address = HostPort(self._config.told_address, listening.port)
        self._election = Election(self._etcd, self.address)
        self._server.add_generic_rpc_handlers((self._desk,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        enable_reflection([*SERVICES, health.SERVICE_NAME], self._server)
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()
        return listening

    def stop(self) -> None:
        """End as asked (rule E7)."""
        self._stopping.set()

    async def run(self) -> None:
        """Follow and lead until stopped. Raises JournalError, StoreNotStarted."""
        try:
            while not (self._stopping.is_set() or self._is_over):
                await self._take_part()
        finally:
            await self._server.stop(STOP_WITHIN_S)
            await self._etcd.close()

    async def _take_part(self) -> None:
        """With one lease, as long as it lasts. Raises JournalError, StoreNotStarted."""
        try:
            lease = await Lease.take(self._etcd, self._state.leader_ttl_s)
        except EtcdError as error:
            log.warning("cannot take part in the election: %s; trying again", error)
            await self._pause()
            return
        holding = asyncio.create_task(self._hold(lease), name="office")
        tasks: list[asyncio.Task[None]] = [
            holding,
            asyncio.create_task(lease.keep(), name="lease"),
            asyncio.create_task(self._election.follow_coordinators(lease), name="coordinators"),
            asyncio.create_task(self._wait_for_stop(), name="stop"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            self._is_over = holding in done
        except (LeaseOver, NotLeading, EtcdError) as error:
            log.warning("following again: %s", error)
        finally:
            is_deposed = not (self._is_over or (self._stopping.is_set() and lease.is_good))
            self._desk.close(_GOES_DOWN if self._stopping.is_set() else not_leading(self.address, None))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._leave_office(is_deposed)
            await lease.give_back()
        if not self._is_over:
            await self._pause()

    async def _hold(self, lease: Lease) -> None:
        """Wait to be elected, then lead until cancelled or done. Raises EtcdError, JournalError, StoreNotStarted."""
        await self._election.register(lease)
        term = await self._election.win(lease)
        log.info("coordinator %s leads in term %d", self.address, term)
        journal = EtcdJournal(self._etcd, self.journal_id, self._election.leader_key, term, lease)
        office = self.office = Office(
            self._config, journal, self._version, term=term, coordinators=lambda: self._election.coordinators
        )
        gc.disable()
        try:
            await office.load()
        finally:
            gc.enable()
        # What was loaded stays for the term: collections would only go through it again and again.
        gc.freeze()
        await office.start_stores()
        serving = TermOfOffice(lambda: lease.is_good)
        office.register(serving)  # type: ignore[arg-type]  # it takes the place of a server
        self._desk.open(serving)
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await office.run(asyncio.Event())

    async def _leave_office(self, is_deposed: bool) -> None:
        self._election.forget()
        office, self.office = self.office, None
        if office is not None:
            await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
            office.end_streams()
            with contextlib.suppress(TimeoutError):  # where etcd does not answer to what is being written
                async with asyncio.timeout(CLOSE_WITHIN_S):
                    await office.close(is_deposed=is_deposed)
            gc.unfreeze()

    async def _wait_for_stop(self) -> None:
        await self._stopping.wait()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(AGAIN_AFTER_S):
                await self._stopping.wait()
