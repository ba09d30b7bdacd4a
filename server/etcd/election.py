"""Who of several coordinators leads: whoever has made the leader's key, for as long as its lease lasts (rule E6).

A term's number is the revision at which etcd made that key: it rises with each leader. Knows not what leaders do.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NewType

from nvrx.core.endpoint import HostPort

from .client import Etcd, EtcdError, created_at, end_of, get, put
from .lease import Lease

log = logging.getLogger("nvrx.coord")

LOOK_AGAIN_S = 1.0

TermNumber = NewType("TermNumber", int)


class Election:
    """The election below one prefix, as the coordinator at `own` (its advertised address) takes part in it."""

    def __init__(self, etcd: Etcd, own: HostPort) -> None:
        self._etcd = etcd
        self._own = own
        self.leader_key = f"{etcd.address.prefix}/leader"
        self._coordinators_key = f"{etcd.address.prefix}/coordinators/"
        self.leader: str | None = None
        """The leader's address as last seen; None while none is known."""
        self._others: frozenset[str] = frozenset()

    @property
    def coordinators(self) -> tuple[str, ...]:
        """All coordinators' addresses as last seen; one's own comes first, for only the leader tells them."""
        return (str(self._own), *sorted(self._others))

    async def register(self, lease: Lease) -> None:
        """Be known as a coordinator while the lease lasts. Raises EtcdError."""
        key = f"{self._coordinators_key}{lease.lease_id:016x}"
        await self._etcd.transact([], [put(key, str(self._own).encode(), lease.lease_id)], within_s=lease.left_s)

    async def win(self, lease: Lease) -> TermNumber:
        """Wait until this coordinator leads; the number of its term. Raises EtcdError."""
        while True:
            answer = await self._etcd.transact(
                [created_at(self.leader_key, 0)],
                [put(self.leader_key, str(self._own).encode(), lease.lease_id)],
                [get(self.leader_key)],
                within_s=lease.left_s,
            )
            if answer.succeeded:
                self.leader = str(self._own)
                return TermNumber(answer.header.revision)
            held = answer.responses[0].response_range.kvs[0]
            if held.lease == lease.lease_id:  # made by a transaction of ours whose answer was lost
                self.leader = str(self._own)
                return TermNumber(held.create_revision)
            self.leader = held.value.decode(errors="replace")
            await self._etcd.changed(self.leader_key, after=answer.header.revision, within_s=lease.ttl_s)

    def forget(self) -> None:
        """Nothing is known of a leader."""
        self.leader = None

    async def follow_coordinators(self, lease: Lease) -> None:
        """Keep `coordinators` up to date until cancelled; what was known stays where etcd does not answer."""
        end = end_of(self._coordinators_key)
        while True:
            try:
                found = await self._etcd.range(self._coordinators_key, end, within_s=lease.ttl_s)
            except EtcdError as error:
                log.debug("the list of coordinators is not renewed: %s", error)
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            self._others = frozenset(one.value.decode(errors="replace") for one in found.kvs) - {str(self._own)}
            await self._etcd.changed(self._coordinators_key, end, after=found.header.revision, within_s=lease.ttl_s)
