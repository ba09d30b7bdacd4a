"""The agent's way to its coordinator: one channel, joins that are retried, calls that name what they wait for.

Knows the wire and nothing of workers. Tries the given addresses in turn when one does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import grpc

from nvrx.channel import CHANNEL_OPTIONS, bearer, describe
from nvrx.core.commands import Join
from nvrx.core.endpoint import HostPort, parse_endpoint
from nvrx.core.ids import CycleNumber, Incarnation, RunId
from nvrx.core.presence import DEFAULT_LEASE_TTL_S
from nvrx.core.refused import Reason, Refused
from nvrx.core.shape import DEFAULT_JOIN_TIMEOUT_S
from nvrx.errors import leader_named_in, refused_from
from nvrx.v1 import (
    common_pb2,
    heartbeat_pb2_grpc,
    join_pb2,
    join_pb2_grpc,
    rank_map_pb2,
    rank_map_pb2_grpc,
)
from nvrx.wire import membership
from nvrx.wire.units import duration

from .processes import read_stat

log = logging.getLogger("nvrx.node")

RPC_TIMEOUT_S = 5.0
SAY_EVERY_S = 5.0
RETRY_FIRST_S = 0.1
RETRY_MOST_S = 1.0
FULL_RETRY_S = 2.0
MAX_LEARNED = 32
EXIT_REFUSED = 3
EXIT_NEVER_REACHED = 4

Answer = TypeVar("Answer")


def now_s() -> float:
    """Seconds on the running loop's clock, which timeouts go by as well."""
    return asyncio.get_running_loop().time()


class GivenUp(Exception):
    """The agent ends before it has become a member: one line, and its exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class OutOfReach(Exception):
    """A call got no answer; the message says what happened, without the endpoint."""


@dataclass(frozen=True)
class Joined:
    """What a coordinator said on admitting this node."""

    run_id: RunId
    journal_id: str
    lease_ttl_s: float
    heartbeat_interval_s: float
    coordinators: tuple[HostPort, ...] = ()


class Coordinator:
    """The coordinator at one of `endpoints`, or at one that was learned of since."""

    def __init__(self, endpoints: tuple[HostPort, ...], token: str | None) -> None:
        self._given = endpoints
        self._learned: tuple[HostPort, ...] = ()
        self._index = 0
        """Of whose turn it was in the round; whoever was named as the leader comes out of turn."""
        self.endpoint = endpoints[0]
        self._leader: HostPort | None = None
        self.metadata = bearer(token)
        self._channel = self._open()

    def _open(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(str(self.endpoint), options=CHANNEL_OPTIONS)

    @property
    def _endpoints(self) -> tuple[HostPort, ...]:
        return self._given + self._learned

    def learn(self, others: Iterable[HostPort]) -> None:
        """There are these coordinators, too: to be tried after those that were given. Of many the latest are kept."""
        fresh = (one for one in dict.fromkeys(others) if one not in self._endpoints)
        self._learned = (*self._learned, *fresh)[-MAX_LEARNED:]

    def heed(self, refused: Refused) -> None:
        """A coordinator that does not lead may have said who does: turn there next."""
        self._leader = leader_named_in(refused)
        self.learn([self._leader] if self._leader is not None else [])

    async def next_endpoint(self) -> None:
        """Turn to the leader, if one was named, else to the next of several coordinators."""
        if len(self._endpoints) > 1:
            await self._channel.close()
            leader, self._leader = self._leader, None
            if leader is None:
                self._index = (self._index + 1) % len(self._endpoints)
            self.endpoint = leader or self._endpoints[self._index]
            self._channel = self._open()

    async def close(self) -> None:
        await self._channel.close()

    @property
    def heartbeats(self) -> heartbeat_pb2_grpc.HeartbeatServiceAsyncStub:
        return heartbeat_pb2_grpc.HeartbeatServiceStub(self._channel)  # type: ignore[return-value]

    async def local_address(self) -> str:
        """The address that this host uses towards the coordinator. Raises OutOfReach where its name is unknown."""
        target = self.endpoint
        try:
            found = await asyncio.get_running_loop().getaddrinfo(target.host, target.port, type=socket.SOCK_DGRAM)
        except socket.gaierror as error:
            raise OutOfReach(f"cannot resolve {target.host}: {error.strerror}") from error
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)
            except OSError as error:
                raise OutOfReach(f"no way to {target.host}: {error.strerror}") from error
            return str(probe.getsockname()[0])

    async def _call(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        """Raises Refused or OutOfReach."""
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            refused = refused_from(error)
            if refused is not None and refused.reason is Reason.NOT_LEADER:
                self.heed(refused)
                raise OutOfReach(f"it does not lead, {self._leader or 'and knows nobody who'} does") from error
            if refused is not None:
                raise refused from error
            raise OutOfReach(describe(error)) from error

    async def join(self, run_id: str, command: Join) -> Joined:
        """Ask once. Raises Refused or OutOfReach."""
        stub: join_pb2_grpc.JoinServiceAsyncStub = join_pb2_grpc.JoinServiceStub(self._channel)  # type: ignore[assignment]
        request = membership.join_request(RunId(run_id), command)
        response = await self._call(lambda: stub.Join(request, timeout=RPC_TIMEOUT_S, metadata=self.metadata))
        return Joined(
            RunId(response.run_id),
            response.journal_id,
            response.lease_ttl.ToNanoseconds() / 1e9,
            response.heartbeat_interval.ToNanoseconds() / 1e9,
            _endpoints_in(response.coordinators),
        )

    async def leave(self, run_id: RunId, command: Join, reason: str, stopped: bool, stop_grace_s: float) -> None:
        """Take this node out. Raises Refused or OutOfReach."""
        stub: join_pb2_grpc.JoinServiceAsyncStub = join_pb2_grpc.JoinServiceStub(self._channel)  # type: ignore[assignment]
        request = join_pb2.LeaveRequest(
            run_id=run_id,
            node_id=command.node.node_id,
            incarnation=command.node.incarnation,
            reason=reason,
            workers_stopped=stopped,
            stop_grace=duration(stop_grace_s),
        )
        await self._call(lambda: stub.Leave(request, timeout=RPC_TIMEOUT_S, metadata=self.metadata))

    async def rank_map(self, run_id: RunId, cycle: CycleNumber) -> common_pb2.RankMap:
        """A cycle's whole map, all pages joined. Raises Refused or OutOfReach."""
        stub: rank_map_pb2_grpc.RankMapServiceAsyncStub = rank_map_pb2_grpc.RankMapServiceStub(self._channel)  # type: ignore[assignment]
        whole: common_pb2.RankMap | None = None
        token = ""
        while whole is None or token:
            request = rank_map_pb2.GetRankMapRequest(run_id=run_id, cycle=cycle, page_token=token)
            page = await self._call(
                lambda request=request: stub.GetRankMap(request, timeout=RPC_TIMEOUT_S, metadata=self.metadata)  # type: ignore[misc]
            )
            if whole is None:
                whole = page.rank_map
            else:
                whole.nodes.extend(page.rank_map.nodes)
                whole.standbys.extend(page.rank_map.standbys)
            token = page.next_page_token
        return whole


async def admission(
    coordinator: Coordinator,
    run_id: str,
    make_command: Callable[[str, Incarnation | None], Join],
    advertised: str | None,
    join_timeout_s: float | None,
    stopped: asyncio.Event,
    *,
    is_known_there: bool = False,
) -> tuple[Joined, Join] | None:
    """Join, retrying what may pass; None if `stopped` was set before an answer. Raises GivenUp.

    `make_command` takes this node's address, and the incarnation that it is known to replace. A coordinator out of
    reach is waited for until the join timeout, a seat still taken for two leases, a full run as long as it lives.
    `is_known_there`: this agent has been a member, and joins anew; the time given is then its coordinator grace (E3).
    """
    option = "--coordinator-grace" if is_known_there else "--join-timeout"
    patience_s = DEFAULT_JOIN_TIMEOUT_S if join_timeout_s is None else join_timeout_s
    began = now_s()
    given_up_at: float | None = None
    said = ""
    said_at = 0.0
    delay = RETRY_FIRST_S
    replaces: Incarnation | None = None
    while True:
        try:
            command = make_command(advertised or await coordinator.local_address(), replaces)
            joined = await coordinator.join(run_id, command)
            coordinator.learn(joined.coordinators)
            return joined, command
        except OutOfReach as error:
            waited = now_s() - began
            text = f"coordinator {coordinator.endpoint} not reached: {error}"
            if waited >= patience_s:
                raise GivenUp(
                    f"{text}; gave up after {patience_s:g} s ({option}); check --coordinator and that nvrx-coord "
                    "serve is running there",
                    EXIT_NEVER_REACHED,
                ) from error
            text += f"; trying again for at most {patience_s:g} s"
            await coordinator.next_endpoint()
            delay = min(delay * 1.5, RETRY_MOST_S, patience_s - waited)
        except Refused as refused:
            text = refused.message
            delay = RETRY_MOST_S
            if refused.reason is Reason.RUN_FULL:
                began, delay = now_s(), FULL_RETRY_S
                text += "; waiting for a place as long as the run lives"
            elif replaces is None and (dead := _dead_predecessor(refused, command.node.host)) is not None:
                log.info("the agent of this node that joined before (pid %s) is dead", refused.details["joined_pid"])
                replaces = dead
                continue
            elif refused.reason in {Reason.NODE_ALREADY_JOINED, Reason.DUPLICATE_INFRA_RANK}:
                lease_s = float(refused.details.get("lease_ttl_s", DEFAULT_LEASE_TTL_S))
                if given_up_at is None:
                    # After a restart of the coordinator the old one's seat is kept for longer than two leases.
                    patient_s = max(2 * lease_s, float(refused.details.get("free_in_s", "0")) + lease_s)
                    given_up_at = now_s() + patient_s
                if now_s() >= given_up_at:
                    raise GivenUp(refused.message, EXIT_REFUSED) from refused
                text += "; trying again until the other's lease must be over"
            elif refused.reason is not Reason.SHUTTING_DOWN:
                raise _final(refused) from refused
            else:
                await coordinator.next_endpoint()
        if text != said or (now_s() - said_at >= SAY_EVERY_S and "not reached" in text):
            log.warning("%s", text)
            said, said_at = text, now_s()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay * random.uniform(0.7, 1.0)):
                await stopped.wait()
        if stopped.is_set():
            return None


def _endpoints_in(texts: Iterable[str]) -> tuple[HostPort, ...]:
    """Coordinators as they were named; what is no address is passed over."""
    found = []
    for text in texts:
        with contextlib.suppress(ValueError):
            found.append(parse_endpoint(text))
    return tuple(found)


def _dead_predecessor(refused: Refused, host: str) -> Incarnation | None:
    """B2: the incarnation that has this node's place, if it was a process of this host that is no more."""
    told = refused.details
    if refused.reason is not Reason.NODE_ALREADY_JOINED or not host or told.get("joined_host") != host:
        return None
    pid = told.get("joined_pid", "")
    if not pid.isdigit() or read_stat(int(pid)) is not None:
        return None
    return Incarnation(told.get("joined_incarnation", ""))


def _final(refused: Refused) -> GivenUp:
    if refused.reason is Reason.RUN_CLOSED:
        return GivenUp(refused.message, int(refused.details.get("exit_code", "1")))
    return GivenUp(refused.message, EXIT_REFUSED)
