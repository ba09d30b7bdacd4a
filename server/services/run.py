"""RunService: how runs stand, who is in them, and what happened."""

from __future__ import annotations

import collections

from nvrx.core.ids import Revision
from nvrx.core.ranks import members_in_order, node_state
from nvrx.core.refused import Reason, Refused
from nvrx.core.replacement import health_notices
from nvrx.v1 import run_pb2, run_pb2_grpc
from nvrx.wire import views

from ..engine import Engine
from ..hosted import Hosted, Watch
from ..journals import Row
from ..journals.codec import encode, to_plain
from .answering import Context, answering, fill, page_of, refuse

FACTS_AT_ONCE = 500
MAX_DETAIL = 1024 * 1024
"""Characters of JSON. The world of thousands of nodes is one fact, larger than a default client takes (rule H4)."""


class RunService(run_pb2_grpc.RunServiceServicer):
    """Answers from durable state, and from what is heard right now."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def _run(self, hosted: Hosted) -> run_pb2.Run:
        run = hosted.run
        states = collections.Counter(node_state(run, one).value for one in run.members.values())
        message = views.run_message(
            run, states, hosted.waiting, health_notices(run, hosted.presence, self._engine.now(hosted))
        )
        message.revision = hosted.revision
        message.journal_id = self._engine.journal_id
        return message

    @answering
    async def GetRun(self, request: run_pb2.GetRunRequest, context: Context) -> run_pb2.GetRunResponse:
        return run_pb2.GetRunResponse(run=self._run(self._engine.find(request.run_id)))

    @answering
    async def ListRuns(self, request: run_pb2.ListRunsRequest, context: Context) -> run_pb2.ListRunsResponse:
        page = page_of(request.page_size, request.page_token)
        response = run_pb2.ListRunsResponse()
        by_id = [self._engine.runs[run_id] for run_id in sorted(self._engine.runs)]
        response.next_page_token = fill(page, (self._run(one) for one in by_id[page.begin :]), response.runs)
        return response

    @answering
    async def ListNodes(self, request: run_pb2.ListNodesRequest, context: Context) -> run_pb2.ListNodesResponse:
        hosted = self._engine.find(request.run_id)
        page = page_of(request.page_size, request.page_token)
        now = self._engine.now(hosted)
        rows = (
            views.node_message(hosted.run, member, hosted.presence.nodes.get(member.info.node_id), now)
            for member in members_in_order(hosted.run)[page.begin :]
        )
        response = run_pb2.ListNodesResponse()
        response.next_page_token = fill(page, rows, response.nodes)
        return response

    @answering
    async def ListFacts(self, request: run_pb2.ListFactsRequest, context: Context) -> run_pb2.ListFactsResponse:
        hosted = self._engine.find(request.run_id)
        page = page_of(request.page_size, request.page_token)
        first = Revision(max(_first(request.from_revision), page.begin))
        limit = min(page.size, FACTS_AT_ONCE)
        rows = await self._engine.read_facts(hosted.run.run_id, first, limit + 1)
        response = run_pb2.ListFactsResponse()
        cut = fill(page, (_fact(row) for row in rows[:limit]), response.facts)
        if cut or len(rows) > limit:
            response.next_page_token = str(first + len(response.facts))
        return response

    async def WatchFacts(  # type: ignore[override]  # writes to the context, so that its cleanup runs at once
        self, request: run_pb2.WatchFactsRequest, context: Context
    ) -> None:
        try:
            hosted = self._engine.find(request.run_id)
            first = _first(request.from_revision)
            watch = self._engine.watch(hosted)
            try:
                await self._replay(hosted, watch, first, context)
                await self._follow(hosted, watch, first, context)
            finally:
                self._engine.unwatch(hosted, watch)
        except Refused as refused:
            await refuse(context, refused)

    async def _replay(self, hosted: Hosted, watch: Watch, first: Revision, context: Context) -> None:
        while first <= watch.after:
            limit = min(FACTS_AT_ONCE, watch.after - first + 1)
            rows = await self._engine.read_facts(hosted.run.run_id, first, limit)
            for row in rows:
                await context.write(run_pb2.WatchFactsResponse(fact=_fact(row)))
            first = Revision(first + len(rows))

    async def _follow(self, hosted: Hosted, watch: Watch, first: Revision, context: Context) -> None:
        while hosted.run.is_open or not watch.rows.empty():
            row = await watch.rows.get()
            if watch.overflowed:
                raise Refused(
                    Reason.WATCH_TOO_SLOW,
                    "this watch was too slow for what happened; list the facts again and watch from there",
                    {"run_id": hosted.run.run_id},
                )
            if row is None:
                break
            if row.revision >= first:
                await context.write(run_pb2.WatchFactsResponse(fact=_fact(row)))
        if hosted.run.is_open:
            raise Refused(Reason.SHUTTING_DOWN, "the coordinator goes down; watch again from where you are", {})


def _first(from_revision: int) -> Revision:
    """The revision to begin with. Raises Refused for one that there cannot be."""
    if from_revision < 0:
        raise Refused(
            Reason.INVALID_FIELD,
            f"from_revision is {from_revision}; give 0 (from the beginning) or more",
            {"field": "from_revision"},
        )
    return Revision(max(1, from_revision))


def _fact(row: Row) -> run_pb2.Fact:
    size = len(encode(row.fact))
    if size > MAX_DETAIL:
        return views.fact_message(row.revision, row.fact, {"omitted": f"{size} characters; rank maps come in pages"})
    return views.fact_message(row.revision, row.fact, to_plain(row.fact))
