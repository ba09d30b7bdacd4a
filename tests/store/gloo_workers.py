"""Workers that meet in a process group through a given store: `gloo_workers SCRATCH`, then a job a line.

torch is imported once; each job is run by ranks forked from here, which end as any Python program does, or at once if
the job is "brief". A rank that has not exited in time says where it hangs. Knows nothing of the servers.
"""

from __future__ import annotations

import faulthandler
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from .values import from_line, to_line

GRACE_S = 5.0
"""How long after the bound a rank may take to say where it hangs."""


@dataclass(frozen=True)
class Job:
    """What `world` ranks are to do, with an empty store on each of two ports, and by when all must have exited."""

    case: str
    world: int
    host: str
    ports: list[int]
    bound_s: float

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self.bound_s)


def _by_environment(job: Job, rank: int, port: int) -> None:
    """As the workers of an agent do."""
    os.environ.update(
        MASTER_ADDR=job.host,
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(job.world),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    dist.init_process_group("gloo", timeout=job.timeout)


def _by_store(job: Job, rank: int, port: int) -> None:
    store = dist.TCPStore(job.host, port, job.world, is_master=False, timeout=job.timeout)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world, timeout=job.timeout)


def _by_prefix(job: Job, rank: int, port: int) -> None:
    """Both times in the same store, apart by their prefixes alone."""
    store = dist.TCPStore(job.host, job.ports[0], is_master=False, timeout=job.timeout)  # type: ignore[attr-defined]
    within = dist.PrefixStore(f"attempt{job.ports.index(port)}", dist.PrefixStore("run", store))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=within, rank=rank, world_size=job.world, timeout=job.timeout)


def _by_hash(job: Job, rank: int, port: int) -> None:
    """Without any server: for a world of one."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world, timeout=job.timeout)


def _reduce(group: dist.ProcessGroup | None = None) -> int:
    number = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(number, group=group)
    return int(number)


def _meet(job: Job, rank: int) -> None:
    world = list(range(job.world))
    assert _reduce() == sum(world) + job.world
    gathered: list[object] = [None] * job.world
    dist.all_gather_object(gathered, {"rank": rank, "text": "é" * rank})
    assert gathered == [{"rank": one, "text": "é" * one} for one in world]
    dist.barrier()
    dist.monitored_barrier(timeout=job.timeout)


def _meet_in_groups(job: Job, rank: int) -> None:
    lower = list(range((job.world + 1) // 2))
    group = dist.new_group(lower, timeout=job.timeout)
    if rank in lower:
        assert _reduce(group) == sum(lower) + len(lower)
    if job.world % 2 == 0:
        pair, pairs = dist.new_subgroups(2, timeout=job.timeout)
        assert _reduce(pair) == 4 * (rank // 2) + 3
        assert len(pairs) == job.world // 2
    dist.barrier()


STARTS: dict[str, Callable[[Job, int, int], None]] = {
    "environment": _by_environment,
    "store": _by_store,
    "prefix": _by_prefix,
    "hash": _by_hash,
    "brief": _by_environment,
}


def _work(job: Job, rank: int) -> None:
    for port in job.ports:
        STARTS[job.case](job, rank, port)
        if job.case == "brief":
            assert _reduce() == job.world * (job.world + 1) // 2
            dist.barrier()
        else:
            _meet(job, rank)
            _meet_in_groups(job, rank)
        dist.destroy_process_group()
    if job.case == "brief":
        # Half a second of every rank's time is Python's own end.
        os._exit(0)


def _begin(job: Job, rank: int, scratch: Path) -> None:
    """In the forked process: say in a file what goes wrong, and where it hangs."""
    said = (scratch / f"rank{rank}").open("w")
    os.dup2(said.fileno(), 2)
    faulthandler.dump_traceback_later(job.bound_s, exit=True)
    _work(job, rank)


def _reap(ranks: dict[int, int], within_s: float) -> dict[int, int]:
    """Wait for processes; the exit status by rank. Who has not ended in time is killed."""
    deadline = time.monotonic() + within_s
    ends = {}
    with selectors.DefaultSelector() as waiting:
        for pid in ranks:
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        while waiting.get_map():
            ready = waiting.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                for key in waiting.get_map().values():
                    with suppress(ProcessLookupError):
                        os.kill(key.data, signal.SIGKILL)
                deadline += GRACE_S
            for key, _ in ready:
                waiting.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                ends[ranks[key.data]] = os.waitstatus_to_exitcode(status)
    return ends


def main() -> None:
    scratch = Path(sys.argv[1])
    for line in sys.stdin.buffer:
        job = Job(**from_line(line))
        ranks = {}
        for rank in range(job.world):
            pid = os.fork()
            if pid == 0:
                _begin(job, rank, scratch)
                return
            ranks[pid] = rank
        ends = _reap(ranks, job.bound_s + GRACE_S)
        failed = {
            str(rank): f"exit {code}\n{(scratch / f'rank{rank}').read_text()}" for rank, code in ends.items() if code
        }
        sys.stdout.buffer.write(to_line(failed))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
