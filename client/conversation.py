"""The heartbeat stream: kept open, opened again after every break (rules E3, E4).

Says what the agent is doing whenever that changes and at every interval; hands on what the coordinator wants.
Knows nothing of processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from nvrx.channel import describe
from nvrx.core import agent as machine
from nvrx.core.commands import Join
from nvrx.core.facts import WorkerExit
from nvrx.core.ids import CycleNumber
from nvrx.core.presence import AgentPhase, HealthReport
from nvrx.core.ranks import Desired
from nvrx.core.refused import DETAIL_NEWER_STREAM, DETAIL_SERVED_RUN, Reason
from nvrx.errors import refused_from
from nvrx.v1 import common_pb2, heartbeat_pb2
from nvrx.wire import membership
from nvrx.wire.units import seconds

from .coordinator import SAY_EVERY_S, Coordinator, Joined, now_s

log = logging.getLogger("nvrx.node")

RECONNECT_MOST_S = 1.0
SILENCE_INTERVALS = 3.0
SILENCE_LEAST_S = 3.0
MAX_UNACKNOWLEDGED = 4096

_EXPELLING = {Reason.STALE_INCARNATION, Reason.UNKNOWN_NODE, Reason.UNKNOWN_RUN}
_MAY_PASS = {DETAIL_NEWER_STREAM, DETAIL_SERVED_RUN}
"""Details of refusals that say nothing about this incarnation: somebody else spoke in its name, or a coordinator of
another run was started at this address. Workers run on, and the agent asks again (rule E3)."""


@dataclass(frozen=True)
class Actual:
    """What the agent is doing now. `acknowledged`: the cycle that it was told of last."""

    phase: AgentPhase
    cycle: CycleNumber | None
    store_ports: tuple[int, ...]
    acknowledged: CycleNumber | None = None
    progress: int | None = None
    health: HealthReport | None = None


@dataclass
class _Unacknowledged:
    """A report that the coordinator has not said to keep; `sequence` None until it is sent on this stream."""

    cycle: CycleNumber
    exits: tuple[WorkerExit, ...]
    sequence: int | None = None


@dataclass(frozen=True)
class Patience:
    """How long the coordinator may be out of reach (rule E3): until the agent ends, in seconds; and whether workers run
    on beyond this node's lease."""

    coordinator_grace_s: float
    stops_on_partition: bool = False


class ExpelledByCoordinator(Exception):
    """This incarnation is no member any more; the message says why."""


class LeaseOver(Exception):
    """The coordinator was out of reach for this node's lease, and workers are not to run on without it."""


class GraceOver(Exception):
    """The coordinator was out of reach for longer than is borne."""


class Conversation:
    """One incarnation's talk with the coordinator. `actual` tells what the agent does; `on_...` hear the answers."""

    def __init__(
        self,
        coordinator: Coordinator,
        joined: Joined,
        command: Join,
        patience: Patience,
        actual: Callable[[], Actual],
        on_desired: Callable[[Desired], None],
        on_rank_map: Callable[[common_pb2.RankMap], None],
    ) -> None:
        self._coordinator = coordinator
        self._joined = joined
        self._command = command
        self._patience = patience
        self._actual = actual
        self._on_desired = on_desired
        self._on_rank_map = on_rank_map
        self._changed = asyncio.Event()
        self._reports: list[_Unacknowledged] = []
        self._sequence = 0
        self._interval_s = joined.heartbeat_interval_s
        self._lease_s = joined.lease_ttl_s
        self._seen = (0, 0)
        self._heard_at = now_s()
        self._lost_at: float | None = None
        self._is_new_stream = True
        self._stream = 0
        self._reports_kept = asyncio.Event()
        self._reports_kept.set()

    def changed(self) -> None:
        """There is something new to say: say it now."""
        self._changed.set()

    def report(self, cycle: CycleNumber, exits: tuple[WorkerExit, ...], at_once: bool = True) -> None:
        """Tell that workers ended, again and again until the coordinator has kept it.

        `at_once` false: with whatever is said next.
        """
        self._reports.append(_Unacknowledged(cycle, exits))
        del self._reports[:-MAX_UNACKNOWLEDGED]
        self._reports_kept.clear()
        if at_once:
            self._changed.set()

    async def reports_kept(self) -> None:
        """Returns once the coordinator has kept every report."""
        await self._reports_kept.wait()

    async def keep_up(self) -> None:
        """Talk for ever. Raises ExpelledByCoordinator, LeaseOver or GraceOver."""
        said_at = 0.0
        delay = 0.0
        self._heard_at = now_s()
        while True:
            heard_before = self._heard_at
            why = await self._talk()
            away_s = now_s() - self._heard_at
            self._judge(away_s, why)
            if self._heard_at > heard_before:
                delay, said_at = 0.0, 0.0
            if now_s() - said_at >= SAY_EVERY_S:
                said_at = now_s()
                self._lost_at = self._heard_at
                log.warning("lost the coordinator %s: %s; workers run on", self._coordinator.endpoint, why)
            await asyncio.sleep(min(delay, self._patient_for_s()))
            most_s = min(RECONNECT_MOST_S, self._lease_s / 4)
            delay = random.uniform(0.5, 1.0) * min(most_s, max(delay * 2, 0.05))
            await self._coordinator.next_endpoint()

    @property
    def _borne_s(self) -> float:
        """How long silence is borne before something has to be done."""
        grace_s = self._patience.coordinator_grace_s
        return min(grace_s, self._lease_s) if self._patience.stops_on_partition else grace_s

    def _judge(self, away_s: float, why: str) -> None:
        grace_s = self._patience.coordinator_grace_s
        away = f"coordinator {self._coordinator.endpoint} out of reach for {away_s:.0f} s ({why})"
        if away_s >= grace_s:
            raise GraceOver(f"{away}; gave up after {grace_s:g} s (--coordinator-grace)")
        if self._patience.stops_on_partition and away_s >= self._lease_s:
            raise LeaseOver(f"{away}: longer than the lease of {self._lease_s:g} s (--on-partition stop)")

    def _patient_for_s(self) -> float:
        """How much longer silence is borne."""
        return max(0.0, self._borne_s - (now_s() - self._heard_at))

    async def _talk(self) -> str:
        """One stream, from its opening to its end; why it ended."""
        for one in self._reports:
            one.sequence = None
        self._is_new_stream = True
        self._stream += 1
        self._changed.set()
        call = self._coordinator.heartbeats.Heartbeat(self._say(self._stream), metadata=self._coordinator.metadata)
        try:
            while True:
                silence_s = min(max(SILENCE_LEAST_S, SILENCE_INTERVALS * self._interval_s), self._patient_for_s())
                async with asyncio.timeout(silence_s):
                    response = await call.read()
                if not isinstance(response, heartbeat_pb2.HeartbeatResponse):
                    return await self._why_ended(call)
                if response.term < self._seen[0]:
                    return "it led in an earlier term"  # and does not know yet that it leads no more
                self._hear(response)
        except TimeoutError:
            return f"nothing heard for {silence_s:g} s"
        except grpc.aio.AioRpcError as error:
            return self._explain(error)
        finally:
            self._stream += 1
            call.cancel()

    async def _why_ended(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> str:
        code = await call.code()
        if code is grpc.StatusCode.OK:
            return "it ended the stream"
        return self._explain(
            grpc.aio.AioRpcError(
                code, await call.initial_metadata(), await call.trailing_metadata(), await call.details()
            )
        )

    def _explain(self, error: grpc.aio.AioRpcError) -> str:
        refused = refused_from(error)
        if refused is None:
            return describe(error)
        if refused.reason in _EXPELLING and not _MAY_PASS & refused.details.keys():
            raise ExpelledByCoordinator(refused.message)
        self._coordinator.heed(refused)
        return refused.message

    async def _say(self, stream: int) -> AsyncIterator[heartbeat_pb2.HeartbeatRequest]:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._changed.wait()
            if stream != self._stream:
                # gRPC asks on for a stream that the coordinator has ended: what is said there nobody hears.
                return
            self._changed.clear()
            yield self._request()

    def _request(self) -> heartbeat_pb2.HeartbeatRequest:
        self._sequence += 1
        actual = self._actual()
        request = heartbeat_pb2.HeartbeatRequest(
            run_id=self._joined.run_id,
            node_id=self._command.node.node_id,
            incarnation=self._command.node.incarnation,
            sequence=self._sequence,
            phase=membership.phase_value(actual.phase),
            cycle=actual.cycle,
            store_ports=actual.store_ports,
            acknowledged_cycle=actual.acknowledged,
        )
        if actual.progress is not None:
            request.progress.step = actual.progress
        if actual.health is not None:
            request.health.CopyFrom(membership.health_message(actual.health))
        for one in self._reports:
            if one.sequence is None:
                one.sequence = self._sequence
                request.workers.extend(membership.worker_reports(one.cycle, one.exits))
        return request

    def _hear(self, response: heartbeat_pb2.HeartbeatResponse) -> None:
        self._heard_at = now_s()
        if self._lost_at is not None:
            away_s = self._heard_at - self._lost_at
            log.info("the coordinator %s is back after %.1f s", self._coordinator.endpoint, away_s)
            self._lost_at = None
        if response.journal_id != self._joined.journal_id:
            raise ExpelledByCoordinator("the coordinator has another journal: it does not know this cycle")
        if response.HasField("rank_map"):
            # Made once for all nodes and streams: its revision says nothing about order, its cycle does.
            self._on_rank_map(response.rank_map)
            return
        at = (response.term, response.revision)
        if at < self._seen and self._is_new_stream:
            # On one stream that is a late word; a new one begins with what the coordinator has on disk.
            raise ExpelledByCoordinator(
                f"the coordinator is at revision {response.revision} and had told {self._seen[1]}: it lost what it knew"
            )
        self._is_new_stream = False
        if at < self._seen:
            return
        self._seen = at
        self._interval_s = seconds(response.heartbeat_interval) or self._interval_s
        self._lease_s = seconds(response.lease_ttl) or self._lease_s
        self._reports = [one for one in self._reports if one.sequence is None or one.sequence > response.acknowledged]
        if not self._reports:
            self._reports_kept.set()
        wanted = membership.desired_of(response)
        if wanted is not None:
            self._on_desired(wanted)


async def talk(conversation: Conversation, observe: Callable[[machine.Observation], None]) -> None:
    """Keep a conversation up; how it ended is one more thing for the agent's machine to observe."""
    try:
        await conversation.keep_up()
    except ExpelledByCoordinator as error:
        observe(machine.Expelled(str(error)))
    except LeaseOver as error:
        observe(machine.LeaseOver(str(error)))
    except GraceOver as error:
        observe(machine.CoordinatorGraceOver(str(error)))
