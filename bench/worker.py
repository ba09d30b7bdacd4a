"""The training worker that is timed: an all_reduce loop. Knows nothing of who starts it.

The clock is read before anything is imported. Marks go to the datagram socket that BENCH_SOCKET names, as
text: `boot RANK PID NODE CYCLE SECONDS` and, after the first all_reduce, the same with `step`. SECONDS is
CLOCK_MONOTONIC, which all processes of one machine share.
"""

import time

BOOT_S = time.clock_gettime(time.CLOCK_MONOTONIC)

import os  # noqa: E402
import socket  # noqa: E402

STEP_TIME_S = 0.05


def send_mark(kind: str, at_s: float) -> None:
    env = os.environ
    cycle = env.get("NVRX_CYCLE") or env.get("TORCHELASTIC_RESTART_COUNT") or env["BENCH_CYCLE"]
    text = f"{kind} {env['RANK']} {os.getpid()} {env['BENCH_NODE']} {cycle} {at_s!r}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(text.encode(), env["BENCH_SOCKET"])


def main() -> None:
    send_mark("boot", BOOT_S)
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ones = torch.ones(1024)
    dist.all_reduce(ones)
    send_mark("step", time.clock_gettime(time.CLOCK_MONOTONIC))
    while True:
        time.sleep(STEP_TIME_S)
        dist.all_reduce(torch.ones(1024))


if __name__ == "__main__":
    main()
