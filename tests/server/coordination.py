"""A real coordinator in this process, and agents moved by hand: what the tests of the coordinator start.

Every wait is for an answer, bounded by WAIT_S; nothing sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from nvrx.channel import CHANNEL_OPTIONS, bearer
from nvrx.core.endpoint import HostPort
from nvrx.core.presence import StoreMode, Timing
from nvrx.server.app import Coordinator, ServeConfig
from nvrx.server.journals import Journal
from nvrx.server.journals.memory import MemoryJournal
from nvrx.server.journals.sqlite import SqliteJournal
from nvrx.v1 import (
    common_pb2,
    heartbeat_pb2,
    heartbeat_pb2_grpc,
    join_pb2,
    join_pb2_grpc,
    promote_pb2_grpc,
    rank_map_pb2,
    rank_map_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
    store_pb2_grpc,
)
from nvrx.wire.units import duration

WAIT_S = 20.0
RUN = "run-1"
VERSION = "0.0-test"
PATIENT = Timing(heartbeat_interval_s=30.0, lease_ttl_s=60.0, reconnect_grace_s=30.0)
"""Nobody is lost, and who spoke once stays fresh: for tests that are not about time."""
QUICK = Timing(heartbeat_interval_s=30.0, lease_ttl_s=60.0, reconnect_grace_s=0.05)
"""A broken stream is a loss soon after; silence is not."""

WAIT = common_pb2.DESIRED_ACTION_WAIT
RUN_WORKERS = common_pb2.DESIRED_ACTION_RUN
STOP = common_pb2.DESIRED_ACTION_STOP
EXIT = common_pb2.DESIRED_ACTION_EXIT

IDLE = common_pb2.AGENT_PHASE_IDLE
RUNNING = common_pb2.AGENT_PHASE_RUNNING
STOPPED = common_pb2.AGENT_PHASE_STOPPED
FAILED = common_pb2.AGENT_PHASE_FAILED
SUCCEEDED = common_pb2.AGENT_PHASE_SUCCEEDED


class Remote:
    """A coordinator anywhere: a channel and all stubs."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self.joins: Any = join_pb2_grpc.JoinServiceStub(self.channel)
        self.heartbeats: Any = heartbeat_pb2_grpc.HeartbeatServiceStub(self.channel)
        self.maps: Any = rank_map_pb2_grpc.RankMapServiceStub(self.channel)
        self.runs: Any = run_pb2_grpc.RunServiceStub(self.channel)
        self.promotes: Any = promote_pb2_grpc.PromoteServiceStub(self.channel)
        self.stores: Any = store_pb2_grpc.StoreServiceStub(self.channel)

    async def rank_map(self, cycle: int | None = None, run_id: str = RUN) -> common_pb2.RankMap:
        request = rank_map_pb2.GetRankMapRequest(run_id=run_id, cycle=cycle)
        return (await self.maps.GetRankMap(request, timeout=WAIT_S)).rank_map  # type: ignore[no-any-return]

    async def run_state(self, run_id: str = RUN) -> run_pb2.Run:
        return (await self.runs.GetRun(run_pb2.GetRunRequest(run_id=run_id), timeout=WAIT_S)).run  # type: ignore[no-any-return]

    async def facts(self, run_id: str = RUN) -> list[run_pb2.Fact]:
        return list((await self.runs.ListFacts(run_pb2.ListFactsRequest(run_id=run_id), timeout=WAIT_S)).facts)

    async def until_fact(self, kind: str, *, beyond: int = 0, run_id: str = RUN) -> run_pb2.Fact:
        """The first fact of a kind above a revision, waited for."""
        request = run_pb2.WatchFactsRequest(run_id=run_id, from_revision=beyond + 1)
        watch = self.runs.WatchFacts(request, timeout=WAIT_S)
        async for told in watch:
            if told.fact.kind == kind:
                watch.cancel()
                return told.fact  # type: ignore[no-any-return]
        raise AssertionError(f"no {kind} came")


class Served(Remote):
    """A coordinator running in this process."""

    def __init__(self, coordinator: Coordinator, address: HostPort) -> None:
        super().__init__(str(address))
        self.coordinator = coordinator
        self.address = address
        self.engine = coordinator.engine
        self.running = asyncio.create_task(coordinator.run(), name="coordinator")


@contextlib.asynccontextmanager
async def serving(
    state: Path | Journal | None = None, *, timing: Timing = PATIENT, **more: Any
) -> AsyncIterator[Served]:
    """A coordinator on a free port: with a state directory, a given journal, or in memory only.

    Rank 0 hosts the store unless `store` says otherwise: no process is started.
    """
    more.setdefault("store", StoreMode.RANK0)
    config = ServeConfig(HostPort("127.0.0.1", 0), state if isinstance(state, Path) else None, timing, **more)
    if isinstance(state, Path):
        journal: Journal = SqliteJournal(state)
    else:
        journal = state if state is not None else MemoryJournal()
    coordinator = Coordinator(config, journal, VERSION)
    served = Served(coordinator, await coordinator.start())
    try:
        yield served
    finally:
        coordinator.stop()
        await asyncio.wait([served.running], timeout=WAIT_S)
        if not served.running.done():
            served.running.cancel()
        await served.channel.close()


def info_of(error: grpc.RpcError) -> error_details_pb2.ErrorInfo:
    """The one ErrorInfo of a refused call; checks its domain."""
    status = rpc_status.from_call(error)
    assert status is not None, f"no google.rpc.Status in {error!r}"
    assert len(status.details) == 1
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.domain == "nvrx"
    assert "\n" not in status.message
    assert "Traceback" not in status.message
    return info


async def refused(call: Any, code: grpc.StatusCode, reason: str) -> dict[str, str]:
    """Await a call that must be refused so; the metadata of its ErrorInfo."""
    with pytest.raises(grpc.aio.AioRpcError) as seen:
        async with asyncio.timeout(WAIT_S):
            await call
    assert seen.value.code() is code, seen.value.details()
    info = info_of(seen.value)
    assert info.reason == reason, seen.value.details()
    return dict(info.metadata)


def exited(
    local_rank: int = 0, code: int | None = 1, *, signal: str = "", message: str = "", by_agent: bool = False
) -> heartbeat_pb2.WorkerReport:
    """What an agent says of one worker that ended."""
    if by_agent:
        outcome = common_pb2.WORKER_OUTCOME_STOPPED_BY_AGENT
    else:
        outcome = common_pb2.WORKER_OUTCOME_SUCCEEDED if code == 0 else common_pb2.WORKER_OUTCOME_FAILED
    return heartbeat_pb2.WorkerReport(
        local_rank=local_rank,
        outcome=outcome,
        exit_code=None if signal else code,
        signal=signal,
        message=message,
        stopped_by_agent=by_agent,
    )


class HandAgent:
    """A node whose every word the test says itself."""

    def __init__(
        self,
        served: Remote,
        node_id: str,
        *,
        nnodes: tuple[int, int] = (2, 3),
        workers: int = 2,
        run_id: str = RUN,
        incarnation: str = "",
        token: str | None = None,
    ) -> None:
        self.served = served
        self.node_id = node_id
        self.run_id = run_id
        self.incarnation = incarnation or f"{node_id}-life-1"
        self.shape = common_pb2.Shape(min_nodes=nnodes[0], max_nodes=nnodes[1], workers_per_node=workers)
        self.sequence = 0
        self.phase: common_pb2.AgentPhase.ValueType = IDLE
        self.cycle: int | None = None
        self.call: Any = None
        self.last: heartbeat_pb2.HeartbeatResponse | None = None
        self._metadata = bearer(token)

    def join_request(self, **changes: Any) -> join_pb2.JoinRequest:
        number = int("".join(one for one in self.node_id if one.isdigit()) or 0)
        request = join_pb2.JoinRequest(
            run_id=self.run_id,
            node_id=self.node_id,
            incarnation=self.incarnation,
            address=f"10.0.0.{number}",
            pid=1000 + number,
            version=VERSION,
            shape=self.shape,
            # What fails one after another counts one by one, however quick the test.
            settings=common_pb2.Settings(max_restarts=3, settle=duration(0)),
            devices=[
                common_pb2.Device(local_rank=one, uuid=f"GPU-{self.node_id}-{one}", numa_node=0)
                for one in range(self.shape.workers_per_node)
            ],
        )
        # The first world waits for MAX nodes: which of them are chosen does not depend on who is faster.
        request.settings.last_call.FromSeconds(600)
        request.settings.join_timeout.FromSeconds(600)
        request.MergeFrom(join_pb2.JoinRequest(**changes))
        return request

    async def join(self, **changes: Any) -> join_pb2.JoinResponse:
        request = self.join_request(**changes)
        return await self.served.joins.Join(request, timeout=WAIT_S, metadata=self._metadata)  # type: ignore[no-any-return]

    async def leave(self, **fields: Any) -> None:
        request = join_pb2.LeaveRequest(
            run_id=self.run_id, node_id=self.node_id, incarnation=self.incarnation, **fields
        )
        await self.served.joins.Leave(request, timeout=WAIT_S, metadata=self._metadata)

    async def open(self) -> heartbeat_pb2.HeartbeatResponse:
        """Open the stream and say a first word; what came back first."""
        self.call = self.served.heartbeats.Heartbeat(metadata=self._metadata)
        await self.say()
        return await self.read()

    async def enter(self) -> HandAgent:
        await self.join()
        await self.open()
        return self

    def heartbeat(
        self, workers: Iterable[heartbeat_pb2.WorkerReport] = (), of_cycle: int | None = None
    ) -> heartbeat_pb2.HeartbeatRequest:
        self.sequence += 1
        request = heartbeat_pb2.HeartbeatRequest(
            run_id=self.run_id,
            node_id=self.node_id,
            incarnation=self.incarnation,
            sequence=self.sequence,
            phase=self.phase,
            cycle=self.cycle,
            workers=workers,
            store_ports=range(40001, 40011),
        )
        for one in request.workers:
            if not one.HasField("cycle"):
                one.cycle = of_cycle if of_cycle is not None else self.cycle or 0
        return request

    async def say(
        self,
        phase: common_pb2.AgentPhase.ValueType | None = None,
        cycle: int | None = None,
        workers: Sequence[heartbeat_pb2.WorkerReport] = (),
    ) -> int:
        """Send a heartbeat; its sequence."""
        self.phase = self.phase if phase is None else phase
        self.cycle = self.cycle if cycle is None else cycle
        async with asyncio.timeout(WAIT_S):
            await self.call.write(self.heartbeat(workers))
        return self.sequence

    async def read(self) -> heartbeat_pb2.HeartbeatResponse:
        """The next answer. Raises grpc.aio.AioRpcError when the stream has ended."""
        async with asyncio.timeout(WAIT_S):
            answer = await self.call.read()
        assert answer is not grpc.aio.EOF, "the stream ended without an error"
        self.last = answer
        return answer  # type: ignore[no-any-return]

    async def until(
        self, action: common_pb2.DesiredAction.ValueType, cycle: int | None = None
    ) -> heartbeat_pb2.HeartbeatResponse:
        """The first answer that asks for `action` (about `cycle`), the last one heard included."""
        answer = self.last if self.last is not None else await self.read()
        while not (answer.desired.action == action and (cycle is None or _is_about(answer.desired, cycle))):
            answer = await self.read()
        return answer

    async def acknowledged(self, sequence: int) -> heartbeat_pb2.HeartbeatResponse:
        """The first answer that acknowledges `sequence`."""
        answer = self.last if self.last is not None else await self.read()
        while answer.acknowledged < sequence:
            answer = await self.read()
        return answer

    async def started(self, cycle: int) -> heartbeat_pb2.Assignment:
        """Wait for the assignment of a cycle and say that its workers run."""
        answer = await self.until(RUN_WORKERS, cycle)
        await self.acknowledged(await self.say(RUNNING, cycle))
        return answer.desired.assignment

    async def report(
        self, *workers: heartbeat_pb2.WorkerReport, phase: common_pb2.AgentPhase.ValueType = FAILED
    ) -> heartbeat_pb2.HeartbeatResponse:
        """Say how workers of the current cycle ended; returns once that is kept."""
        return await self.acknowledged(await self.say(phase, None, workers))

    async def ended(self) -> grpc.aio.AioRpcError:
        """Read until the stream ends with an error; that error."""
        try:
            while True:
                await self.read()
        except grpc.aio.AioRpcError as error:
            return error

    async def break_stream(self) -> None:
        """Drop the stream without a word."""
        self.call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await self.call.read()
        self.last = None


def _is_about(desired: heartbeat_pb2.DesiredState, cycle: int) -> bool:
    return desired.HasField("cycle") and desired.cycle == cycle


async def world(served: Served, count: int = 3, *, cycle: int = 0, active: int = 2, **given: Any) -> list[HandAgent]:
    """`count` agents (MAX of the run) that joined; the first `active` of them run the workers of `cycle`."""
    agents = [HandAgent(served, f"n{number}", **given) for number in range(count)]
    for agent in agents:
        await agent.join()
    for agent in agents:
        await agent.open()
    for agent in agents[:active]:
        await agent.started(cycle)
    await served.until_fact("CycleRunning", run_id=agents[0].run_id)
    return agents
