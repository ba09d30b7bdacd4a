"""The floor: what recovery costs when there is nothing to agree on. One process, no coordinator, no agents.

It starts all workers, waits for the first death (pidfd), sends SIGTERM to the others, reaps them all and
starts all anew at once. What restarts workers as new processes can hardly be faster on the same machine.

    floor.py NODES WORKERS_PER_NODE COMMAND [ARG...]
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_all(nodes: int, workers_per_node: int, cycle: int, argv: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    world_size = nodes * workers_per_node
    shared = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            argv,
            env=os.environ
            | shared
            | {"RANK": str(rank), "BENCH_NODE": f"n{rank // workers_per_node}", "BENCH_CYCLE": str(cycle)},
        )
        for rank in range(world_size)
    ]


def wait_for_first_death(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    handles = [os.pidfd_open(worker.pid) for worker in workers]
    select.select(handles, [], [])
    for handle in handles:
        os.close(handle)


def main() -> None:
    nodes, workers_per_node, argv = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    cycle = 0
    while True:
        workers = start_all(nodes, workers_per_node, cycle, argv)
        wait_for_first_death(workers)
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
        cycle += 1


if __name__ == "__main__":
    main()
