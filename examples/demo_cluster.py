"""The processes of the demonstration: a real coordinator, three agents, and what can be seen of them.

Knows how to start, watch, kill and end them. Knows nothing of the story that the demonstration tells.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

from bench import processes
from nvrx.channel import CHANNEL_OPTIONS
from nvrx.v1 import common_pb2, rank_map_pb2, rank_map_pb2_grpc, run_pb2, run_pb2_grpc

RUN_ID = "demo"
WORKERS_PER_NODE = 2
READY = "nvrx-coord listening on "
READY_WITHIN_S = 30.0
CALL_TIMEOUT_S = 10.0
LOOK_EVERY_S = 0.1
"""History grows without an event of its own; facts and deaths are seen at once."""
WATCH_AGAIN_S = 0.05
ENDED_UNASKED_S = 5.0
"""An agent ends when its run closes; the news of that may take a moment more than its end."""
TAIL_LINES = 12
# What an environment may hold that would change how workers start (PET_ is torchrun's).
_STRAY_SETTINGS = ("NVRX_", "PET_", "SLURM_", "CROSS_SLURM_", "TORCHELASTIC_", "GROUP_RANK", "MASTER_", "RANK")


class DemoFailed(Exception):
    """A check did not hold, or what was waited for did not come; the message is one line."""


@dataclass(frozen=True)
class Step:
    """One line of history.jsonl: what rank 0 wrote after a step."""

    step: int
    loss: float
    world_size: int
    cycle: int


@dataclass(frozen=True)
class Training:
    """What the agents are to run."""

    script: Path
    steps: int
    step_time_s: float
    checkpoint_every: int


class Cluster:
    """A coordinator and agents on this machine, below one directory. Everything starts from this process."""

    def __init__(self, directory: Path, training: Training, on_fact: Callable[[run_pb2.Fact], None]) -> None:
        self.directory = directory
        self.training = training
        self.address = ""
        self.facts: list[run_pb2.Fact] = []
        self.history: list[Step] = []
        self._on_fact = on_fact
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._expected_ends: set[str] = set()
        self._news: queue.Queue[run_pb2.Fact | str] = queue.Queue()
        self._history_read = 0

    # ---- starting -----------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    def start_coordinator(self) -> None:
        """Returns once it listens, on a port of its own choice."""
        argv = [sys.executable, "-m", "nvrx.server.cli", "serve", "--listen", "127.0.0.1:0"]
        argv += ["--state-dir", str(self.directory / "state"), "--run-id", RUN_ID]
        self._coordinator = self._start("coordinator", argv, stdout=subprocess.PIPE)
        stdout = self._coordinator.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], READY_WITHIN_S)
        line = stdout.readline().decode() if readable else ""
        if not line.startswith(READY):
            raise DemoFailed(f"the coordinator did not say within {READY_WITHIN_S:g} s where it listens")
        self.address = line.removeprefix(READY).strip()
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def start_agent(self, node_id: str) -> None:
        argv = [sys.executable, "-m", "nvrx.client.cli", "join", "--coordinator", self.address]
        argv += ["--run-id", RUN_ID, "--node-id", node_id, "--nnodes", "2:3"]
        argv += ["--nproc-per-node", str(WORKERS_PER_NODE), "--last-call", "60", "--stop-grace", "5"]
        argv += ["--log-dir", str(self.directory / "logs")]
        command = [sys.executable, str(self.training.script), "--checkpoint-dir", str(self.checkpoints)]
        command += ["--steps", str(self.training.steps), "--step-time", str(self.training.step_time_s)]
        command += ["--checkpoint-every", str(self.training.checkpoint_every)]
        self._agents[node_id] = self._start(node_id, [*argv, "--", *command])

    def _start(self, name: str, argv: list[str], stdout: int | None = None) -> subprocess.Popen[bytes]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(_STRAY_SETTINGS)}
        env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        # Whatever is written on the way goes where all of it is removed in the end; torch uses TMPDIR too.
        env |= {"XDG_RUNTIME_DIR": str(self.directory), "TMPDIR": str(self.directory)}
        return processes.start(argv, env, self.directory / f"{name}.log", stdout)

    # ---- watching -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """In a thread of its own: put every fact into the queue, from the first to the closing of the run."""
        with grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            stub = run_pb2_grpc.RunServiceStub(channel)
            while True:
                try:
                    for response in stub.WatchFacts(run_pb2.WatchFactsRequest(run_id=RUN_ID)):
                        self._news.put(response.fact)
                    return
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.NOT_FOUND:  # the run begins with its first node
                        self._news.put(f"the watch on the coordinator broke: {error.details()}")
                        return
                    time.sleep(WATCH_AGAIN_S)

    def wait(self, what: str, is_there: Callable[[], bool], patience_s: float) -> None:
        """Take in news until `is_there()`. Raises DemoFailed when no fact and no step came for `patience_s`."""
        last_news_s = time.monotonic()
        while not is_there():
            if self._take_news():
                last_news_s = time.monotonic()
            elif time.monotonic() - last_news_s > patience_s:
                raise DemoFailed(f"nothing happened for {patience_s:g} s while waiting for {what}")

    def _take_news(self) -> bool:
        self._require_alive()
        grown = self._read_history()
        try:
            found = self._news.get(timeout=LOOK_EVERY_S)
        except queue.Empty:
            return grown
        if isinstance(found, str):
            raise DemoFailed(found)
        self.facts.append(found)
        self._on_fact(found)
        return True

    def _read_history(self) -> bool:
        path = self.checkpoints / "history.jsonl"
        if not path.exists():
            return False
        with path.open("rb") as file:
            file.seek(self._history_read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._history_read += len(whole)
        for line in whole.splitlines():
            fields: dict[str, Any] = json.loads(line)
            self.history.append(Step(fields["step"], fields["loss"], fields["world_size"], fields["cycle"]))
        return bool(whole)

    def _require_alive(self) -> None:
        assert self._coordinator is not None
        if self._coordinator.poll() is not None:
            raise DemoFailed(f"the coordinator ended by itself with exit code {self._coordinator.returncode}")
        if self.closed() is not None:
            return
        for node_id, agent in self._agents.items():
            if agent.poll() is None or node_id in self._expected_ends:
                continue
            deadline_s = time.monotonic() + ENDED_UNASKED_S
            while self.closed() is None and time.monotonic() < deadline_s:
                self._expected_ends.add(node_id)
                self._take_news()
            if self.closed() is None:
                raise DemoFailed(f"the agent of {node_id} ended by itself with exit code {agent.returncode}")

    # ---- what is known ------------------------------------------------------------------------------------

    def fact(self, kind: str, cycle: int | None = None) -> run_pb2.Fact | None:
        """The first fact of a kind, about a cycle where one is given."""
        for one in self.facts:
            if one.kind == kind and (cycle is None or (one.HasField("cycle") and one.cycle == cycle)):
                return one
        return None

    def closed(self) -> run_pb2.Fact | None:
        return self.fact("RunClosed")

    def steps_of(self, cycle: int) -> list[Step]:
        return [one for one in self.history if one.cycle == cycle]

    def rank_map(self, cycle: int) -> common_pb2.RankMap:
        with grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            stub = rank_map_pb2_grpc.RankMapServiceStub(channel)
            request = rank_map_pb2.GetRankMapRequest(run_id=RUN_ID, cycle=cycle)
            return stub.GetRankMap(request, timeout=CALL_TIMEOUT_S).rank_map

    def cycles(self) -> list[rank_map_pb2.Cycle]:
        """All cycles, the first one first."""
        with grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            stub = rank_map_pb2_grpc.RankMapServiceStub(channel)
            listed = stub.ListCycles(rank_map_pb2.ListCyclesRequest(run_id=RUN_ID), timeout=CALL_TIMEOUT_S)
            return list(reversed(listed.cycles))

    def nodes(self) -> list[run_pb2.Node]:
        """Every node that is or was a member."""
        with grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            stub = run_pb2_grpc.RunServiceStub(channel)
            return list(stub.ListNodes(run_pb2.ListNodesRequest(run_id=RUN_ID), timeout=CALL_TIMEOUT_S).nodes)

    def run_state(self) -> int:
        with grpc.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            stub = run_pb2_grpc.RunServiceStub(channel)
            return stub.GetRun(run_pb2.GetRunRequest(run_id=RUN_ID), timeout=CALL_TIMEOUT_S).run.state

    def worker_pids(self, node_id: str) -> dict[int, int]:
        """The living workers of a node: global rank -> process id."""
        found = {}
        for pid in processes.descendants():
            environment = _environment(pid)
            if environment.get("NVRX_NODE_ID") == node_id and _leads_its_group(pid):
                found[int(environment["RANK"])] = pid
        return found

    # ---- ending -------------------------------------------------------------------------------------------

    def kill_worker(self, node_id: str, rank: int) -> int:
        """SIGKILL one worker; its process id."""
        pid = self.worker_pids(node_id)[rank]
        os.kill(pid, signal.SIGKILL)
        return pid

    def kill_agent(self, node_id: str, workers_gone_within_s: float) -> float:
        """SIGKILL an agent; the seconds until its workers were gone too. Raises DemoFailed if some live on."""
        handles = {rank: os.pidfd_open(pid) for rank, pid in self.worker_pids(node_id).items()}
        self._expected_ends.add(node_id)
        killed_s = time.monotonic()
        self._agents[node_id].kill()
        try:
            for rank, handle in handles.items():
                left_s = max(0.0, killed_s + workers_gone_within_s - time.monotonic())
                if not select.select([handle], [], [], left_s)[0]:
                    raise DemoFailed(f"rank {rank} outlived its agent by {workers_gone_within_s:g} s")
        finally:
            for handle in handles.values():
                os.close(handle)
        return time.monotonic() - killed_s

    def agent_pid(self, node_id: str) -> int:
        return self._agents[node_id].pid

    def agent_exit(self, node_id: str, within_s: float) -> int | None:
        """The exit code of an agent that is to end now; None where it has not."""
        try:
            return self._agents[node_id].wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def stop_coordinator(self, within_s: float) -> int | None:
        """SIGTERM; its exit code, None where it lives on."""
        assert self._coordinator is not None
        self._coordinator.terminate()
        try:
            return self._coordinator.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def log_tails(self) -> Mapping[Path, list[str]]:
        """The last lines of every log that has any: coordinator, agents, and what workers wrote on standard error."""
        logs = sorted(self.directory.glob("*.log")) + sorted((self.directory / "logs").rglob("*.err"))
        tails = {path: path.read_text(errors="replace").splitlines()[-TAIL_LINES:] for path in logs}
        return {path: lines for path, lines in tails.items() if lines}


def _environment(pid: int) -> dict[str, str]:
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone meanwhile
        return {}
    pairs = (entry.partition("=") for entry in data.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs}


def _leads_its_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False
