"""An operator of the simulated run, on a network of their own: asks for changes, and watches the facts.

A refusal is an answer as good as any; what is granted, the checks hold against the rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import grpc

from nvrx.core.ids import NodeId
from nvrx.v1 import promote_pb2, promote_pb2_grpc, run_pb2, run_pb2_grpc

from .calls import Caller, Channel, Server
from .checks import Checks
from .decisions import require
from .loop import simulated_loop
from .network import Link

RUN = "run"
TIMEOUT_S = 5.0
AGAIN_AFTER_S = 1.0


class Operator:
    """`seen`: the revision up to which the watch has shown the facts."""

    def __init__(self, find_server: Callable[[], Server | None], seed: str) -> None:
        channel: Any = Channel(Caller(Link("operator", Random(f"{seed}/operator")), find_server))
        self._promotes: Any = promote_pb2_grpc.PromoteServiceStub(channel)
        self._runs: Any = run_pb2_grpc.RunServiceStub(channel)
        self.seen = 0
        self._journals = 0

    def begin_anew(self) -> None:
        """The state was lost: facts are counted from the first again, and what is still under way is of before."""
        self.seen = 0
        self._journals += 1

    async def promote(self, node_id: NodeId, replace: NodeId | None, *, immediate: bool) -> None:
        await self._ask(
            self._promotes.Promote,
            promote_pb2.PromoteRequest(run_id=RUN, node_id=node_id, replace_node_id=replace or "", immediate=immediate),
        )

    async def drain(self, node_id: NodeId, *, immediate: bool) -> None:
        await self._ask(
            self._promotes.Drain, promote_pb2.DrainRequest(run_id=RUN, node_id=node_id, immediate=immediate)
        )

    async def undrain(self, node_id: NodeId) -> None:
        await self._ask(self._promotes.Undrain, promote_pb2.UndrainRequest(run_id=RUN, node_id=node_id))

    async def stop_run(self) -> None:
        await self._ask(self._promotes.StopRun, promote_pb2.StopRunRequest(run_id=RUN))

    async def _ask(self, method: Any, request: Any) -> None:
        try:
            await method(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return

    def watch(self, checks: Checks) -> None:
        """Begin to watch the facts, and go on from where the watch was after each break."""
        simulated_loop().watched(self._watch(checks), "watch")

    async def _watch(self, checks: Checks) -> None:
        while True:
            journal = self._journals
            stream = self._runs.WatchFacts(run_pb2.WatchFactsRequest(run_id=RUN, from_revision=self.seen + 1))
            try:
                while isinstance(response := await stream.read(), run_pb2.WatchFactsResponse):
                    if journal != self._journals:
                        break
                    checks.hold(self._check_seen, response.fact, checks)
                    self.seen = response.fact.revision
            except grpc.aio.AioRpcError:
                pass
            finally:
                stream.cancel()
            await asyncio.sleep(AGAIN_AFTER_S)

    def _check_seen(self, fact: run_pb2.Fact, checks: Checks) -> None:
        """Everything that a watcher hears is on disk, each once and in order."""
        require(fact.revision == self.seen + 1, "watch", f"revision {fact.revision} was shown after {self.seen}")
        on_disk = len(checks.facts)
        require(fact.revision <= on_disk, "watch", f"revision {fact.revision} was shown, and {on_disk} are on disk")
        kind = type(checks.facts[fact.revision - 1]).__name__
        require(fact.kind == kind, "watch", f"revision {fact.revision} was shown as {fact.kind}, and is {kind}")
