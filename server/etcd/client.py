"""The way to etcd: the few calls that we need, with deadlines, over whichever member answers.

Every call may have been carried out when it fails; callers repeat only what may be repeated. Messages and stubs are
those of the package aetcd; why not its client is in docs/decisions/0012. Knows no key and no rule.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from nvrx.channel import CHANNEL_OPTIONS, describe

from .address import EtcdAccess, EtcdAddress

try:
    from aetcd import rpc
except ImportError as error:
    raise ImportError("--state etcd:// needs the package aetcd; install it with: pip install 'nvrx[etcd]'") from error

TRY_S = 1.0
"""How long one member is waited for at first: one that is suspended takes connections and never answers."""
_ROUND_PAUSE_S = 0.1
_ELSEWHERE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
_RECEIVE = "grpc.max_receive_message_length"
_UNLIMITED = -1
_OPTIONS = [*(one for one in CHANNEL_OPTIONS if one[0] != _RECEIVE), (_RECEIVE, _UNLIMITED)]

# The package has no types.
Message = Any


class EtcdError(Exception):
    """etcd refused a call; the message is one line for a person."""


class EtcdDown(EtcdError):
    """No member of etcd answered in time. What was asked for may have been done."""


class _Member:
    """A connection to one member."""

    def __init__(self, target: str, access: EtcdAccess) -> None:
        self.target = target
        self.token: str | None = None
        if access.is_encrypted:
            credentials = grpc.ssl_channel_credentials(access.ca, access.key, access.certificate)
            self._channel = grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
        self.keys = rpc.KVStub(self._channel)
        self.leases = rpc.LeaseStub(self._channel)
        self.watches = rpc.WatchStub(self._channel)
        self.auth = rpc.AuthStub(self._channel)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("token", self.token),) if self.token is not None else ()

    async def close(self) -> None:
        await self._channel.close()


class Etcd:
    """An etcd cluster."""

    def __init__(self, address: EtcdAddress, access: EtcdAccess | None = None) -> None:
        self.address = address
        self._access = access or EtcdAccess()
        self._members = [_Member(str(one), self._access) for one in address.endpoints]
        self._index = 0

    async def close(self) -> None:
        for member in self._members:
            await member.close()

    # ---- keys ---------------------------------------------------------------------------------------------

    async def range(
        self, key: str, end: str = "", *, limit: int = 0, keys_only: bool = False, within_s: float
    ) -> Message:
        """The key, or all keys from `key` to before `end`, in order. Raises EtcdError."""
        request = rpc.RangeRequest(key=key.encode(), range_end=end.encode(), limit=limit, keys_only=keys_only)
        return await self._anywhere(
            lambda member, timeout_s: member.keys.Range(request, timeout=timeout_s, metadata=member.metadata), within_s
        )

    async def transact(
        self,
        compare: Sequence[Message],
        success: Sequence[Message],
        failure: Sequence[Message] = (),
        *,
        within_s: float,
    ) -> Message:
        """Do all of `success` if all comparisons hold, else all of `failure`. Repeated where no member answers.

        Raises EtcdError.
        """
        request = rpc.TxnRequest(compare=compare, success=success, failure=failure)
        return await self._anywhere(
            lambda member, timeout_s: member.keys.Txn(request, timeout=timeout_s, metadata=member.metadata), within_s
        )

    async def changed(self, key: str, end: str = "", *, after: int, within_s: float) -> None:
        """Returns once a key was changed after a revision of etcd's, or can no longer be watched, or after `within_s`.

        Look again whatever was the reason. Never raises EtcdError.
        """
        request = rpc.WatchRequest(
            create_request=rpc.WatchCreateRequest(key=key.encode(), range_end=end.encode(), start_revision=after + 1)
        )
        member = self._members[self._index]
        call = member.watches.Watch(metadata=member.metadata)
        try:
            async with asyncio.timeout(within_s):
                await call.write(request)
                while isinstance(response := await call.read(), rpc.WatchResponse) and not response.canceled:
                    if response.events:
                        return
        except TimeoutError:
            return
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # it cannot be watched there
        finally:
            call.cancel()
        self._turn_from(member)
        await asyncio.sleep(_ROUND_PAUSE_S)

    # ---- leases -------------------------------------------------------------------------------------------

    async def grant(self, ttl_s: float, *, within_s: float) -> Message:
        """A new lease: its `ID`, and its `TTL` in seconds, which may be longer. Raises EtcdError."""
        request = rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        return await self._anywhere(
            lambda member, timeout_s: member.leases.LeaseGrant(request, timeout=timeout_s, metadata=member.metadata),
            within_s,
        )

    async def keep_alive(self, lease_id: int, *, within_s: float, try_s: float = TRY_S) -> int:
        """The seconds that the lease goes on for; 0: it is over. Raises EtcdError."""

        async def ask(member: _Member, timeout_s: float) -> int:
            call = member.leases.LeaseKeepAlive(timeout=timeout_s, metadata=member.metadata)
            try:
                await call.write(rpc.LeaseKeepAliveRequest(ID=lease_id))
                response = await call.read()
                if not isinstance(response, rpc.LeaseKeepAliveResponse):
                    raise asyncio.InvalidStateError
                return int(response.TTL)
            finally:
                call.cancel()

        return int(await self._anywhere(ask, within_s, try_s))

    async def revoke(self, lease_id: int, *, within_s: float) -> None:
        """End a lease, and with it its keys. Raises EtcdError."""
        request = rpc.LeaseRevokeRequest(ID=lease_id)
        await self._anywhere(
            lambda member, timeout_s: member.leases.LeaseRevoke(request, timeout=timeout_s, metadata=member.metadata),
            within_s,
        )

    # ---- members ------------------------------------------------------------------------------------------

    async def _anywhere(
        self, ask: Callable[[_Member, float], Awaitable[Any]], within_s: float, try_s: float = TRY_S
    ) -> Any:
        """Ask one member after the other until one answers. Raises EtcdError."""
        give_up_at = time.monotonic() + within_s
        tried = 0
        why = "no time was left to ask"
        while True:
            left_s = give_up_at - time.monotonic()
            if left_s <= 0:
                raise EtcdDown(f"etcd not reached: {why}")
            member = self._members[self._index]
            try:
                if self._access.user is not None and member.token is None:
                    await self._authenticate(member, min(try_s, left_s))
                return await ask(member, min(try_s, left_s))
            except asyncio.InvalidStateError:
                why = f"{member.target}: it ended the stream"
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED and member.token is not None:
                    member.token = None  # it was given one, which is over: etcd forgets unused ones after minutes
                elif error.code() not in _ELSEWHERE:
                    raise EtcdError(f"etcd at {member.target} refuses: {_why(error)}") from error
                why = f"{member.target}: {describe(error)}"
            self._turn_from(member)
            tried += 1
            if tried % len(self._members) == 0:
                try_s *= 2  # perhaps they are slow, not dead
                await asyncio.sleep(min(_ROUND_PAUSE_S, max(0.0, give_up_at - time.monotonic())))

    def _turn_from(self, member: _Member) -> None:
        if self._members[self._index] is member:  # else somebody else has turned already
            self._index = (self._index + 1) % len(self._members)

    async def _authenticate(self, member: _Member, timeout_s: float) -> None:
        request = rpc.AuthenticateRequest(name=self._access.user, password=self._access.password)
        member.token = (await member.auth.Authenticate(request, timeout=timeout_s)).token


def _why(error: grpc.aio.AioRpcError) -> str:
    return error.details() or error.code().name


def put(key: str, value: bytes, lease_id: int = 0) -> Message:
    """An operation of a transaction."""
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key.encode(), value=value, lease=lease_id))


def get(key: str) -> Message:
    """An operation of a transaction."""
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key.encode()))


def delete(key: str) -> Message:
    """An operation of a transaction."""
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key.encode()))


def created_at(key: str, revision: int) -> Message:
    """A comparison: the key was created at that revision of etcd's; 0: there is none."""
    return rpc.Compare(key=key.encode(), target=rpc.Compare.CREATE, result=rpc.Compare.EQUAL, create_revision=revision)


def end_of(prefix: str) -> str:
    """Where the keys that begin with a prefix end: for ranges. The prefix is ASCII and not empty."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
