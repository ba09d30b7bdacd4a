"""StoreService: the lasting store's keys over gRPC, for who has no torch (rule I4).

The store's own protocol has no errors: what it would cut a client off for is refused here first, with its reason.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration

from nvrx.core.refused import Reason, Refused
from nvrx.store.client import PREFIX, KeyTimeout, StoreClient, StoreGone
from nvrx.store.opcodes import MAX_COMMAND_BYTES, MAX_KEY_BYTES, MAX_KEYS, MAX_SPACE_BYTES, MAX_VALUE_BYTES
from nvrx.v1 import store_pb2, store_pb2_grpc
from nvrx.wire.units import seconds

from ..store_host.connections import Connections, StoreRefuses, TooManyCalls
from ..store_host.lasting import Lasting
from .answering import Context, answering, fill, page_of

READ_ONLY_BELOW = "nvrx/"
MAX_WAIT_S = 24 * 3600.0
"""A call without a timeout and without a deadline ends after this, as with a timeout."""
MAX_REQUEST_BYTES = 2 * MAX_VALUE_BYTES + 64 * 1024
"""What a server has to receive for the largest request, a CompareSet; gRPC's default is 4 MiB."""
LIST_WITHIN_S = 50.0
# What the store's own ADD takes for a number begins with one: of `0.5` it would make a sum, and lose what was there.
_NUMBER = re.compile(rb"[+-]?[0-9]{1,19}")
I64_MIN, I64_MAX = -(2**63), 2**63 - 1
_ENTRY_BYTES = 8
_FIELD_BYTES = 8

Request = TypeVar("Request")
Response = TypeVar("Response")


def _on_store(
    method: Callable[[Any, Request, Context], Awaitable[Response]],
) -> Callable[[Any, Request, Context], Awaitable[Response]]:
    """Make an rpc of the store answer what may go wrong there with its reason."""

    @answering
    @functools.wraps(method)
    async def call(self: StoreService, request: Request, context: Context) -> Response:
        try:
            return await method(self, request, context)
        except StoreGone as gone:
            if self.is_closed:
                raise Refused(Reason.SHUTTING_DOWN, "the coordinator goes down; come back to it") from gone
            raise Refused(Reason.STORE_DOWN, f"the store is being restarted; try again ({gone})") from gone
        except StoreRefuses as refuses:
            raise Refused(
                Reason.LIMIT_EXCEEDED,
                f"the store would hold more than {MAX_SPACE_BYTES} bytes; delete keys first",
                {"limit_bytes": str(MAX_SPACE_BYTES)},
            ) from refuses
        except TooManyCalls as too_many:
            raise Refused(Reason.LIMIT_EXCEEDED, f"{too_many}; try again when some have ended") from too_many

    return call


class StoreService(store_pb2_grpc.StoreServiceServicer):
    """Reads and writes the lasting store; `lasting` is None where the coordinator has none."""

    def __init__(self, lasting: Lasting | None) -> None:
        self.connections = Connections(lasting) if lasting is not None else None

    @property
    def is_closed(self) -> bool:
        return self.connections is not None and self.connections.is_closed

    def close(self) -> None:
        """The coordinator goes down: whoever waits is told to come back."""
        if self.connections is not None:
            self.connections.close()

    def _store(self) -> Connections:
        if self.connections is None:
            raise Refused(
                Reason.STORE_OFF, "this coordinator has no store of its own; start it with --store bridge or torch"
            )
        return self.connections

    @_on_store
    async def Get(self, request: store_pb2.GetRequest, context: Context) -> store_pb2.GetResponse:
        store = self._store()
        key = request.key
        _check_readable([key])
        until = _until(request, context)
        value = await store.quick(lambda client: _read(client, key), may_repeat=True)
        if value is None and until > _now():
            value = await store.alone(lambda client: _read_late(client, key, until), until - _now())
        if value is None:
            raise _timeout(key)
        return store_pb2.GetResponse(value=value)

    @_on_store
    async def Set(self, request: store_pb2.SetRequest, context: Context) -> store_pb2.SetResponse:
        store = self._store()
        _check_writable(request.key, request.value)

        async def write(client: StoreClient) -> None:
            await client.set(request.key, request.value)
            await client.count()  # a set is not acknowledged: what is answered after it is

        await store.quick(write, may_repeat=True)
        return store_pb2.SetResponse()

    @_on_store
    async def Add(self, request: store_pb2.AddRequest, context: Context) -> store_pb2.AddResponse:
        store = self._store()
        key, amount = request.key, request.amount
        _check_writable(key)
        try:
            total = await store.quick(lambda client: _add(client, key, amount), may_repeat=False)
        except StoreRefuses:
            # Text may have come between look and sum; if it is a number the store was too full for the sum.
            _sum(key, await store.quick(lambda client: _read(client, key), may_repeat=True), amount)
            raise
        return store_pb2.AddResponse(value=total)

    @_on_store
    async def CompareSet(self, request: store_pb2.CompareSetRequest, context: Context) -> store_pb2.CompareSetResponse:
        store = self._store()
        key, expected, desired = request.key, request.expected, request.desired
        _check_writable(key, expected, desired)
        value = await store.quick(lambda client: client.compare_set(key, expected, desired), may_repeat=False)
        return store_pb2.CompareSetResponse(value=value)

    @_on_store
    async def Wait(self, request: store_pb2.WaitRequest, context: Context) -> store_pb2.WaitResponse:
        store = self._store()
        keys = list(dict.fromkeys(request.keys))
        _check_readable(keys)
        until = _until(request, context)
        if await store.quick(lambda client: client.check(keys), may_repeat=True):
            return store_pb2.WaitResponse()
        if until > _now():
            missing = await store.alone(lambda client: _wait(client, keys, until), until - _now())
        else:
            missing = await store.quick(lambda client: _missing(client, keys), may_repeat=True)
        if missing is not None:
            raise _timeout(missing)
        return store_pb2.WaitResponse()

    @_on_store
    async def Delete(self, request: store_pb2.DeleteRequest, context: Context) -> store_pb2.DeleteResponse:
        store = self._store()
        key = request.key
        _check_not_ours(key)
        if _wire_bytes(key) > MAX_KEY_BYTES:
            return store_pb2.DeleteResponse(deleted=False)  # there cannot be such a key
        deleted = await store.quick(lambda client: client.delete(key), may_repeat=False)
        return store_pb2.DeleteResponse(deleted=deleted)

    @_on_store
    async def ListKeys(self, request: store_pb2.ListKeysRequest, context: Context) -> store_pb2.ListKeysResponse:
        store = self._store()
        page = page_of(request.page_size, request.page_token)
        # Of its own: a long list would hold up all others.
        keys = await store.alone(lambda client: client.list_keys(), LIST_WITHIN_S)
        wanted = sorted(one for one in keys if one.startswith(request.prefix) and _is_text(one))
        response = store_pb2.ListKeysResponse()
        response.next_page_token = fill(page, wanted[page.begin :], response.keys, _listed_bytes)
        return response


# ---- what a request may ask for ---------------------------------------------------------------------------


def _wire_bytes(key: str) -> int:
    return len(PREFIX) + len(key.encode())


def _check_readable(keys: Sequence[str]) -> None:
    """Raises Refused for keys that the store would cut a client off for."""
    if not 0 < len(keys) <= MAX_KEYS:
        raise Refused(Reason.INVALID_FIELD, f"{len(keys)} keys to wait for; give 1 to {MAX_KEYS}", {"field": "keys"})
    sizes = [_wire_bytes(key) for key in keys]
    if max(sizes) > MAX_KEY_BYTES:
        raise Refused(Reason.INVALID_FIELD, _too_long(keys[sizes.index(max(sizes))]), {"field": "key"})
    size = sum(sizes) + _ENTRY_BYTES * len(sizes)
    if size > MAX_COMMAND_BYTES:
        raise Refused(
            Reason.INVALID_FIELD,
            f"the keys to wait for are {size} bytes, at most {MAX_COMMAND_BYTES} are allowed; wait in several calls",
            {"field": "keys"},
        )


def _check_not_ours(key: str) -> None:
    # With slashes before it, as a PrefixStore with an empty prefix writes it, it is meant just so.
    if key.lstrip("/").startswith(READ_ONLY_BELOW):
        raise Refused(
            Reason.KEY_READ_ONLY,
            f"key {key[:128]!a} is the coordinator's and read-only; a run's own keys lie below runs/<run>/",
            {"key": key[:128]},
        )


def _check_writable(key: str, *values: bytes) -> None:
    _check_not_ours(key)
    if _wire_bytes(key) > MAX_KEY_BYTES:
        raise Refused(Reason.LIMIT_EXCEEDED, _too_long(key), {"limit_bytes": str(MAX_KEY_BYTES - len(PREFIX))})
    for value in values:
        if len(value) > MAX_VALUE_BYTES:
            raise Refused(
                Reason.LIMIT_EXCEEDED,
                f"a value for key {key[:64]!a} has {len(value)} bytes, at most {MAX_VALUE_BYTES} are allowed",
                {"limit_bytes": str(MAX_VALUE_BYTES)},
            )


def _too_long(key: str) -> str:
    longest = MAX_KEY_BYTES - len(PREFIX)
    return f"key {key[:64]!a}... has {len(key.encode())} bytes, at most {longest} are allowed"


def _sum(key: str, found: bytes | None, amount: int) -> int:
    """Raises Refused where there is none."""
    if found is not None and (_NUMBER.fullmatch(found) is None or not _fits(int(found))):
        raise Refused(
            Reason.VALUE_NOT_A_NUMBER,
            f"key {key[:64]!a} holds {found[:32]!a}, not a 64-bit number; set it to one first",
            {"key": key[:128]},
        )
    number = int(found) if found is not None else 0
    if not _fits(number + amount):
        raise _too_large(key, number, amount)
    return number + amount


def _too_large(key: str, number: int, amount: int) -> Refused:
    return Refused(
        Reason.VALUE_NOT_A_NUMBER,
        f"key {key[:64]!a} holds {number}; with {amount} added it would not fit 64 bits",
        {"key": key[:128]},
    )


def _fits(number: int) -> bool:
    return I64_MIN <= number <= I64_MAX


def _now() -> float:
    return asyncio.get_running_loop().time()


def _until(request: store_pb2.GetRequest | store_pb2.WaitRequest, context: Context) -> float:
    """When to give up, on the loop's clock: the timeout, the call's deadline or MAX_WAIT_S, whichever is first."""
    limits = [MAX_WAIT_S]
    left = context.time_remaining()
    if left is not None:
        limits.append(left)
    if request.HasField("timeout"):
        limits.append(_timeout_s(request.timeout))
    return _now() + min(limits)


def _timeout_s(timeout: Duration) -> float:
    given = seconds(timeout)
    if given < 0:
        raise Refused(
            Reason.INVALID_FIELD,
            f"timeout is {given:g} s; give 0 (not at all) or more, or none (as long as the call may take)",
            {"field": "timeout"},
        )
    return given


def _timeout(key: str) -> Refused:
    return Refused(Reason.STORE_TIMEOUT, f"key {key[:128]!a} did not come within the timeout", {"key": key[:256]})


# ---- operations on a client -------------------------------------------------------------------------------


async def _read(client: StoreClient, key: str) -> bytes | None:
    """The value, None where there is no key: the store answers both a missing and an empty one with nothing."""
    value = await client.get(key)
    if value:
        return value
    if not await client.check([key]):
        return None
    # It may have come between the two.
    return await client.get(key)


async def _add(client: StoreClient, key: str, amount: int) -> int:
    """The sum, by the store's own ADD.

    Not by compare_set: its answer is the same whether it set the sum or another client, adding as much, just did.
    """
    _sum(key, await _read(client, key), amount)
    total = await client.add(key, amount)
    if _fits(total - amount):
        return total
    # Others added between look and sum, and it went over: the store wraps around, and back.
    before = await client.add(key, amount if amount == I64_MIN else -amount)
    raise _too_large(key, before, amount)


async def _read_late(client: StoreClient, key: str, until: float) -> bytes | None:
    """The value once it is there; None if it did not come until then."""
    while True:
        try:
            await client.wait([key], until - _now())
        except KeyTimeout:
            return await _read(client, key)
        value = await _read(client, key)
        if value is not None:
            return value
        # Deleted again, or somebody's compare_set woke all who wait without setting it.


async def _wait(client: StoreClient, keys: Sequence[str], until: float) -> str | None:
    """None once all keys are there; one that is missing if they did not come until then."""
    try:
        await client.wait(keys, until - _now())
    except KeyTimeout:
        return await _missing(client, keys)
    return None


async def _missing(client: StoreClient, keys: Sequence[str]) -> str | None:
    """One key that is not there, None if all are. Asks in halves: keys are many, questions few."""
    if await client.check(keys):
        return None
    while len(keys) > 1:
        half = keys[: len(keys) // 2]
        keys = keys[len(half) :] if await client.check(half) else half
    return keys[0]


def _is_text(key: str) -> bool:
    """False for a key of a torch client that is no UTF-8: it cannot travel in an answer."""
    return key.isascii() or not any("\udc80" <= one <= "\udcff" for one in key)


def _listed_bytes(key: str) -> int:
    return len(key.encode()) + _FIELD_BYTES
