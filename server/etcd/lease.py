"""This process's lease at etcd: kept alive, and taken for over before etcd does (rule E6).

Counted from before each call was sent, on a clock that goes on while the process or the machine is suspended. Knows
nothing of what hangs on the lease.
"""

from __future__ import annotations

import asyncio
import time
from typing import NoReturn

from .client import Etcd, EtcdDown, EtcdError

MARGIN = 0.1
"""The part of its time by which we take a lease for over earlier than etcd, for clocks that run apart."""
_RENEWALS = 3
_TRIES_PER_RENEWAL = 2
_REVOKE_WITHIN_S = 1.0


def boot_clock() -> float:
    """Seconds; unlike the monotonic clock it goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class LeaseOver(Exception):
    """The lease is over, or may be soon; the message is one line."""


class Lease:
    """A lease that was granted. Good until `until` on the boot clock, which `keep` moves on."""

    def __init__(self, etcd: Etcd, lease_id: int, ttl_s: float, asked_at: float) -> None:
        self._etcd = etcd
        self.lease_id = lease_id
        self.ttl_s = ttl_s
        self.until = asked_at + ttl_s * (1 - MARGIN)

    @classmethod
    async def take(cls, etcd: Etcd, ttl_s: float) -> Lease:
        """Raises EtcdError."""
        asked_at = boot_clock()
        granted = await etcd.grant(ttl_s, within_s=ttl_s)
        return cls(etcd, granted.ID, float(granted.TTL), asked_at)

    @property
    def left_s(self) -> float:
        """How long it is good for; 0 once it may be over."""
        return max(0.0, self.until - boot_clock())

    @property
    def is_good(self) -> bool:
        return self.left_s > 0

    async def keep(self) -> NoReturn:
        """Renew it until that fails. Raises LeaseOver, at the latest when `until` is over."""
        interval_s = self.ttl_s / _RENEWALS
        why = "this process was held up"
        while True:
            await asyncio.sleep(min(interval_s, self.left_s))
            if not self.is_good:
                raise LeaseOver(f"not renewed in time ({why})")
            asked_at = boot_clock()
            try:
                async with asyncio.timeout(self.left_s):
                    ttl_s = await self._etcd.keep_alive(
                        self.lease_id, within_s=self.left_s, try_s=interval_s / _TRIES_PER_RENEWAL
                    )
            except (EtcdDown, TimeoutError) as error:
                why = str(error) or "etcd does not answer"
                continue
            except EtcdError as error:
                raise LeaseOver(str(error)) from error
            if ttl_s <= 0:
                raise LeaseOver("etcd has ended it")
            self.until = max(self.until, asked_at + ttl_s * (1 - MARGIN))

    async def give_back(self) -> None:
        """End it, so that nobody waits for its end. Where etcd does not answer it ends by itself."""
        self.until = 0.0
        try:
            await self._etcd.revoke(self.lease_id, within_s=_REVOKE_WITHIN_S)
        except EtcdError:
            return
