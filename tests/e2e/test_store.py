"""The store that workers meet in: one per cycle, outside coordinator and agents, and outliving both."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from nvrx.v1 import common_pb2

from .cluster import Cluster, worker_script
from .hall import Worker
from .programs import COORDINATOR

KEYS = worker_script("keys")
TWO = ("--nnodes", "2", "--max-restarts", "5")
_ids = itertools.count()


def ask(worker: Worker, call: str, *args: Any, where: str = "cycle") -> Any:
    """Have a worker call its client of a store; what that answered."""
    number = next(_ids)
    worker.tell("store", id=number, where=where, call=call, args=list(args))
    return worker.said(f"answer {number}")["answer"]


def store_pid(cluster: Cluster) -> int:
    """The process that serves the stores of this cluster."""
    (record,) = Path(cluster.directory, f"nvrx-{os.getuid()}").glob("store-*.json")
    return int(json.loads(record.read_text())["pid"])


def is_refused(worker: Worker) -> bool | None:
    """Whether nobody listens at the store that a worker was told of."""
    try:
        socket.create_connection((worker.env["MASTER_ADDR"], int(worker.env["MASTER_PORT"]))).close()
    except ConnectionRefusedError:
        return True
    return None


@pytest.mark.rule("I2", "I1", "G1")
def test_a_cycle_does_not_see_the_keys_of_the_one_before(cluster: Cluster) -> None:
    """C096: each cycle has a store of its own on a port of its own; that of a failed one is closed."""
    cluster.serve()
    cluster.join_all("a b", *TWO, command=KEYS)
    old = cluster.workers(0, 2)
    ask(old[0], "set", "uid", "old")
    assert ask(old[1], "get", "uid") == "old"
    old[1].tell("exit", code=1)
    new = cluster.workers(1, 2)
    assert ask(new[0], "check", ["uid"]) is False
    ask(new[1], "set", "uid", "new")
    assert ask(new[0], "get", "uid") == "new"
    assert len({one.env["MASTER_PORT"] for one in old + new}) == 2
    assert len({one.env["NVRX_STORE_ENDPOINT"] for one in old + new}) == 1
    assert {one.env["TORCHELASTIC_USE_AGENT_STORE"] for one in old + new} == {"True"}
    cluster.board.until(lambda: is_refused(old[0]), "the store of cycle 0 to be closed")


@pytest.mark.rule("I6", "E5")
def test_stores_and_their_connections_outlive_the_coordinator(cluster: Cluster) -> None:
    """Workers go on talking through a killed coordinator; the next one takes the store process over."""
    coordinator = cluster.serve()
    cluster.join_all("a b", *TWO, command=KEYS)
    a, b = cluster.workers(0, 2)
    ask(a, "set", "before", "1")
    ask(a, "set", "runs/run/mine", "lasting", where="lasting")
    pid = store_pid(cluster)
    coordinator.send(signal.SIGKILL)
    coordinator.ended()
    assert ask(b, "get", "before") == "1"
    ask(b, "set", "meanwhile", "2")
    assert ask(a, "get", "meanwhile") == "2"
    back = cluster.serve(listen=cluster.address)
    back.said(f"took over the store process {pid} with")
    cluster.board.until(lambda: all(one.connected for one in cluster.nodes().values()) or None, "all to be back")
    assert ask(a, "get", "meanwhile") == "2"
    assert not cluster.find("CycleEnded")
    a.tell("exit", code=1)
    new = cluster.workers(1, 2)
    assert ask(new[0], "check", ["before"]) is False
    assert ask(new[1], "get", "runs/run/mine", where="lasting") == "lasting"
    assert store_pid(cluster) == pid
    assert cluster.rank_map(0).failure.cause == common_pb2.CAUSE_WORKER_FAILED


@pytest.mark.rule("I6", "D5")
def test_a_killed_store_process_costs_no_restart(cluster: Cluster) -> None:
    """Who does not need the store trains on; who fails for want of it ends the cycle as `store lost`, uncharged."""
    coordinator = cluster.serve()
    cluster.join_all("a b", "--nnodes", "2", "--max-restarts", "1", command=KEYS)
    a, b = cluster.workers(0, 2)
    for one in (a, b):
        one.said("ready")
    pid = store_pid(cluster)
    os.kill(pid, signal.SIGKILL)
    assert ask(a, "add", "n", 1).startswith("gone")
    coordinator.said(f"the store process {pid} is gone")
    coordinator.said(f"takes the place of {pid}")
    assert store_pid(cluster) != pid
    assert not cluster.find("CycleEnded")
    b.tell("exit", code=1)
    new = cluster.workers(1, 2)
    assert ask(new[0], "add", "n", 1) == 1
    assert ask(new[1], "add", "n", 1) == 2
    failure = cluster.rank_map(0).failure
    assert (failure.cause, failure.node_id, failure.exit_code) == (common_pb2.CAUSE_STORE_LOST, "b", 1)
    assert cluster.run().restarts_used == 0
    assert {one.env["NVRX_STORE_ENDPOINT"] for one in new} == {a.env["NVRX_STORE_ENDPOINT"]}


@pytest.mark.rule("I2")
def test_the_store_is_there_until_the_last_node_has_ended(cluster: Cluster) -> None:
    """C101: rank 0's node is done long before the others, who still read a key."""
    cluster.serve()
    agents = cluster.join_all("a b", *TWO, command=KEYS)
    a, b = cluster.workers(0, 2)
    ask(a, "set", "last", "words")
    a.tell("exit", code=0)
    a.ended()
    cluster.wait_for("WorkersExited", 0, "a")
    assert ask(b, "get", "last") == "words"
    b.tell("exit", code=0)
    assert [one.ended() for one in agents] == [0, 0]
    cluster.board.until(lambda: is_refused(b), "the store of the cycle to be closed")


@pytest.mark.rule("I1")
def test_a_taken_store_port(cluster: Cluster) -> None:
    """C097: one line with host and port, exit code 2, and nothing is left behind."""
    with socket.socket() as other, socket.socket() as free:
        other.bind(("127.0.0.1", 0))
        other.listen()
        free.bind(("127.0.0.1", 0))
        taken, listen = other.getsockname()[1], free.getsockname()[1]
        free.close()
        argv = [*COORDINATOR, "serve", "--state", "memory", "--listen", f"127.0.0.1:{listen}"]
        program = cluster.start("coordinator", [*argv, "--store-port", str(taken)])
        assert program.ended() == 2
        assert program.out == []
        assert f"127.0.0.1:{taken}" in program.err[-1]
        assert "--store-port" in program.err[-1]
        with socket.socket() as again:
            again.bind(("127.0.0.1", listen))


@pytest.mark.rule("I2")
def test_ports_from_a_range(cluster: Cluster) -> None:
    """Four ports are enough for any number of cycles: what is closed comes round again."""
    first = _free_range(4)
    cluster.serve("--store-ports", f"{first}-{first + 3}")
    cluster.join_all("a", "--nnodes", "1", "--max-restarts", "9", command=KEYS)
    ports = []
    for cycle in range(7):
        worker = cluster.worker("a", cycle)
        assert ask(worker, "add", "n", 1) == 1
        ports.append(int(worker.env["MASTER_PORT"]))
        worker.tell("exit", code=1)
    assert set(ports) <= set(range(first, first + 4))
    assert all(one != other for one, other in itertools.pairwise(ports))


def _free_range(count: int) -> int:
    for first in range(20000, 30000, 10):
        with _holding(range(first, first + count)) as free:
            if free:
                return first
    raise AssertionError("no free ports")


class _holding:
    def __init__(self, ports: range) -> None:
        self._ports = ports
        self._held: list[socket.socket] = []

    def __enter__(self) -> bool:
        for port in self._ports:
            one = socket.socket()
            self._held.append(one)
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                return False
        return True

    def __exit__(self, *_: object) -> None:
        for one in self._held:
            one.close()


@pytest.mark.rule("I2", "I6")
def test_a_wider_range_of_ports_after_a_restart(cluster: Cluster) -> None:
    """The store process lives on with its cycle; the next ones get their ports where the new coordinator says."""
    first = _free_range(8)
    coordinator = cluster.serve("--store-ports", f"{first}-{first + 1}")
    cluster.join_all("a", "--nnodes", "1", "--max-restarts", "9", command=KEYS)
    worker, process = cluster.worker("a"), store_pid(cluster)
    coordinator.send(signal.SIGKILL)
    coordinator.ended()
    cluster.serve("--store-ports", f"{first + 2}-{first + 7}", listen=cluster.address)
    assert ask(worker, "add", "n", 1) == 1
    assert store_pid(cluster) == process
    worker.tell("exit", code=1)
    assert int(cluster.worker("a", 1).env["MASTER_PORT"]) in range(first + 2, first + 8)


@pytest.mark.rule("I6")
def test_the_lasting_store_keeps_its_port_when_it_dies_without_a_coordinator(cluster: Cluster) -> None:
    coordinator = cluster.serve()
    cluster.join_all("a", "--nnodes", "1", command=KEYS)
    worker, process = cluster.worker("a"), store_pid(cluster)
    worker.said("ready")  # it has found its stores
    coordinator.send(signal.SIGKILL)
    coordinator.ended()
    os.kill(process, signal.SIGKILL)
    cluster.serve(listen=cluster.address)
    assert store_pid(cluster) != process
    worker.tell("exit", code=1)
    assert cluster.worker("a", 1).env["NVRX_STORE_ENDPOINT"] == worker.env["NVRX_STORE_ENDPOINT"]


@pytest.mark.rule("I6")
def test_the_store_process_ends_with_a_coordinator_that_needs_it_no_more(cluster: Cluster) -> None:
    coordinator = cluster.serve()
    agents = cluster.join_all("a", "--nnodes", "1", command=KEYS)
    handle = os.pidfd_open(store_pid(cluster))
    cluster.worker("a").tell("exit", code=0)
    assert agents[0].ended() == 0
    coordinator.send(signal.SIGTERM)
    assert coordinator.ended() == 0
    cluster.board.until(lambda: _has_ended(handle), "the store process to end")
    os.close(handle)


def _has_ended(handle: int) -> bool | None:
    return bool(select.select([handle], [], [], 0)[0]) or None


@pytest.mark.rule("I1")
@pytest.mark.torch
def test_torchs_own_server_in_its_place(cluster: Cluster) -> None:
    """`--store torch`: the same ports, cycles and keys."""
    cluster.serve("--store", "torch")
    cluster.join_all("a b", *TWO, command=KEYS)
    old = cluster.workers(0, 2)
    ask(old[0], "set", "uid", "old")
    assert ask(old[1], "get", "uid") == "old"
    old[0].tell("exit", code=1)
    new = cluster.workers(1, 2)
    assert ask(new[0], "check", ["uid"]) is False
    assert ask(new[0], "add", "n", 2) == 2
    assert ask(new[1], "add", "n", 3) == 5


@pytest.mark.rule("G2", "I6")
@pytest.mark.parametrize(
    ("listen", "reached_at", "told"),
    [
        ("0.0.0.0", "127.0.0.2", "127.0.0.2"),
        ("[::]", "[::1]", "::1"),
        ("[::]", "127.0.0.1", "127.0.0.1"),
        ("[::1]", "[::1]", "::1"),
    ],
)
def test_where_workers_find_the_store(cluster: Cluster, listen: str, reached_at: str, told: str) -> None:
    """C099, C102: listening everywhere, the store is where each node reaches the coordinator, not `0.0.0.0`."""
    cluster.serve("--insecure", listen=f"{listen}:0")
    port = cluster.address.rpartition(":")[2]
    agent = cluster.join("a", "--nnodes", "1", command=KEYS, address=f"{reached_at}:{port}")
    worker = cluster.worker("a")
    assert worker.env["MASTER_ADDR"] == told
    assert worker.env["NVRX_STORE_ENDPOINT"].startswith(f"{reached_at}:")
    assert ask(worker, "add", "n", 1) == 1
    assert ask(worker, "count", where="lasting") >= 0
    worker.tell("exit", code=0)
    assert agent.ended() == 0


@pytest.mark.rule("G2")
def test_an_address_to_tell_workers(cluster: Cluster) -> None:
    cluster.serve("--advertise-addr", "localhost")
    cluster.join("a", "--nnodes", "1", command=KEYS)
    worker = cluster.worker("a")
    assert worker.env["MASTER_ADDR"] == "localhost"
    assert ask(worker, "add", "n", 1) == 1


@pytest.mark.rule("I1")
@pytest.mark.parametrize("given", ["1", "0-5", "9-8", "1-70000", "a-b", "-"])
def test_a_bad_range_of_ports_is_refused_in_one_line(cluster: Cluster, given: str) -> None:
    argv = [*COORDINATOR, "serve", "--state", "memory", "--listen", "127.0.0.1:0", "--store-ports", given]
    program = cluster.start("coordinator", argv)
    assert program.ended() == 2
    assert repr(given) in program.err[-1]


@pytest.mark.rule("I6", "E1")
def test_a_suspended_coordinator_keeps_its_store_process(cluster: Cluster) -> None:
    """Whatever timers of its own are over when it wakes up, the store process has done nothing wrong."""
    coordinator = cluster.serve()
    cluster.join_all("a b", *TWO, command=KEYS)
    a, b = cluster.workers(0, 2)
    for one in (a, b):
        one.said("ready")
    pid = store_pid(cluster)
    coordinator.send(signal.SIGSTOP)
    assert ask(a, "add", "n", 1) == 1
    coordinator.send(signal.SIGCONT)
    assert ask(b, "add", "n", 1) == 2
    b.tell("exit", code=1)
    new = cluster.workers(1, 2)
    assert ask(new[0], "add", "n", 1) == 1
    assert store_pid(cluster) == pid
    assert cluster.rank_map(0).failure.cause == common_pb2.CAUSE_WORKER_FAILED


@pytest.mark.rule("I3", "I4", "H1")
def test_the_lasting_store_tells_of_cycles(cluster: Cluster) -> None:
    """A blocking wait is a push; a worker may read, not write, what the coordinator keeps; gRPC shows the same."""
    cluster.serve()
    cluster.join_all("a b", *TWO, command=KEYS)
    a, b = cluster.workers(0, 2)
    ask(a, "wait", ["nvrx/run/cycles/0/rank_map"], 20.0, where="lasting")
    shown = json.loads(ask(a, "get", "nvrx/run/cycles/0/rank_map", where="lasting"))
    assert [one["node_id"] for one in shown["nodes"]] == ["a", "b"]
    ask(b, "set", "nvrx/run/cycle", "9", where="lasting")
    assert ask(b, "count", where="lasting").startswith("gone"), "a client that writes there is cut off"
    a.tell("exit", code=3)
    new = cluster.workers(1, 2)
    ask(new[0], "wait", ["nvrx/run/cycles/0/failure", "nvrx/run/cycles/1/rank_map"], 20.0, where="lasting")
    failure = json.loads(ask(new[0], "get", "nvrx/run/cycles/0/failure", where="lasting"))
    assert (failure["cause"], failure["exit_code"]) == ("CAUSE_WORKER_FAILED", 3)
    assert cluster.lasting("nvrx/run/cycle") == b"1"
    ask(new[1], "set", "runs/run/seen", "yes", where="lasting")
    assert cluster.lasting("runs/run/seen") == b"yes"
