"""The store process by itself: its start, its record, its control socket, its ports, and when it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx.server.store_host.control import MAX_LINE_BYTES, VERSION, Record, write_record

from .store_programs import (
    COMMAND,
    WAIT_S,
    Control,
    StoreProgram,
    StoreSocket,
    free_ports,
    is_held,
    is_refused,
    needs_ipv6,
    store_program,
    until,
)

QUICK = ("--linger-s", "0.05")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def store(directory: Path) -> Iterator[StoreProgram]:
    """A process of the test's own, to be ended."""
    with store_program(directory) as program:
        yield program


@pytest.fixture(scope="module")
def module_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreProgram]:
    with store_program(tmp_path_factory.mktemp("shared") / "run") as program:
        yield program


@pytest.fixture
def shared(module_store: StoreProgram) -> Iterator[StoreProgram]:
    """A process that the next test uses, too: without open ports before and after."""
    yield module_store
    for control in module_store.controls:
        control.close()
    module_store.controls.clear()
    last = module_store.control()
    last.ask(do="close", ports=[int(port) for port in last.ask(do="state")["ports"]])


# ---- start ------------------------------------------------------------------------------------------------


@pytest.mark.rule("I6")
def test_the_record_names_it_and_is_for_its_user_alone(shared: StoreProgram) -> None:
    record = shared.record
    assert (record.kind, record.pid, record.host) == ("bridge", shared.process.pid, "127.0.0.1")
    assert len(record.secret) == 64
    assert shared.paths.record.stat().st_mode & 0o777 == 0o600
    directory = shared.paths.directory
    assert directory.stat().st_mode & 0o777 == 0o700
    assert sorted(path.name for path in directory.iterdir()) == ["store-test.json", "store-test.sock"]
    shared.lasting().set(b"/k", b"v")
    assert shared.lasting().get(b"/k") == b"v"
    shared.wait_for_lines(f"serves the lasting store on 127.0.0.1:{record.lasting_port}")
    assert not shared.lines(record.secret)
    assert record.secret not in Path(f"/proc/{record.pid}/cmdline").read_text()


@pytest.mark.rule("I6")
def test_a_taken_port_is_one_line_with_host_and_port(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--kind", "bridge", "--host", "127.0.0.1", "--directory", str(directory), "--key", "test"]
        done = subprocess.run(
            [*COMMAND, *options, "--lasting-port", str(port)],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        f"failed cannot listen on 127.0.0.1:{port} for the store: Address already in use; "
        "give another with --store-port"
    ]
    assert done.stderr == ""
    assert list(directory.iterdir()) == []


def test_a_host_that_is_not_ours_or_unknown_is_one_line(directory: Path) -> None:
    for host in ("192.0.2.1", "no such host"):
        program = StoreProgram(directory, host=host)
        try:
            line = program.first_line()
            assert line.startswith("failed ")
            assert host in line
            assert program.wait() == 1
            assert program.err == []
        finally:
            program.end()


@needs_ipv6
def test_ipv6(directory: Path) -> None:
    with store_program(directory, host="::1") as store:
        store.lasting().set(b"/k", b"v")
        assert store.lasting().get(b"/k") == b"v"
        (port,) = store.control().open()
        assert StoreSocket("::1", port).add(b"n", 2) == 2


@needs_ipv6
def test_both_ip_versions(directory: Path) -> None:
    with store_program(directory, host="::") as store:
        (port,) = store.control().open()
        for one in (port, store.record.lasting_port):
            StoreSocket("::1", one).add(b"n", 1)
            assert StoreSocket("127.0.0.1", one).add(b"n", 1) == 2


# ---- the control socket -----------------------------------------------------------------------------------


@pytest.mark.rule("I6")
def test_without_the_secret_nobody_is_answered(shared: StoreProgram) -> None:
    before = len(shared.lines("does not know"))
    hellos = [
        b"{}",
        b'{"secret":""}',
        b'{"secret":null}',
        b'{"secret":["x"]}',
        json.dumps({"secret": "0" * 64}).encode(),
        json.dumps({"secret": shared.record.secret[:-1]}).encode(),
        json.dumps({"secret": shared.record.secret.upper() + "x"}).encode(),
        '{"secret":"é"}'.encode(),
        b'{"secret":"\\ud800"}',
        b"[1]",
        b"nonsense",
        b"\xff\xfe",
        b'{"a":' * 50_000,
        b"[" * 200_000,
        b'{"do":"state"}',
        b"9" * 10_000,
    ]
    for hello in hellos:
        control = Control(shared.paths)
        control.send(hello + b"\n")
        assert control.answer() is None, hello[:40]
        control.close()
    lines = shared.wait_for_lines("does not know the secret", before + len(hellos))
    assert len(lines) == before + len(hellos)
    assert not shared.lines("Traceback")
    assert shared.control().ask(do="state")["ports"] == {}


@pytest.mark.rule("J4")
def test_a_line_without_an_end_is_cut(shared: StoreProgram) -> None:
    shared.forget_peak()
    before = shared.resident_mib()
    control = Control(shared.paths)
    try:
        for _ in range(64):
            control.send(b"x" * MAX_LINE_BYTES)
    except ConnectionError:
        pass
    assert control.answer() is None
    assert shared.resident_mib(peak=True) - before < 20
    shared.control()


def test_one_that_says_nothing_is_let_go(directory: Path) -> None:
    with store_program(directory, "--hello-within-s", "0.05") as store:
        silent = [Control(store.paths) for _ in range(3)]
        silent[1].send(b'{"secret":')
        assert [one.answer() for one in silent] == [None] * 3
        assert store.control().ask(do="state")["ok"]
        for one in silent:
            one.close()


@pytest.mark.rule("I6")
def test_a_stray_connection_does_not_end_a_process_that_waits_for_its_coordinator(shared: StoreProgram) -> None:
    for _ in range(3):
        stray = Control(shared.paths)
        stray.send(b"nonsense\n")
        assert stray.answer() is None
        stray.close()
        shared.lasting().ping()
    assert shared.control().ask(do="state")["ok"]


def test_what_it_does_not_understand_is_an_error_and_no_end(shared: StoreProgram) -> None:
    control = shared.control()
    for message in (
        {"do": "dance"},
        {},
        {"do": ["open"]},
        {"do": "open"},
        {"do": "open", "count": 0},
        {"do": "open", "count": -1},
        {"do": "open", "count": 65},
        {"do": "open", "count": "1"},
        {"do": "open", "count": 1.0},
        {"do": "close"},
        {"do": "close", "ports": 7},
    ):
        answer = control.ask(**message)
        assert not answer["ok"]
        assert "unknown request" in answer["error"]
        assert len(answer["error"]) < 200
    assert control.ask(do="close", ports=[0, -1, "7", None, [], {}, 10**30])["ok"]
    assert control.ask(do="state")["ports"] == {}
    control.send(b"nonsense\n")
    assert control.answer() is None


@pytest.mark.rule("I6")
def test_another_coordinator_takes_over_and_clients_stay(shared: StoreProgram) -> None:
    first = shared.control()
    (port,) = first.open()
    worker = StoreSocket("127.0.0.1", port)
    worker.begin_wait(b"k")
    lasting = shared.lasting()
    lasting.begin_wait(b"/nvrx/a/cycle")
    second = Control(shared.paths)
    state = second.ask(secret=shared.record.secret)
    assert state == {"ok": True, "lasting_port": shared.record.lasting_port, "ports": {str(port): 1}}
    first.close()
    privileged = shared.control()
    StoreSocket.over(privileged).set(b"/nvrx/a/cycle", b"1")
    assert lasting.read(1) == b"\0"
    assert lasting.get(b"/nvrx/a/cycle") == b"1"
    StoreSocket("127.0.0.1", port).set(b"k", b"")
    assert worker.read(1) == b"\0"
    assert second.ask(do="close", ports=[port])["ports"] == {}
    assert worker.read(1) == b""
    second.close()


@pytest.mark.rule("I3")
def test_only_over_the_control_socket_are_the_coordinators_keys_written(shared: StoreProgram) -> None:
    lasting = shared.lasting()
    lasting.set(b"/nvrx/k", b"forged")
    assert lasting.read(1) == b""
    assert "read-only" in shared.wait_for_lines("cut off")[0]
    lasting = shared.lasting()
    assert lasting.get(b"/nvrx/k") == b""
    privileged = StoreSocket.over(shared.control())
    privileged.set(b"/nvrx/k", b"true")
    privileged.ping()
    assert lasting.get(b"/nvrx/k") == b"true"
    privileged.send(b"\xff")
    assert privileged.read(1) == b""
    shared.wait_for_lines("cut off a coordinator")
    (port,) = shared.control().open()
    one = StoreSocket("127.0.0.1", port)
    one.set(b"/nvrx/k", b"a cycle's store is its workers'")
    one.ping()


# ---- ports ------------------------------------------------------------------------------------------------


@pytest.mark.rule("I2")
def test_each_cycle_has_a_store_and_a_port_of_its_own(shared: StoreProgram) -> None:
    control = shared.control()
    ports = control.open(64)
    assert len({*ports, shared.record.lasting_port}) == 65
    for number, port in enumerate(ports):
        StoreSocket("127.0.0.1", port).add(b"n", number)
    assert [StoreSocket("127.0.0.1", port).add(b"n", 0) for port in ports] == list(range(64))
    assert set(control.ask(do="state")["ports"]) == set(map(str, ports))


@pytest.mark.rule("I2")
def test_a_closed_port_cuts_its_clients_off_and_is_nobodys(shared: StoreProgram) -> None:
    control = shared.control()
    first, second = control.open(2)
    clients = [StoreSocket("127.0.0.1", first) for _ in range(5)]
    clients[0].begin_wait(b"k")
    other = StoreSocket("127.0.0.1", second)
    until(lambda: control.clients_of(first) == 5)
    assert control.ask(do="close", ports=[first, first]) == {
        "ok": True,
        "lasting_port": shared.record.lasting_port,
        "ports": {str(second): 1},
    }
    assert [client.read(1) for client in clients] == [b""] * 5
    shared.wait_for_lines(f"closed port {first} with 5 clients")
    assert is_refused("127.0.0.1", first)
    assert is_held(first)
    assert first not in control.open(60)
    other.ping()


@pytest.mark.rule("I2")
def test_ports_of_a_range_are_used_again_only_when_all_are_used_up(directory: Path) -> None:
    low = free_ports(4)
    with store_program(directory, "--cycle-ports", str(low), str(low + 3)) as store:
        control = store.control()
        assert control.open(3) == [low, low + 1, low + 2]
        control.ask(do="close", ports=[low + 1])
        control.ask(do="close", ports=[low])
        assert control.open() == [low + 3]
        assert is_refused("127.0.0.1", low)
        assert is_held(low)
        assert control.open() == [low + 1]  # the one that was closed first
        assert is_refused("127.0.0.1", low)
        assert is_held(low)
        assert control.open(2) == [low]  # and no more
        StoreSocket("127.0.0.1", low).ping()
        answer = control.ask(do="open", count=1)
        assert not answer["ok"]
        assert answer["error"] == (
            f"every port of --store-ports {low}-{low + 3} on 127.0.0.1 is taken; give a wider range"
        )
        control.ask(do="close", ports=[low + 2])
        assert control.open() == [low + 2]


@pytest.mark.rule("I2")
def test_a_port_of_the_range_that_another_has_is_left_out(directory: Path) -> None:
    low = free_ports(3)
    with (
        store_program(directory, "--cycle-ports", str(low), str(low + 2)) as store,
        socket.create_server(("127.0.0.1", low + 1)),
    ):
        assert store.control().open(3) == [low, low + 2]


@pytest.mark.rule("I2", "I6")
def test_a_coordinator_that_takes_over_may_name_another_range(directory: Path) -> None:
    low = free_ports(6)
    with store_program(directory, "--cycle-ports", str(low), str(low + 1)) as store:
        control = store.control()
        assert control.open(2) == [low, low + 1]
        control.ask(do="close", ports=[low + 1])
        assert control.ask(do="range", low=low + 2, high=low + 3)["ok"]
        assert control.open(3) == [low + 2, low + 3]  # and not the one that was closed
        StoreSocket("127.0.0.1", low).ping()
        assert control.ask(do="range", low=low + 2, high=low + 5)["ok"]
        assert control.open(3) == [low + 4, low + 5]
        assert control.ask(do="range", low=None, high=None)["ok"]
        assert len(control.open(2)) == 2


@pytest.mark.rule("J4")
def test_no_descriptor_is_left_behind(directory: Path) -> None:
    low = free_ports(3)
    with store_program(directory, "--cycle-ports", str(low), str(low + 2)) as store:
        control = store.control()

        def rounds(count: int) -> int:
            for _ in range(count):
                (port,) = control.open()
                client = StoreSocket("127.0.0.1", port)
                control.ask(do="close", ports=[port])
                assert client.read(1) == b""
                client.close()
            other = store.control()
            other.close()
            store.controls.remove(other)
            control.ask(do="state")
            return store.descriptors()

        before = rounds(10)
        assert rounds(200) <= before + 1


def test_ports_that_are_kept_from_others_are_bounded(directory: Path) -> None:
    with store_program(directory) as store:
        control = store.control()
        seen: set[int] = set()
        for _ in range(10):
            ports = control.open(64)
            assert not seen & set(ports) or len(seen) > 256
            seen |= set(ports)
            control.ask(do="close", ports=ports)
        assert store.descriptors() < 256 + 40


# ---- its end ----------------------------------------------------------------------------------------------


def ended_well(store: StoreProgram) -> None:
    assert store.wait() == 0
    assert list(store.paths.directory.iterdir()) == []
    assert not store.lines("Traceback")


@pytest.mark.rule("I6")
def test_it_ends_when_told_to_and_nobody_is_left(store: StoreProgram) -> None:
    control = store.control()
    control.open(2)
    store.lasting()
    assert control.ask(do="end")["ok"]
    control.ask(do="state")
    control.close()
    ended_well(store)
    assert store.lines("the coordinator ended")


@pytest.mark.rule("I6")
@pytest.mark.parametrize("told", [False, True])
def test_it_stays_for_the_clients_of_a_cycle(directory: Path, told: bool) -> None:
    with store_program(directory, *QUICK) as store:
        control = store.control()
        (port,) = control.open()
        worker, other = StoreSocket("127.0.0.1", port), StoreSocket("127.0.0.1", port)
        if told:
            control.ask(do="end")
        control.close()
        other.close()
        enough = time.monotonic() + 10 * 0.05
        while time.monotonic() < enough:
            worker.ping()
        late = store.control()
        assert late.ask(do="state")["ports"] == {str(port): 1}
        late.close()
        worker.ping()
        worker.close()
        ended_well(store)


@pytest.mark.rule("I6")
def test_it_ends_when_its_coordinator_died(directory: Path) -> None:
    with store_program(directory, *QUICK) as store:
        control = store.control()
        control.open()
        lasting = store.lasting()
        control.close()
        ended_well(store)
        assert lasting.read(1) == b""
        assert store.lines("neither a coordinator nor a client came for 0.05 s")


def test_it_ends_when_no_coordinator_comes(directory: Path) -> None:
    with store_program(directory, *QUICK) as store:
        ended_well(store)


def test_a_coordinator_that_comes_back_is_why_it_stays(store: StoreProgram) -> None:
    first = store.control()
    first.ask(do="end")
    second = store.control()
    first.close()
    assert second.ask(do="state")["ok"]
    second.ask(do="end")
    second.close()
    ended_well(store)


@pytest.mark.rule("I6")
@pytest.mark.parametrize("busy", [False, True])
def test_sigterm_ends_it_at_once(store: StoreProgram, busy: bool) -> None:
    if busy:
        control = store.control()
        (port,) = control.open()
        client = StoreSocket("127.0.0.1", port)
        client.begin_wait(b"k")
        StoreSocket.over(store.control())
    store.process.send_signal(signal.SIGTERM)
    ended_well(store)


def test_a_terminals_signals_are_the_coordinators(shared: StoreProgram) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        shared.process.send_signal(number)
    shared.lasting().ping()
    assert not shared.is_gone()


def test_another_that_took_its_place_keeps_its_record(store: StoreProgram) -> None:
    own = store.record
    other = Record(VERSION, "bridge", own.pid, "another secret", own.host, own.lasting_port)
    write_record(store.paths, other)
    store.process.send_signal(signal.SIGTERM)
    assert store.wait() == 0
    assert store.record == other
    assert store.paths.socket.exists()
