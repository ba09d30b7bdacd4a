"""An agent to be killed: starts a supervisor and the workers it is told, says their pids, then waits."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys

from nvrx.client.log_link import LogLink
from nvrx.client.supervisor_link import Identity, Note, SupervisorLink, WorkerSpec


def start_holder_of_all_descriptors() -> int:
    """As a library that forks would do: the socket stays open past our end."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one that listed the folder
            os.set_inheritable(fd, True)
    return subprocess.Popen(["sleep", "100"], close_fds=False).pid


async def main() -> None:
    order = json.loads(sys.argv[1])
    logs = await LogLink.start() if order.get("logs") else None
    link = await SupervisorLink.start(
        order["runtime_dir"],
        order["key"],
        Identity("run", "node", "1"),
        handover_fd=logs.handover_fd if logs is not None else None,
    )
    if logs is not None:
        logs.supervised(link.hand_outputs_over_again)
    workers = [WorkerSpec(**worker) for worker in order["workers"]]
    if "prewarm" in order:
        link.prewarm(order["prewarm"], workers[0].argv, workers[0].env, workers[0].cwd)
        while not (isinstance(event := await link.events.get(), Note) and "is ready" in event.text):
            pass
    spawned = await link.spawn(0, workers)
    told = {
        "supervisor_pid": link.pid,
        "worker_pids": [worker.pid for worker in spawned.workers],
        "warm": [worker.warm for worker in spawned.workers],
    }
    if logs is not None:
        told["log_pid"] = logs.pid
    if order["leak_descriptors"]:
        told["leaking_pid"] = start_holder_of_all_descriptors()
    print(json.dumps(told), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
