"""The systems that are timed: how each is started for the same workers. No clocks and figures here."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from . import processes
from .asking import first_answer_s
from .floor import free_port
from .marks import NotRecovered, monotonic_s

BENCH = Path(__file__).resolve().parent
WORKER = [sys.executable, str(BENCH / "worker.py")]
RUN_ID = "bench"
COORDINATOR = "coordinator"
MAX_RESTARTS = 1000
# What an environment may hold that would change how a peer starts (PET_ is torchrun's).
_STRAY_SETTINGS = ("NVRX_", "PET_", "SLURM_", "TORCHELASTIC_")
_READY = "nvrx-coord listening on "
_READY_TIMEOUT_S = 30.0
_READY_TO_FORK = "the warm process is ready"
_LOOK_AGAIN_S = 0.1


@dataclass(frozen=True)
class Layout:
    active_nodes: int
    standby_nodes: int
    workers_per_node: int

    @property
    def world_size(self) -> int:
        return self.active_nodes * self.workers_per_node

    @property
    def node_names(self) -> list[str]:
        return [f"n{index}" for index in range(self.active_nodes + self.standby_nodes)]


class Peer(ABC):
    """One training job under one system. All its processes descend from this one and die with the job."""

    name: ClassVar[str]
    note: ClassVar[str]  # what a reader of the figures must know about how it was started

    def __init__(self, layout: Layout, directory: Path, mark_socket: Path) -> None:
        self.layout = layout
        self.directory = directory
        self._mark_socket = mark_socket
        self._pidfds: dict[int, str] = {}
        self.node_pids: dict[str, int] = {}  # the launcher or agent of each node; the floor has none

    @abstractmethod
    def start(self) -> None:
        """Start everything; returns without waiting for the workers."""

    def rank_map_file(self, node: str, cycle: int) -> Path | None:
        """The file that this node writes as soon as it holds the cycle's rank map; None: it writes none."""
        return None

    def living(self, without_node: str | None = None) -> dict[int, str]:
        """The pidfds, with names, of the processes that must not end."""
        return {handle: name for handle, name in self._pidfds.items() if name != without_node}

    def await_readiness(self, deadline_s: float) -> None:  # noqa: B027 - most prepare nothing
        """Until what this peer prepares in the background is prepared. Raises NotRecovered."""

    def stop(self) -> None:
        processes.kill_descendants()
        for handle in self._pidfds:
            os.close(handle)
        self._pidfds.clear()

    def _start(self, name: str, argv: list[str], stdout: int | None = None) -> subprocess.Popen[bytes]:
        env = {key: value for key, value in os.environ.items() if not key.startswith(_STRAY_SETTINGS)}
        env |= {"BENCH_SOCKET": str(self._mark_socket), "BENCH_NODE": name, "BENCH_CYCLE": "0"}
        # One thread per worker and loopback only, for all peers alike.
        env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | self._extra_env()
        process = processes.start(argv, env, self.directory / f"{name}.log", stdout)
        self._pidfds[os.pidfd_open(process.pid)] = name
        return process

    def _extra_env(self) -> dict[str, str]:
        return {}


class Floor(Peer):
    name = "floor"
    note = "floor: one process without any coordination: reap, SIGTERM the others, reap, start all at once"

    def start(self) -> None:
        shape = [str(self.layout.active_nodes), str(self.layout.workers_per_node)]
        self._start("floor", [sys.executable, str(BENCH / "floor.py"), *shape, *WORKER])


class Torchrun(Peer):
    name = "torchrun"
    note = (
        "torchrun: c10d rendezvous, --monitor-interval 0.1, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; without "
        "it, torch 2.13 did not recover in 60 s: new ranks read dead ranks' addresses from the shared store"
    )

    def start(self) -> None:
        endpoint = f"127.0.0.1:{free_port()}"
        for name in self.layout.node_names:
            argv = [sys.executable, "-m", "torch.distributed.run"]
            argv += ["--nnodes", str(self.layout.active_nodes)]
            argv += ["--nproc-per-node", str(self.layout.workers_per_node)]
            argv += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", RUN_ID]
            argv += ["--rdzv-conf", f"is_host={int(name == 'n0')}", "--local-addr", "127.0.0.1"]
            argv += ["--monitor-interval", "0.1", "--max-restarts", str(MAX_RESTARTS)]
            self.node_pids[name] = self._start(name, [*argv, WORKER[-1]]).pid

    def _extra_env(self) -> dict[str, str]:
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Nvrx(Peer):
    name = "nvrx"
    note = "nvrx: journal in SQLite at synchronous=FULL; --store bridge: a process of its own serves the store"
    _node_options: ClassVar[tuple[str, ...]] = ()

    def start(self) -> None:
        self.address = address = self._start_coordinator("127.0.0.1:0")
        least = self.layout.active_nodes
        for name in self.layout.node_names:
            argv = [sys.executable, "-m", "nvrx.client.cli", "join", "--coordinator", address]
            argv += ["--node-id", name, "--run-id", RUN_ID]
            argv += ["--nnodes", f"{least}:{least + self.layout.standby_nodes}"]
            argv += ["--nproc-per-node", str(self.layout.workers_per_node)]
            argv += ["--max-restarts", str(MAX_RESTARTS), "--log-dir", str(self._log_dir), *self._node_options]
            self.node_pids[name] = self._start(name, [*argv, "--", *WORKER]).pid

    def rank_map_file(self, node: str, cycle: int) -> Path:
        return self._log_dir / RUN_ID / node / f"cycle-{cycle}" / "rank-map.json"

    @property
    def _log_dir(self) -> Path:
        return self.directory / "logs"

    def restart_coordinator(self) -> float:
        """SIGKILL it, and start it again on its address and journal: seconds from that start to its first answer."""
        handle, _ = next(one for one in self._pidfds.items() if one[1] == COORDINATOR)
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        if not select.select([handle], [], [], _READY_TIMEOUT_S)[0]:
            raise NotRecovered("the coordinator outlived SIGKILL")
        del self._pidfds[handle]
        os.close(handle)
        began_s = monotonic_s()
        self._start_coordinator(self.address)
        return first_answer_s(self.address, RUN_ID) - began_s

    def _start_coordinator(self, listen: str) -> str:
        argv = [sys.executable, "-m", "nvrx.server.cli", "serve", "--listen", listen, "--http", "off"]
        argv += ["--state-dir", str(self.directory / "state")]
        process = self._start(COORDINATOR, argv, stdout=subprocess.PIPE)
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], _READY_TIMEOUT_S)
        line = process.stdout.readline().decode() if readable else ""
        if not line.startswith(_READY):
            said = line.split() + (self.directory / "coordinator.log").read_text().splitlines()[-1:]
            raise NotRecovered(f"the coordinator did not get ready: {' '.join(said)}")
        return line.removeprefix(_READY).strip()


class NvrxWarm(Nvrx):
    name = "nvrx-warm"
    note = "nvrx-warm: the same with --prewarm; struck once the warm process of every node has imported torch"
    _node_options = ("--prewarm",)

    def await_readiness(self, deadline_s: float) -> None:
        for name in self.layout.node_names:
            log = self.directory / f"{name}.log"
            while _READY_TO_FORK not in log.read_text():
                if monotonic_s() > deadline_s:
                    raise NotRecovered(f"{name} had no warm process in time")
                time.sleep(_LOOK_AGAIN_S)


PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (Nvrx, NvrxWarm, Torchrun, Floor)}
