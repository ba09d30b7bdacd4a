"""The store process with torch's own server in the place of ours (`--store torch`)."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx.server.store_host.torch_server import TorchServer

from .store_programs import StoreProgram, StoreSocket, is_held, is_refused, store_program, until


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProgram]:
    scratch = tmp_path_factory.mktemp("torch")
    wrapped = [sys.executable, "-m", "tests.e2e.files_only", str(scratch)]
    with store_program(scratch / "run", "--linger-s", "0.05", kind="torch", wrapped=wrapped) as program:
        program.control()
        yield program


@pytest.mark.torch
@pytest.mark.rule("I1", "I2")
def test_closing_a_port_cuts_its_clients_off_and_frees_it(store: StoreProgram) -> None:
    control = store.control()
    first, second = control.open(2)
    clients = [StoreSocket("127.0.0.1", first) for _ in range(3)]
    clients[0].begin_wait(b"k")
    other = StoreSocket("127.0.0.1", second)
    other.add(b"n", 1)
    until(lambda: control.clients_of(first) == 3)
    assert control.ask(do="close", ports=[first])["ports"] == {str(second): 1}
    assert [client.read(1) for client in clients] == [b""] * 3
    assert is_refused("127.0.0.1", first)
    assert is_held(first)
    assert other.add(b"n", 1) == 2
    assert first not in control.open(3)


@pytest.mark.torch
@pytest.mark.rule("I3", "I6")
def test_the_coordinator_reaches_the_lasting_store_over_its_socket(store: StoreProgram) -> None:
    lasting = store.lasting()
    lasting.begin_wait(b"/nvrx/k")
    relayed = StoreSocket.over(store.control())
    relayed.set(b"/nvrx/k", b"v" * 1_000_000)
    assert lasting.read(1) == b"\0"
    assert relayed.get(b"/nvrx/k") == b"v" * 1_000_000
    relayed.send(b"\xff")  # torch cuts it off, and so does the relay
    assert relayed.read(1) == b""
    assert store.lasting().get(b"/nvrx/k") == b"v" * 1_000_000
    assert store.control().ask(do="state")["ok"]


@pytest.mark.torch
def test_nothing_is_left_behind(store: StoreProgram) -> None:
    control = store.control()

    def threads() -> int:
        return len(list(Path(f"/proc/{store.process.pid}/task").iterdir()))

    before, held = threads(), store.descriptors()
    for _ in range(5):
        (port,) = control.open()
        StoreSocket("127.0.0.1", port).close()
        control.ask(do="close", ports=[port])
    assert threads() <= before + 1
    assert store.descriptors() <= held + 5  # the ports that are kept from others


@pytest.mark.torch
@pytest.mark.rule("I6")
def test_last_of_all_it_ends(store: StoreProgram) -> None:
    (port,) = store.control().open()
    client = StoreSocket("127.0.0.1", port)
    StoreSocket.over(store.control())
    store.process.send_signal(signal.SIGTERM)
    assert store.wait() == 0
    assert client.read(1) == b""
    assert list(store.paths.directory.iterdir()) == []
    assert not store.lines("Traceback")


async def test_its_server_is_stopped_by_another_thread() -> None:
    """Which takes a while: the last reference to torch's object must not go on the loop."""
    stopped_by: list[int] = []

    class Store:
        def __del__(self) -> None:
            stopped_by.append(threading.get_ident())

    await TorchServer(Store(), "127.0.0.1", 1).close()
    assert len(stopped_by) == 1
    assert stopped_by[0] != threading.get_ident()


def test_without_torch_it_says_so_in_one_line(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('torch is not\\nhere')")
    program = StoreProgram(tmp_path / "run", kind="torch", PYTHONPATH=str(tmp_path))
    try:
        line = program.first_line()
        assert line.startswith("failed torch's store does not start on 127.0.0.1:")
        assert line.endswith(": torch is not\n")
        assert program.wait() == 1
        assert program.err == []
    finally:
        program.end()
