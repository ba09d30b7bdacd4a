"""Several coordinators on a real etcd, as real processes; agents and the facts' stream know all of them."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nvrx.channel import CHANNEL_OPTIONS
from tests.etcd_cluster import EtcdCluster

from .cluster import OBEY, RUN_ID, TIMING, Cluster
from .programs import COORDINATOR, Program
from .stream import FactStream

TTL = "3"
"""Of the leader, in seconds: as etcd grants it on a busy machine, with room to renew it."""
_ANSWER_WITHIN_S = 2.0


class Leaders(Cluster):
    """One test's coordinators, by name, and what Cluster has."""

    def __init__(self, etcd: EtcdCluster) -> None:
        super().__init__()
        self.etcd = etcd
        self.prefix = uuid.uuid4().hex
        self.coordinators: dict[str, Program] = {}
        self.addresses: dict[str, str] = {}

    def stand(
        self,
        name: str,
        *options: str,
        state: str | None = None,
        ttl: str = TTL,
        host: str = "127.0.0.1",
        port: int = 0,
        env: dict[str, str] | None = None,
    ) -> Program:
        """Start a coordinator, wait until it listens."""
        argv = [*COORDINATOR, "serve", "--listen", f"{host}:{port}", "--state", state or self.etcd.state(self.prefix)]
        program = self.start(f"coordinator {name}", [*argv, "--leader-ttl", ttl, *TIMING, *options], env)
        self.addresses[name] = program.said(r"^nvrx-coord listening on (\S+)$")[1]
        self.coordinators[name] = program
        return program

    def stand_all(self, names: str, *options: str, ttl: str = TTL) -> None:
        """Start one coordinator for each word of `names`; the first is to lead. Watch the run."""
        for name in names.split():
            self.stand(name, *options, ttl=ttl)
            if len(self.coordinators) == 1:
                self.leads(name)
        self.watch()

    def watch(self) -> None:
        """Follow the facts, from whoever leads."""
        self.address = ",".join(self.addresses.values())
        self._stream = FactStream(self.board, list(self.addresses.values()), RUN_ID)

    def leads(self, name: str) -> None:
        """Wait until this coordinator answers as the leader."""
        self.board.until(lambda: self.is_leading(name), f"{name} to lead")

    def leader(self, but: str = "") -> str:
        """Wait for some coordinator to lead; its name, which is another than `but`."""
        names = [one for one in self.coordinators if one != but]
        return self.board.until(lambda: next((one for one in names if self.is_leading(one)), None), "a leader")

    def is_leading(self, name: str) -> bool:
        with grpc.insecure_channel(self.addresses[name], options=CHANNEL_OPTIONS) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=_ANSWER_WITHIN_S)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    @property
    def channel(self) -> grpc.Channel:
        """To whoever leads now."""
        if self._channel is not None:
            self._channel.close()
        self._channel = grpc.insecure_channel(self.addresses[self.leader()], options=CHANNEL_OPTIONS)
        return self._channel

    def begin(self, nodes: str = "a b c", command: Sequence[str] = OBEY) -> tuple[list[Program], list[int]]:
        """A run of two nodes and what stands by, running; its agents, and the pids of its workers."""
        count = len(nodes.split())
        agents = self.join_all(nodes, "--nnodes", f"2:{count}", "--last-call", "20", command=command)
        self.wait_for("CycleRunning", 0)
        return agents, self.pids(0)

    def pids(self, cycle: int) -> list[int]:
        return [one.pid for one in self.workers(cycle, 2)]

    def all_back(self) -> None:
        """Wait until every member's stream is open again."""
        self.board.until(lambda: all(one.connected for one in self.nodes().values()) or None, "all to be back")


def logged_at(program: Program, pattern: str) -> str:
    """When a program first logged a line like this: comparable between processes of one machine."""
    program.said(pattern)
    line = next(one for one in program.err if re.search(pattern, one))
    return line[: len("2000-01-01 00:00:00.000")]
