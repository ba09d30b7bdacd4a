"""A coordinator and agents as real processes on this machine, and ways to wait for what they do.

Nothing of the environment of the tests reaches them. Everything is ended by `close`, whatever happened.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

import grpc

from nvrx.channel import CHANNEL_OPTIONS
from nvrx.v1 import (
    common_pb2,
    rank_map_pb2,
    rank_map_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
    store_pb2,
    store_pb2_grpc,
)

from .board import PATIENCE_S, Board
from .hall import Hall, Worker
from .programs import COORDINATOR, MARKER, NODE, ROOT, Program, kill_marked, marked
from .stream import Fact, FactStream

RUN_ID = "run"
# Short enough for quick tests, long enough for a machine that is busy with other things.
TIMING = ("--heartbeat-interval", "0.3", "--lease-ttl", "4", "--reconnect-grace", "1")


def worker_script(name: str, *arguments: str) -> tuple[str, ...]:
    """The command of one of tests/e2e/workers."""
    return (sys.executable, "-m", f"tests.e2e.workers.{name}", *arguments)


OBEY = worker_script("obey")


class Cluster:
    """One test's processes."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        # Not pytest's folder: the path of a UNIX socket has 107 characters at most.
        self.directory = Path(tempfile.mkdtemp(prefix="nvrx-e2e-"))
        self.logs = self.directory / "logs"
        self.state_dir = self.directory / "state"
        self.board = Board()
        self.hall = Hall(self.board, self.directory / "hall")
        self.programs: list[Program] = []
        self.address = ""
        self._asked_at = ""
        self._stream: FactStream | None = None
        self._channel: grpc.Channel | None = None
        self._handles: dict[int, int] = {}

    # ---- starting -----------------------------------------------------------------------------------------

    def environment(self, more: dict[str, str] | None = None) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.directory),
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(ROOT),
            "XDG_RUNTIME_DIR": str(self.directory),
            "W_SOCKET": str(self.directory / "hall"),
            MARKER: self.mark,
            **(more or {}),
        }

    def start(
        self, name: str, argv: Sequence[str], env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> Program:
        program = Program(self.board, name, argv, self.environment(env), cwd or ROOT)
        self.programs.append(program)
        return program

    def serve(
        self,
        *options: str,
        listen: str = "127.0.0.1:0",
        timing: Sequence[str] = TIMING,
        wrapped: Sequence[str] = (),
        relayed: bool = False,
    ) -> Program:
        """Start the coordinator, wait until it listens, watch its run.

        `relayed`: `wrapped` puts it into a network that the test is not in, and is asked through a relay there.
        """
        state = ["--state-dir", str(self.state_dir)]
        argv = [*wrapped, *COORDINATOR, "serve", "--listen", listen, *state, *timing, *options]
        program = self.start("coordinator", argv)
        self.address = program.said(r"^nvrx-coord listening on (\S+)$")[1]
        self._asked_at = self._relay(wrapped) if relayed else self.address
        if self._stream is None:
            self._stream = FactStream(self.board, [self._asked_at], RUN_ID)
        return program

    def _relay(self, wrapped: Sequence[str]) -> str:
        path = str(self.directory / "relay")
        relay = self.start("relay", [*wrapped, sys.executable, "-m", "tests.e2e.relay", path, self.address])
        relay.said("relay ready")
        return f"unix:{path}"

    def join(
        self,
        node: str,
        *options: str,
        command: Sequence[str] = OBEY,
        env: dict[str, str] | None = None,
        address: str | None = None,
        wrapped: Sequence[str] = (),
        stop_grace: str = "10",
    ) -> Program:
        """Start an agent; returns at once."""
        argv = [*wrapped, *NODE, "join", "--coordinator", address or self.address, "--run-id", RUN_ID]
        argv += ["--node-id", node, "--log-dir", str(self.logs), "--last-call", "0.1", "--stop-grace", stop_grace]
        argv += ["--restart-backoff", "0"]
        return self.start(node, [*argv, *options, "--", *command], env)

    def join_all(self, nodes: str, *options: str, command: Sequence[str] = OBEY) -> list[Program]:
        """Start one agent for each word of `nodes`."""
        return [self.join(one, *options, command=command) for one in nodes.split()]

    # ---- facts --------------------------------------------------------------------------------------------

    @property
    def facts(self) -> list[Fact]:
        return self._stream.facts if self._stream is not None else []

    def forget_facts(self) -> list[Fact]:
        """The journal is about to be another: watch anew from the next `serve` on. The facts seen so far."""
        assert self._stream is not None
        self._stream.close()
        seen, self._stream = self._stream.facts, None
        return seen

    def find(self, kind: str, cycle: int | None = None, node: str | None = None, after: int = 0) -> list[Fact]:
        return [
            one
            for one in self.facts
            if one.kind == kind and cycle in (None, one.cycle) and node in (None, one.node) and one.revision > after
        ]

    def wait_for(
        self,
        kind: str,
        cycle: int | None = None,
        node: str | None = None,
        after: int = 0,
        timeout_s: float = PATIENCE_S,
    ) -> Fact:
        """Wait for a fact."""
        what = f"{kind} cycle={cycle} node={node} after revision {after}"
        return self.board.until(lambda: next(iter(self.find(kind, cycle, node, after)), None), what, timeout_s)

    def running_cycle(self, above: int) -> int:
        """Wait for a cycle above `above` that runs, or ran; its number."""

        def latest() -> int | None:
            numbers = (one.cycle for one in self.find("CycleRunning") if one.cycle is not None)
            return max((number for number in numbers if number > above), default=None)

        return self.board.until(latest, f"a cycle above {above} that runs")

    def world(self, cycle: int) -> list[str]:
        """The node ids of a cycle's world, in order of group rank."""
        fact = self.wait_for("WorldChosen", cycle)
        return [seat["node"]["node_id"] for seat in fact.detail["seats"]]

    # ---- workers ------------------------------------------------------------------------------------------

    def worker(
        self, node: str | None = None, cycle: int | None = 0, local_rank: int = 0, role: str = "worker"
    ) -> Worker:
        """Wait for a worker to report."""
        what = f"a {role} of node {node}, cycle {cycle}, local rank {local_rank}"
        return self.board.until(lambda: next(iter(self.hall.find(node, cycle, local_rank, role)), None), what)

    def workers(self, cycle: int, count: int) -> list[Worker]:
        """Wait for this many workers of a cycle; in order of rank."""
        found = self.board.until(
            lambda: found if len(found := self.hall.find(None, cycle, None)) >= count else None,
            f"{count} workers of cycle {cycle}",
        )
        assert len(found) == count, self.board.state()
        return sorted(found, key=lambda one: one.rank)

    def all_back(self) -> None:
        """Wait until every member's stream is open again."""
        self.board.until(lambda: all(one.connected for one in self.nodes().values()) or None, "all to be back")

    def log_of(self, node: str, cycle: int, name: str) -> Path:
        return self.logs / RUN_ID / node / f"cycle-{cycle}" / name

    # ---- asking -------------------------------------------------------------------------------------------

    @property
    def channel(self) -> grpc.Channel:
        if self._channel is None:
            self._channel = grpc.insecure_channel(self._asked_at, options=CHANNEL_OPTIONS)
        return self._channel

    def run(self) -> run_pb2.Run:
        stub = run_pb2_grpc.RunServiceStub(self.channel)
        response: run_pb2.GetRunResponse = stub.GetRun(run_pb2.GetRunRequest(run_id=RUN_ID), timeout=PATIENCE_S)
        return response.run

    def nodes(self) -> dict[str, run_pb2.Node]:
        stub = run_pb2_grpc.RunServiceStub(self.channel)
        response: run_pb2.ListNodesResponse = stub.ListNodes(
            run_pb2.ListNodesRequest(run_id=RUN_ID), timeout=PATIENCE_S
        )
        return {one.node_id: one for one in response.nodes}

    def rank_map(self, cycle: int | None = None) -> common_pb2.RankMap:
        stub = rank_map_pb2_grpc.RankMapServiceStub(self.channel)
        request = rank_map_pb2.GetRankMapRequest(run_id=RUN_ID, cycle=cycle)
        response: rank_map_pb2.GetRankMapResponse = stub.GetRankMap(request, timeout=PATIENCE_S)
        return response.rank_map

    def lasting(self, key: str) -> bytes:
        """A key of the lasting store, over gRPC, once it is there."""
        stub = store_pb2_grpc.StoreServiceStub(self.channel)
        response: store_pb2.GetResponse = stub.Get(store_pb2.GetRequest(key=key), timeout=PATIENCE_S)
        return response.value

    def view(self, *arguments: str) -> Program:
        """Run one of the coordinator's views to its end."""
        program = self.start(f"nvrx-coord {arguments[0]}", [*COORDINATOR, *arguments, "--coordinator", self.address])
        program.ended()
        return program

    # ---- ending -------------------------------------------------------------------------------------------

    def handle(self, pid: int) -> int:
        """A descriptor of a process, which never comes to mean another one; closed with the cluster."""
        if pid not in self._handles:
            self._handles[pid] = os.pidfd_open(pid)
        return self._handles[pid]

    def alive(self) -> list[int]:
        """The processes of this cluster that run."""
        return marked(self.mark)

    def close(self) -> None:
        for program in self.programs:
            if program.exit_code is None:
                program.send(signal.SIGKILL)
        kill_marked(self.mark)
        if self._stream is not None:
            self._stream.close()
        if self._channel is not None:
            self._channel.close()
        self.hall.close()
        for handle in self._handles.values():
            os.close(handle)
        for program in self.programs:
            program.process.wait(PATIENCE_S)
        shutil.rmtree(self.directory, ignore_errors=True)


def supervisor_of(pid: int) -> int:
    """The supervisor that a worker is a child of."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def signal_all(programs: Sequence[Program], number: signal.Signals) -> None:
    """Signal processes as close together as can be."""
    for program in programs:
        os.kill(program.pid, number)
