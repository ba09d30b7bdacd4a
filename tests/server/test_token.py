"""A coordinator with a token: every method of every service wants it, health excepted, and nobody prints it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nvrx.v1 import heartbeat_pb2, join_pb2, promote_pb2, rank_map_pb2, run_pb2, store_pb2

from .coordination import WAIT_S, HandAgent, Remote, info_of
from .programs import Program, coordinator, run

SECRET = "s3cret-of-the-coordinator"
METHODS: list[MethodDescriptor] = [
    method
    for module in (join_pb2, heartbeat_pb2, rank_map_pb2, promote_pb2, run_pb2, store_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
STREAMING_IN = {"/nvrx.v1.HeartbeatService/Heartbeat"}
STREAMING_OUT = STREAMING_IN | {"/nvrx.v1.RankMapService/WatchRankMap", "/nvrx.v1.RunService/WatchFacts"}


@dataclass
class Guarded:
    program: Program
    token_file: Path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    token_file = tmp_path_factory.mktemp("token") / "token"
    token_file.write_text(SECRET + "\n")
    with coordinator("--token-file", str(token_file), "--log-level", "debug") as program:
        yield Guarded(program, token_file)


async def call(channel: grpc.aio.Channel, method: MethodDescriptor, metadata: tuple[tuple[str, str], ...]) -> None:
    """Call a method with an empty request; raises what it is refused with."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = f"{'stream' if path in STREAMING_IN else 'unary'}_{'stream' if path in STREAMING_OUT else 'unary'}"
    multi: Any = getattr(channel, kind)(
        path,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    request = GetMessageClass(method.input_type)()
    if path in STREAMING_IN:
        stream = multi(metadata=metadata, timeout=WAIT_S)
        await stream.read()
    elif path in STREAMING_OUT:
        await multi(request, metadata=metadata, timeout=WAIT_S).read()
    else:
        await multi(request, metadata=metadata, timeout=WAIT_S)


@pytest.mark.rule("J2")
def test_all_six_services_are_asked() -> None:
    assert len({method.containing_service.full_name for method in METHODS}) == 6
    assert len(METHODS) == 23


@pytest.mark.rule("J2")
@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", SECRET, f"bearer {SECRET}", f"Bearer {SECRET}x"],
)
async def test_every_method_refuses_a_call_without_the_token(guarded: Guarded, given: str | None) -> None:
    metadata = (("authorization", given),) if given is not None else ()
    async with grpc.aio.insecure_channel(guarded.program.address) as channel:
        for method in METHODS:
            with pytest.raises(grpc.aio.AioRpcError) as seen:
                await call(channel, method, metadata)
            assert seen.value.code() is grpc.StatusCode.UNAUTHENTICATED, method.full_name
            assert info_of(seen.value).reason == "BAD_TOKEN"
            assert "--token-file" in str(seen.value.details())
            assert SECRET not in str(seen.value.details())


@pytest.mark.rule("J2")
async def test_an_unknown_method_tells_nothing_without_the_token(guarded: Guarded) -> None:
    async with grpc.aio.insecure_channel(guarded.program.address) as channel:
        unknown: Any = channel.unary_unary("/nvrx.v1.RunService/Nothing")
        with pytest.raises(grpc.aio.AioRpcError) as seen:
            await unknown(b"", timeout=WAIT_S)
        assert seen.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.rule("J2")
async def test_health_is_open_to_all(guarded: Guarded) -> None:
    async with grpc.aio.insecure_channel(guarded.program.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.rule("J2")
async def test_with_the_token_nodes_and_views_get_in(guarded: Guarded) -> None:
    remote = Remote(guarded.program.address)
    agent = await HandAgent(remote, "n0", token=SECRET).enter()
    await agent.acknowledged(1)
    asked = ["status", "--coordinator", guarded.program.address]
    done = run(*asked, "--token-file", str(guarded.token_file))
    assert done.returncode == 0, done.stderr
    assert run(*asked, NVRX_TOKEN_FILE=str(guarded.token_file)).returncode == 0
    denied = run(*asked)
    assert denied.returncode == 1
    assert denied.stderr == (
        "nvrx-coord: no token came with the call; give the coordinator's token with --token-file\n"
    )
    await remote.channel.close()


@pytest.mark.rule("J2")
def test_nobody_prints_the_token(guarded: Guarded) -> None:
    listed = subprocess.run(
        ["ps", "-ww", "-o", "args=", "-p", str(guarded.program.process.pid)], capture_output=True, check=True
    )
    assert b"serve" in listed.stdout
    assert SECRET.encode() not in listed.stdout
    environment = Path(f"/proc/{guarded.program.process.pid}/environ").read_bytes()
    assert SECRET.encode() not in environment
    guarded.program.end()
    said = "\n".join([*guarded.program.out, *guarded.program.err])
    assert SECRET not in said
    assert "refused" in said or "joined" in said
