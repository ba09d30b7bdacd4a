"""One coordinator's part in an election, moved by hand: its lease, its term, its journal."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from nvrx.core.endpoint import HostPort
from nvrx.core.ids import Revision, RunId
from nvrx.server.etcd.address import EtcdAddress
from nvrx.server.etcd.client import Etcd
from nvrx.server.etcd.election import Election, TermNumber
from nvrx.server.etcd.lease import Lease
from nvrx.server.journals import Row
from nvrx.server.journals.etcd import EtcdJournal, shared_journal_id

WAIT_S = 20.0
TTL_S = 60.0
"""Of leases that are not to end by themselves."""


@dataclass
class Term:
    """A coordinator that was elected."""

    etcd: Etcd
    lease: Lease
    election: Election
    number: TermNumber
    journal: EtcdJournal

    async def append(self, rows: Sequence[Row]) -> None:
        await asyncio.to_thread(self.journal.append, rows)

    async def load(self) -> list[Row]:
        return await asyncio.to_thread(lambda: list(self.journal.load()))

    async def read(self, run_id: RunId, first: int, limit: int) -> list[Row]:
        return await asyncio.to_thread(self.journal.read, run_id, Revision(first), limit)

    async def keys(self) -> dict[str, bytes]:
        """All that lies below the prefix."""
        begin = f"{self.etcd.address.prefix}/"
        found = await self.etcd.range(begin, begin[:-1] + "0", within_s=WAIT_S)
        return {one.key.decode().removeprefix(begin): one.value for one in found.kvs}


@contextlib.asynccontextmanager
async def term(
    address: EtcdAddress, own: str = "a", ttl_s: float = TTL_S, etcd: Etcd | None = None
) -> AsyncIterator[Term]:
    """Wait to be elected; the term ends with the context."""
    etcd = etcd or Etcd(address)
    try:
        lease = await Lease.take(etcd, ttl_s)
        election = Election(etcd, HostPort(own, 7700))
        async with asyncio.timeout(WAIT_S):
            number = await election.win(lease)
        journal_id = await shared_journal_id(etcd)
        journal = EtcdJournal(etcd, journal_id, election.leader_key, number, lease)
        yield Term(etcd, lease, election, number, journal)
        await lease.give_back()
    finally:
        await etcd.close()
