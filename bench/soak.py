"""Looks for leaks: many cycles of failing workers that leave orphans, and what every process of ours holds meanwhile.

Two agents with two workers each under one coordinator. At every tenth of the cycles each process is looked at in /proc;
exit code 1 where processes, descriptors or threads became more. Memory is shown: the coordinator keeps every cycle on
purpose. The parts: frame, processes; here the measurements and the command line.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import grpc

from bench import processes
from bench.frame import framed, say
from nvrx.server.store_host.ports import MAX_RETIRED
from nvrx.v1 import run_pb2, run_pb2_grpc

RUN_ID = "soak"
NODES = ("n0", "n1")
WORKER = """
(sleep 1000 &); (setsid sleep 1000 &); (exit 3 &)
test "$NVRX_CYCLE" -ge {last} && exec sleep 1000
test "$RANK" = 1 || exec sleep 1000
sleep 0.05; exit 1
"""
SAMPLES = 10


def borne(name: str, what: str) -> int:
    """How much more a process may come to hold, as it is bounded by itself.

    The store keeps the ports of past cycles, so that no stranger gets them; asyncio makes its threads one by one.
    """
    if what == "descriptors" and name == "store":
        return MAX_RETIRED
    return min(32, (os.cpu_count() or 1) + 4) if what == "threads" else 0


@dataclass(frozen=True)
class Held:
    """What a process holds. `children`: those directly below it, without workers."""

    cycle: int
    name: str
    pid: int
    rss_kib: int
    descriptors: int
    threads: int
    children: int


@dataclass(frozen=True)
class Ours:
    """The processes to look at: what was started, and what that started of ours."""

    coordinator: int
    agents: dict[str, int]

    def named(self) -> dict[str, int]:
        found = {"coordinator": self.coordinator, "store": _only_child(self.coordinator)}
        for node, agent in self.agents.items():
            found[f"agent {node}"] = agent
            for pid in _children(agent):
                found[f"{_name(pid)} {node}"] = pid
        return found


def _children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _only_child(pid: int) -> int:
    (child,) = _children(pid)
    return child


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip().removeprefix("nvrx-")


def _held(cycle: int, name: str, pid: int) -> Held:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Held(
        cycle,
        name,
        pid,
        int(fields["VmRSS"].split()[0]),
        len(os.listdir(f"/proc/{pid}/fd")),
        int(fields["Threads"]),
        len(_children(pid)) if name.partition(" ")[0] != "supervisor" else 0,
    )


def _running(address: str, cycles: int) -> Iterator[int]:
    """The numbers of cycles as they begin to run, to the last one."""
    with grpc.insecure_channel(address) as channel:
        stub = run_pb2_grpc.RunServiceStub(channel)
        revision = 1
        while True:
            with contextlib.suppress(grpc.RpcError):  # the run is not there yet
                for response in stub.WatchFacts(run_pb2.WatchFactsRequest(run_id=RUN_ID, from_revision=revision)):
                    revision = response.fact.revision + 1
                    if response.fact.kind == "CycleRunning":
                        yield response.fact.cycle
                        if response.fact.cycle >= cycles:
                            return


def soak(scratch: Path, cycles: int) -> list[Held]:
    """Run so many cycles; what was held at each look."""
    log = scratch / "log"
    options = ["--listen", "127.0.0.1:0", "--state-dir", str(scratch / "state"), "--http", "off"]
    serve = [sys.executable, "-m", "nvrx.server.cli", "serve", *options, "--log-level", "warning"]
    coordinator = processes.start(serve, os.environ, log, stdout=subprocess.PIPE)
    assert coordinator.stdout is not None
    line = coordinator.stdout.readline().decode()
    if not line:
        raise RuntimeError(f"the coordinator did not start; see {log}")
    address = line.split()[-1]
    agents = {}
    for node in NODES:
        join = [sys.executable, "-m", "nvrx.client.cli", "join", "--coordinator", address, "--run-id", RUN_ID]
        join += ["--node-id", node, "--nnodes", "2", "--nproc-per-node", "2", "--log-dir", str(scratch / "logs")]
        join += ["--max-restarts", str(cycles), "--restart-backoff", "0", "--max-node-failures", "0"]
        command = ["sh", "-c", WORKER.format(last=cycles)]
        agents[node] = processes.start([*join, "--log-level", "warning", "--", *command], os.environ, log).pid
    ours = Ours(coordinator.pid, agents)
    found: list[Held] = []
    every = max(cycles // SAMPLES, 1)
    for cycle in _running(address, cycles):
        if cycle % every == 0:
            found += [_held(cycle, name, pid) for name, pid in ours.named().items()]
            say(f"cycle {cycle} of {cycles}")
    return found


def grown(found: Sequence[Held]) -> list[str]:
    """What became more between the first look after the start and the last; one line each."""
    last = {one.name: one for one in found if one.cycle == found[-1].cycle}
    first = {one.name: one for one in found if one.cycle == _first_look(found)}
    lines = [f"{name} was not there at first" for name in last.keys() - first.keys()]
    for name, before in first.items():
        after = last.get(name)
        if after is None or after.pid != before.pid:
            lines.append(f"{name} ended on the way")
            continue
        for what in ("descriptors", "threads", "children"):
            if getattr(after, what) - getattr(before, what) > borne(name, what):
                lines.append(f"{name}: {what} {getattr(before, what)} -> {getattr(after, what)}")
    return lines


def _first_look(found: Sequence[Held]) -> int:
    """Not the very first: what is made once, at the first failure, is no leak."""
    looks = sorted({one.cycle for one in found})
    return looks[min(2, len(looks) - 1)]


def table(found: Sequence[Held]) -> str:
    heads = ["process", "cycle", "RSS KiB", "descriptors", "threads", "children"]
    lines = ["".join([heads[0].ljust(18), *(head.rjust(13) for head in heads[1:])])]
    looks = [0, _first_look(found), found[-1].cycle]
    for name, of_one in itertools.groupby(sorted(found, key=lambda one: (one.name, one.cycle)), lambda one: one.name):
        for one in (one for one in of_one if one.cycle in looks):
            cells = [one.cycle, one.rss_kib, one.descriptors, one.threads, one.children]
            lines.append("".join([name.ljust(18), *(str(cell).rjust(13) for cell in cells)]))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cycles", type=int, default=200, help="(default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every single figure there")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="where logs and state are kept meanwhile")
    options = parser.parse_args(argv)
    with framed(options, keep_logs=False, where="nothing here") as frame:
        found = soak(frame.scratch, options.cycles)
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found]))
    leaks = grown(found)
    for leak in leaks:
        print(f"LEAK {leak}")
    return 1 if leaks else 0


if __name__ == "__main__":
    sys.exit(main())
