"""What an agent says to its coordinator, over real streams, to a coordinator that a test plays."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest

from nvrx.client.conversation import Actual, Conversation, Patience
from nvrx.client.coordinator import Coordinator, Joined
from nvrx.core.commands import Join
from nvrx.core.facts import WorkerExit
from nvrx.core.ids import CycleNumber, LocalRank
from nvrx.core.presence import AgentPhase
from nvrx.v1 import heartbeat_pb2, heartbeat_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class Played(heartbeat_pb2_grpc.HeartbeatServiceServicer):
    """Ends its first stream once it is told to; acknowledges all that is said on the next ones."""

    def __init__(self) -> None:
        self.streams = 0
        self.opened = asyncio.Event()
        self.ends = asyncio.Event()
        self.told: list[int] = []

    async def Heartbeat(  # type: ignore[override]  # writes to the context, as the real one does
        self, request_iterator: object, context: Context
    ) -> None:
        self.streams += 1
        self.opened.set()
        is_first = self.streams == 1
        while True:
            request = await context.read()
            if not isinstance(request, heartbeat_pb2.HeartbeatRequest):
                return
            if is_first:
                await self.ends.wait()
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the coordinator goes down")
            self.told += [one.cycle for one in request.workers]
            await context.write(heartbeat_pb2.HeartbeatResponse(journal_id="j", acknowledged=request.sequence))


@pytest.mark.rule("D2", "E5")
async def test_a_report_is_told_again_after_the_coordinator_ended_the_stream() -> None:
    """gRPC goes on asking for requests of a stream that has ended: what was said there would count as told."""
    played = Played()
    server = grpc.aio.server()
    heartbeat_pb2_grpc.add_HeartbeatServiceServicer_to_server(played, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def next_endpoint() -> None:
        return None

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        coordinator = SimpleNamespace(
            heartbeats=heartbeat_pb2_grpc.HeartbeatServiceStub(channel),
            metadata=None,
            endpoint="it",
            next_endpoint=next_endpoint,
        )
        joined = SimpleNamespace(run_id="r", journal_id="j", heartbeat_interval_s=5.0, lease_ttl_s=10.0)
        command = SimpleNamespace(node=SimpleNamespace(node_id="n", incarnation="i"))
        talk = Conversation(
            cast(Coordinator, coordinator),
            cast(Joined, joined),
            cast(Join, command),
            Patience(60.0),
            lambda: Actual(AgentPhase.RUNNING, CycleNumber(3), ()),
            lambda _: None,
            lambda _: None,
        )
        talking = asyncio.create_task(talk.keep_up())
        try:
            async with asyncio.timeout(10):
                await played.opened.wait()
                talk.report(CycleNumber(3), (WorkerExit(LocalRank(0), 0),))
                await asyncio.sleep(0.1)
                played.ends.set()
                await talk.reports_kept()
            assert played.told == [3]
        finally:
            talking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await talking
            await server.stop(None)
