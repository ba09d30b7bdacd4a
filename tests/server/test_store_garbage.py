"""Whatever is thrown at a store's port, memory stays bounded and others are served (rule J4)."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx.store.codec import i64, text, u64
from nvrx.store.opcodes import MAX_VALUE_BYTES, Opcode

from .store_programs import HELLO, MIB, WAIT_S, StoreProgram, StoreSocket, store_program, until

pytestmark = pytest.mark.rule("J4")


def tls_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    hello = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        hello.do_handshake()
    return outgoing.read()


GARBAGE = {
    "http": b"GET / HTTP/1.0\r\n\r\n",
    "random": b"\x80" + random.Random(7).randbytes(63),
    "tls": tls_hello(),
    "zeros": bytes(32),
    "no greeting": bytes([Opcode.SET]) + text(b"k") + text(b"v"),
    "a huge value": HELLO + bytes([Opcode.SET]) + text(b"k") + u64(2**60),
    "a negative length": HELLO + bytes([Opcode.GET]) + i64(-1),
    "a huge count": HELLO + bytes([Opcode.WAIT]) + u64(2**62),
    "greeting twice": HELLO + HELLO,
    "an opcode to come": HELLO + bytes([19]),
    "text plus one": HELLO + bytes([Opcode.SET]) + text(b"k") + text(b"x") + bytes([Opcode.ADD]) + text(b"k") + i64(1),
}


@pytest.fixture(scope="module")
def module_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProgram]:
    with store_program(tmp_path_factory.mktemp("store") / "run") as program:
        program.control()
        yield program


@pytest.fixture
def store(module_store: StoreProgram) -> Iterator[StoreProgram]:
    yield module_store
    assert not module_store.is_gone()
    assert not module_store.lines("Traceback")


def connect(store: StoreProgram) -> socket.socket:
    return socket.create_connection((store.host, store.record.lasting_port), timeout=WAIT_S)


def is_cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("kind", list(GARBAGE))
def test_garbage_is_cut_off_with_one_line_each(store: StoreProgram, kind: str) -> None:
    before = len(store.lines("cut off"))
    for _ in range(5):
        with connect(store) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(GARBAGE[kind])
            assert is_cut(connection)
    store.lasting().set(b"/after", b"x")
    lines = store.wait_for_lines("cut off", before + 5)
    assert len(lines) == before + 5
    assert all(len(line) < 300 for line in lines)


def test_a_port_scan_costs_little(store: StoreProgram) -> None:
    store.lasting().ping()
    store.forget_peak()
    before = store.resident_mib()
    with contextlib.ExitStack() as opened:
        for number in range(500):
            connection = opened.enter_context(connect(store))
            if number % 5 == 1:
                connection.sendall(HELLO)
            if number % 5 == 2:
                connection.sendall(HELLO + bytes([Opcode.SET]) + text(b"k")[:-1])
            if number % 5 == 3:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(list(GARBAGE.values())[number % len(GARBAGE)])
        client = store.lasting()
        client.set(b"/k", b"v")
        assert client.get(b"/k") == b"v"
        assert store.resident_mib(peak=True) - before < 50


def test_what_was_asked_before_the_garbage_is_answered(store: StoreProgram) -> None:
    client = store.lasting()
    client.send(bytes([Opcode.PING]) + b"1234" + bytes([Opcode.PING]) + b"5678" + b"\xff")
    assert client.read(9) == b"12345678"


def test_one_that_is_cut_off_breaks_no_other(store: StoreProgram) -> None:
    """Also one who waits for the same key, and has already gone as it comes."""
    stays, goes, cut = store.lasting(), store.lasting(), store.lasting()
    for client in (goes, cut, stays):
        client.begin_wait(b"/awaited")
    goes.close()
    cut.send(b"\xff")
    assert cut.read(1) == b""
    other = store.lasting()
    other.set(b"/awaited", b"")
    assert stays.read(1) == b"\0"
    other.ping()


def test_many_waiters_are_woken_once_each(store: StoreProgram) -> None:
    waiters = [store.lasting() for _ in range(200)]
    for waiter in waiters:
        waiter.begin_wait(b"/many")
    store.lasting().set(b"/many", b"")
    for waiter in waiters:
        assert waiter.read(1) == b"\0"
    store.lasting().set(b"/many", b"")
    for waiter in waiters:
        waiter.ping()


def test_one_that_does_not_read_holds_little_and_delays_nobody(store: StoreProgram) -> None:
    count = 20
    client = store.lasting()
    client.set(b"/large", bytes(MAX_VALUE_BYTES))
    assert len(client.get(b"/large")) == MAX_VALUE_BYTES
    store.forget_peak()
    before = store.resident_mib()
    slow = store.lasting()
    slow.send((bytes([Opcode.GET]) + text(b"/large")) * count + bytes([Opcode.SET]) + text(b"/done") + text(b"yes"))
    for number in range(200):
        assert client.add(b"/n", 1) == number + 1
    assert client.get(b"/done") == b""  # its commands wait until it reads
    assert store.resident_mib(peak=True) - before < 8 * MAX_VALUE_BYTES / MIB
    for _ in range(count):
        assert len(slow.read_text()) == MAX_VALUE_BYTES
    until(lambda: client.get(b"/done") == b"yes")
    slow.ping()
    assert store.resident_mib(peak=True) - before < 8 * MAX_VALUE_BYTES / MIB


def test_one_that_goes_without_reading_leaves_nothing(store: StoreProgram) -> None:
    control = store.control()
    (port,) = control.open()
    client = StoreSocket(store.host, port)
    client.set(b"large", bytes(MAX_VALUE_BYTES))
    client.ping()
    for last in (b"", b"\xff"):
        slow = StoreSocket(store.host, port)
        slow.send((bytes([Opcode.GET]) + text(b"large")) * 20 + last)
        client.ping()
        assert control.clients_of(port) == 2
        slow.close()
        until(lambda: control.clients_of(port) == 1)
    control.ask(do="close", ports=[port])


def test_a_small_command_in_many_pieces(store: StoreProgram) -> None:
    slow = store.lasting()
    for byte in bytes([Opcode.SET]) + text(b"/pieces") + text(b"value") + bytes([Opcode.PING]) + b"done":
        slow.send(bytes([byte]))
    assert slow.read(4) == b"done"
    assert slow.get(b"/pieces") == b"value"


def test_it_survives_running_out_of_descriptors(tmp_path: Path) -> None:
    with store_program(tmp_path / "run") as store:
        control = store.control()
        client = store.lasting()
        store.limit_descriptors(12)
        with contextlib.ExitStack() as opened:
            for _ in range(100):
                with contextlib.suppress(OSError):
                    opened.enter_context(connect(store)).sendall(HELLO)
            client.set(b"/k", b"v")
            assert client.get(b"/k") == b"v"
            answer = control.ask(do="open", count=1)
            assert not answer["ok"]
            assert "Too many open files" in answer["error"]
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as stray:
                stray.connect(str(store.paths.socket))
        deadline = time.monotonic() + WAIT_S
        while True:  # until it has noticed that they are gone
            try:
                late = store.lasting()
            except OSError:
                assert time.monotonic() < deadline
            else:
                break
        assert late.get(b"/k") == b"v"
        (port,) = control.open()
        StoreSocket(store.host, port).ping()
        assert store.control().ask(do="state")["ok"]
        assert not store.lines("Traceback")
        assert len(store.err) < 20
