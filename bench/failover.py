"""Times how long a run is without a leader after the leading coordinator is killed, and what it costs to write to etcd.

Three members of etcd and two coordinators with run-time directories of their own, as on two hosts, all on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import grpc

from bench import processes
from bench.etcd import plan
from bench.frame import framed, say
from nvrx.channel import CHANNEL_OPTIONS
from nvrx.core.endpoint import HostPort
from nvrx.core.facts import Fact, NodeLeft
from nvrx.core.ids import Incarnation, NodeId, Revision, RunId
from nvrx.server.etcd.address import parse_etcd
from nvrx.server.etcd.client import Etcd
from nvrx.server.etcd.election import Election
from nvrx.server.etcd.lease import Lease
from nvrx.server.journals import Journal, Row
from nvrx.server.journals.etcd import EtcdJournal, shared_journal_id
from nvrx.server.journals.sqlite import SqliteJournal
from nvrx.v1 import common_pb2, join_pb2, join_pb2_grpc, run_pb2, run_pb2_grpc

MEMBERS = 3
ELECTION_MS = 1000
"""etcd's default."""
BOUND_BEYOND_TTL_S = 1.0
RENEWALS_PER_TTL = 3
ASK_EVERY_S = 0.005
PATIENCE_S = 60.0
BATCH = 100
WRITER_TTL_S = 60.0
READY = "nvrx-coord listening on "


@dataclass(frozen=True)
class Failover:
    """SIGKILL of the leader until the other coordinator answered GetRun, in seconds."""

    ttl_s: float
    lasted_s: float


@dataclass(frozen=True)
class Writing:
    """How long appends took, in seconds, by how many rows each had."""

    journal: str
    rows: int
    lasted_s: list[float]


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--reps", type=int, default=5, help="leaders killed for each lease (default %(default)s)")
    parser.add_argument("--ttl", default="2,5,10", help="leader's leases in seconds (default %(default)s)")
    parser.add_argument(
        "--appends", type=int, default=1000, help="appends timed for each journal (default %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every single figure there")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="where etcd and coordinators keep files")
    options = parser.parse_args(argv)
    options.ttl = [float(one) for one in options.ttl.split(",")]
    return options


@contextmanager
def etcd_cluster(scratch: Path) -> Iterator[str]:
    """Its members run within; what `--state` takes, without a prefix."""
    program = shutil.which("etcd")
    if program is None:
        raise SystemExit("etcd is not installed; try: apt-get install etcd-server")
    plans = plan(program, scratch / "etcd", MEMBERS, election_ms=ELECTION_MS)
    members = [
        processes.start(one.argv, {"PATH": os.environ["PATH"]}, scratch / f"etcd-{index}.log")
        for index, one in enumerate(plans)
    ]
    try:
        yield f"etcd://{','.join(f'127.0.0.1:{one.port}' for one in plans)}"
    finally:
        for member in members:
            member.kill()
            member.wait()


def start_coordinator(state: str, ttl_s: float, directory: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A coordinator that listens, and its address."""
    directory.mkdir(parents=True)
    argv = [sys.executable, "-m", "nvrx.server.cli", "serve", "--listen", "127.0.0.1:0", "--state", state]
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(processes.REPOSITORY), "XDG_RUNTIME_DIR": str(directory)}
    process = processes.start(
        [*argv, "--leader-ttl", f"{ttl_s:g}"], env, directory / "coordinator.log", stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    line = process.stdout.readline().decode().strip()
    if not line.startswith(READY):
        raise SystemExit(f"a coordinator did not start; its log is {directory / 'coordinator.log'}")
    return process, line.removeprefix(READY)


def until(done: Callable[[], bool], what: str) -> float:
    """Ask until it is so; when that was."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > give_up_at:
            raise SystemExit(f"waited {PATIENCE_S:g} s for {what}")
        time.sleep(ASK_EVERY_S)
    return time.monotonic()


def answers(call: Callable[[], object]) -> bool:
    try:
        call()
    except grpc.RpcError:
        return False
    return True


def measure_failover(state: str, ttl_s: float, rep: int, reps: int, directory: Path) -> Failover:
    """Kill a leader; the repetitions are spread over the time between two renewals of its lease."""
    prefix = uuid.uuid4().hex
    leader, leader_address = start_coordinator(f"{state}/{prefix}", ttl_s, directory / "1")
    with grpc.insecure_channel(leader_address, options=CHANNEL_OPTIONS) as channel:
        joins = join_pb2_grpc.JoinServiceStub(channel)
        shape = common_pb2.Shape(min_nodes=1, max_nodes=1, workers_per_node=1)
        join = join_pb2.JoinRequest(run_id="r", node_id="n0", incarnation="i", address="127.0.0.1", pid=1, shape=shape)
        until(lambda: answers(lambda: joins.Join(join, timeout=PATIENCE_S)), "the first leader")
    follower, address = start_coordinator(f"{state}/{prefix}", ttl_s, directory / "2")
    try:
        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            runs = run_pb2_grpc.RunServiceStub(channel)
            asked = run_pb2.GetRunRequest(run_id="r")
            assert not answers(lambda: runs.GetRun(asked, timeout=PATIENCE_S))
            time.sleep(ttl_s / RENEWALS_PER_TTL * (1 + rep / reps))
            killed_at = time.monotonic()
            leader.send_signal(signal.SIGKILL)
            led_at = until(lambda: answers(lambda: runs.GetRun(asked, timeout=PATIENCE_S)), "the next leader")
    finally:
        for process in (leader, follower):
            process.kill()
            process.wait()
    return Failover(ttl_s, led_at - killed_at)


def rows(first: int, count: int) -> list[Row]:
    fact: Fact = NodeLeft(1.0, NodeId("n0"), Incarnation("i"), "x" * 64)
    return [Row(RunId("r"), Revision(place), fact) for place in range(first, first + count)]


def time_appends(name: str, journal: Journal, appends: int) -> list[Writing]:
    """One row at a time, then many at once."""
    found, first = [], 1
    for count in (1, BATCH):
        lasted_s = []
        for _ in range(max(1, appends // count)):
            batch = rows(first, count)
            first += count
            began = time.perf_counter()
            journal.append(batch)
            lasted_s.append(time.perf_counter() - began)
        found.append(Writing(name, count, lasted_s))
    return found


async def measure_writing(state: str, appends: int, scratch: Path) -> list[Writing]:
    etcd = Etcd(parse_etcd(f"{state}/writing"))
    lease = await Lease.take(etcd, WRITER_TTL_S)
    keeping = asyncio.create_task(lease.keep())
    election = Election(etcd, HostPort("127.0.0.1", 1))
    term = await election.win(lease)
    journal = EtcdJournal(etcd, await shared_journal_id(etcd), election.leader_key, term, lease)
    found = await asyncio.to_thread(time_appends, f"etcd, {MEMBERS} members", journal, appends)
    keeping.cancel()
    await lease.give_back()
    await etcd.close()
    sqlite = SqliteJournal(scratch / "sqlite")
    found += time_appends("SQLite", sqlite, appends)
    sqlite.close()
    return found


def print_report(failovers: Sequence[Failover], writings: Sequence[Writing]) -> None:
    cores = len(os.sched_getaffinity(0))
    print(f"Several coordinators on etcd, all on one machine: {cores} cores, kernel {platform.release()}\n")
    print("SIGKILL of the leader -> the next one answers GetRun, seconds: median (min-max)")
    for ttl_s in dict.fromkeys(one.ttl_s for one in failovers):
        lasted = [one.lasted_s for one in failovers if one.ttl_s == ttl_s]
        bound_s = ttl_s + BOUND_BEYOND_TTL_S
        verdict = "kept" if max(lasted) <= bound_s else "MISSED"
        spread = f"{median(lasted):6.2f} ({min(lasted):.2f}-{max(lasted):.2f})"
        print(f"  --leader-ttl {ttl_s:4g}: {spread}, {len(lasted)} times; bound {bound_s:g}: {verdict}")
    print("\nan append until it is durable, ms: p50 / p99")
    for one in writings:
        cuts = quantiles(one.lasted_s, n=100, method="inclusive") if len(one.lasted_s) > 1 else one.lasted_s * 99
        print(f"  {one.journal:16} {one.rows:4} rows: {cuts[49] * 1e3:7.2f} / {cuts[98] * 1e3:.2f}")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    with framed(options, keep_logs=False, where="figures") as frame, etcd_cluster(frame.scratch) as state:
        writings = asyncio.run(measure_writing(state, options.appends, frame.scratch))
        failovers = []
        for ttl_s in options.ttl:
            for rep in range(options.reps):
                directory = frame.scratch / f"{ttl_s:g}-{rep}"
                failovers.append(measure_failover(state, ttl_s, rep, options.reps, directory))
                say(f"--leader-ttl {ttl_s:g}: {failovers[-1].lasted_s:.2f} s")
    print_report(failovers, writings)
    if options.json:
        report = {"failovers": [vars(one) for one in failovers], "writings": [vars(one) for one in writings]}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
