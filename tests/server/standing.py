"""One of several coordinators, in this process, on a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nvrx.core.endpoint import HostPort
from nvrx.core.presence import StoreMode
from nvrx.server.candidate import Candidate
from nvrx.server.etcd.address import EtcdAccess, EtcdAddress
from nvrx.server.settings import EtcdState, ServeConfig

from .coordination import QUICK, VERSION, WAIT_S, Remote

LONG_TTL_S = 60.0
"""Longer than a test: a leader that ends by itself has to give its lease back."""
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Standing(Remote):
    """A coordinator that leads or follows."""

    def __init__(self, candidate: Candidate, address: HostPort) -> None:
        super().__init__(str(address))
        self.candidate = candidate
        self.address = str(address)
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self.running = asyncio.create_task(candidate.run(), name=f"candidate {address}")

    async def becomes(self, status: int) -> None:
        """Wait for a state of its health service."""
        watch = self.health.Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        async for answer in watch:
            if answer.status == status:
                watch.cancel()
                return
        raise AssertionError("its health did not become so")

    async def stores_lost(self, port: int) -> None:
        """Wait until it knows that a store of the run's is gone."""
        office = self.candidate.office
        assert office is not None
        seen = asyncio.Event()
        office.engine.observers.append(lambda hosted: seen.set() if port in hosted.presence.stores.lost else None)
        async with asyncio.timeout(WAIT_S):
            await seen.wait()

    async def leads(self) -> None:
        await self.becomes(SERVING)


@contextlib.asynccontextmanager
async def standing(
    where: EtcdAddress,
    *,
    host: str = "127.0.0.1",
    ttl_s: float = LONG_TTL_S,
    access: EtcdAccess | None = None,
    **more: Any,
) -> AsyncIterator[Standing]:
    """A coordinator on a free port; rank 0 hosts the store unless `store` says otherwise."""
    more = {"store": StoreMode.RANK0, "timing": QUICK, "runtime_dir": str(Path("/nonexistent")), **more}
    state = EtcdState(where, access or EtcdAccess(), ttl_s)
    config = ServeConfig(HostPort(host, 0), None, etcd=state, **more)
    candidate = Candidate(config, VERSION)
    one = Standing(candidate, await candidate.start())
    try:
        yield one
    finally:
        candidate.stop()
        await asyncio.wait([one.running], timeout=WAIT_S)
        await one.channel.close()
        if one.running.done() and not one.running.cancelled():
            one.running.exception()
        one.running.cancel()


async def answers(call: Any) -> grpc.StatusCode:
    """The code that a call ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK
