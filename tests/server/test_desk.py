"""Where calls arrive: during a term, after it, and when it runs out in the middle of a call (rule E6)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from nvrx.core.refused import Reason, Refused
from nvrx.server.desk import Desk, TermOfOffice, not_leading
from nvrx.server.office import SERVICES
from nvrx.server.services.answering import answer_later, answering, refuse
from nvrx.v1 import promote_pb2, run_pb2, run_pb2_grpc

from .coordination import WAIT_S, Remote, refused

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
OWN, LEADER = "here:1", "there:2"
GET = run_pb2.GetRunRequest(run_id="r")


class Played(run_pb2_grpc.RunServiceServicer):
    """Answers once it is let go on; refuses where the run's id says so."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.go_on = asyncio.Event()
        self.was_cancelled = False

    @answering
    async def GetRun(self, request: run_pb2.GetRunRequest, context: Any) -> run_pb2.GetRunResponse:
        await self._pause()
        if request.run_id == "none":
            raise Refused(Reason.UNKNOWN_RUN, "there is none")
        return run_pb2.GetRunResponse(run=run_pb2.Run(run_id=request.run_id))

    ListRuns = ListNodes = ListFacts = answer_later

    async def WatchFacts(self, request: run_pb2.WatchFactsRequest, context: Any) -> None:  # type: ignore[override]
        await context.write(run_pb2.WatchFactsResponse(fact=run_pb2.Fact(revision=1)))
        await self._pause()
        try:
            await context.write(run_pb2.WatchFactsResponse(fact=run_pb2.Fact(revision=2)))
        except Refused as refusal:
            await refuse(context, refusal)

    async def _pause(self) -> None:
        self.asked.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


class Served(Remote):
    """A server with a desk, and one service behind it while a term is open."""

    def __init__(self, desk: Desk, address: str) -> None:
        super().__init__(address)
        self.desk = desk
        self.played = Played()
        self.is_valid = True
        self.term = TermOfOffice(lambda: self.is_valid)
        run_pb2_grpc.add_RunServiceServicer_to_server(self.played, self.term)  # type: ignore[arg-type]

    async def asked(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.played.asked.wait()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    desk = Desk(SERVICES, lambda: not_leading(OWN, LEADER))
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((desk,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    found = Served(desk, f"127.0.0.1:{port}")
    yield found
    await found.channel.close()
    await server.stop(None)


async def is_sent_on(call: Any) -> None:
    assert await refused(call, UNAVAILABLE, "NOT_LEADER") == {"leader": LEADER}


@pytest.mark.rule("E6")
async def test_calls_are_answered_during_a_term_only(served: Served) -> None:
    await is_sent_on(served.runs.GetRun(GET))
    served.desk.open(served.term)
    served.played.go_on.set()
    assert (await served.runs.GetRun(GET)).run.run_id == "r"
    watch = served.runs.WatchFacts(run_pb2.WatchFactsRequest())
    assert [told.fact.revision async for told in watch] == [1, 2]
    await refused(served.runs.GetRun(run_pb2.GetRunRequest(run_id="none")), grpc.StatusCode.NOT_FOUND, "UNKNOWN_RUN")
    await is_sent_on(served.promotes.StopRun(promote_pb2.StopRunRequest()))
    served.desk.close(not_leading(OWN, LEADER))
    await is_sent_on(served.runs.GetRun(GET))
    await is_sent_on(served.runs.WatchFacts(run_pb2.WatchFactsRequest()).read())


@pytest.mark.rule("E6")
@pytest.mark.parametrize("run_id", ["r", "none"])
async def test_an_answer_that_comes_after_the_term_is_not_given(served: Served, run_id: str) -> None:
    """Nor a refusal: to be told UNKNOWN_RUN, or STALE_INCARNATION, makes agents stop their workers."""
    served.desk.open(served.term)
    call = served.runs.GetRun(run_pb2.GetRunRequest(run_id=run_id))
    await served.asked()
    served.is_valid = False
    served.played.go_on.set()
    await is_sent_on(call)


@pytest.mark.rule("E6")
async def test_a_stream_says_nothing_after_the_term(served: Served) -> None:
    served.desk.open(served.term)
    watch = served.runs.WatchFacts(run_pb2.WatchFactsRequest())
    assert (await watch.read()).fact.revision == 1
    await served.asked()
    served.is_valid = False
    served.played.go_on.set()
    await is_sent_on(watch.read())


@pytest.mark.rule("E6", "E7")
async def test_calls_under_way_end_with_the_term_and_its_reason(served: Served) -> None:
    served.desk.open(served.term)
    call = served.runs.GetRun(GET)
    await served.asked()
    watch = served.runs.WatchFacts(run_pb2.WatchFactsRequest())
    await watch.read()
    served.desk.close(Refused(Reason.SHUTTING_DOWN, "come back"))
    await refused(call, UNAVAILABLE, "SHUTTING_DOWN")
    await refused(watch.read(), UNAVAILABLE, "SHUTTING_DOWN")
    assert served.played.was_cancelled


@pytest.mark.rule("E6")
async def test_a_call_that_its_client_gave_up_is_cancelled(served: Served) -> None:
    served.desk.open(served.term)
    call = served.runs.GetRun(GET)
    await served.asked()
    call.cancel()
    async with asyncio.timeout(WAIT_S):
        while served.term.calls:
            await asyncio.wait(served.term.calls)
    assert served.played.was_cancelled


@pytest.mark.rule("E6")
def test_who_does_not_lead_names_nobody_when_it_knows_nobody_else() -> None:
    assert not_leading(OWN, None).details == {}
    assert not_leading(OWN, OWN).details == {}
