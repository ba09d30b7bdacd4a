"""Whatever is thrown at the port, the coordinator answers on and takes no large memory for it (rule J4)."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from nvrx.core.endpoint import parse_endpoint
from nvrx.server.services.store import MAX_REQUEST_BYTES
from nvrx.v1 import join_pb2

from .coordination import HandAgent, Remote
from .programs import Program, coordinator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
GARBAGE = {
    "http": b"GET / HTTP/1.0\r\n\r\n",
    "zeros": bytes(64),
    "random": random.Random(7).randbytes(64 * 1024),
    "preface and no more": PREFACE,
    "preface and a huge frame": PREFACE + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(4096),
    "preface and random": PREFACE + random.Random(8).randbytes(64 * 1024),
    "nothing": b"",
}


@pytest.fixture(scope="module")
def program() -> Iterator[Program]:
    with coordinator() as program:
        yield program


def connect(program: Program) -> socket.socket:
    where = parse_endpoint(program.address)
    return socket.create_connection((where.host, where.port), timeout=10)


def resident_mib(program: Program) -> float:
    pages = int(Path(f"/proc/{program.process.pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


async def answers(program: Program, node_id: str) -> None:
    """A node joins, opens a stream and is heard."""
    remote = Remote(program.address)
    agent = await HandAgent(remote, node_id, nnodes=(2, 1000)).enter()
    await agent.acknowledged(await agent.say())
    await remote.channel.close()


@pytest.mark.rule("J4")
@pytest.mark.parametrize("kind", list(GARBAGE))
async def test_garbage_leaves_it_answering(program: Program, kind: str) -> None:
    with contextlib.ExitStack() as open_ones:
        for _ in range(5):
            connection = open_ones.enter_context(connect(program))
            with contextlib.suppress(OSError):
                connection.sendall(GARBAGE[kind])
        await answers(program, f"n{list(GARBAGE).index(kind)}")
    assert program.process.poll() is None


@pytest.mark.rule("J4")
async def test_a_tls_hello_leaves_it_answering(program: Program) -> None:
    context = ssl.create_default_context()
    with connect(program) as connection:
        outgoing = ssl.MemoryBIO()
        hello = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
        with pytest.raises(ssl.SSLWantReadError):
            hello.do_handshake()
        connection.sendall(outgoing.read())
        await answers(program, "n100")


@pytest.mark.rule("J4", "J5")
async def test_idle_connections_leave_it_answering_and_small(program: Program) -> None:
    await answers(program, "n101")
    before = resident_mib(program)
    with contextlib.ExitStack() as open_ones:
        for number in range(200):
            connection = open_ones.enter_context(connect(program))
            if number % 2:
                connection.sendall(PREFACE)
        await answers(program, "n102")
        assert resident_mib(program) - before < 50


@pytest.mark.rule("J4")
async def test_a_message_that_is_too_large_is_refused_and_costs_no_other(program: Program) -> None:
    remote = Remote(program.address)
    with pytest.raises(grpc.aio.AioRpcError) as seen:
        await remote.joins.Join(join_pb2.JoinRequest(node_id="x" * (MAX_REQUEST_BYTES + 1)), timeout=20)
    assert seen.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    raw: Any = remote.channel.unary_unary("/nvrx.v1.JoinService/Join")
    with pytest.raises(grpc.aio.AioRpcError) as seen:
        await raw(b"\xff\xff\xff garbage", timeout=20)
    assert "Traceback" not in str(seen.value.details())
    await remote.channel.close()
    await answers(program, "n103")


@pytest.mark.rule("J4")
async def test_its_log_stayed_small_and_one_line_per_event(program: Program) -> None:
    assert program.end() == 0
    assert all(line[:4].isdigit() for line in program.err)
    assert len(program.err) < 100
    # gRPC itself logs where a request cannot be parsed.
    assert not [line for line in program.err if "Traceback" in line and "DecodeError" not in line]
