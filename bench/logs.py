"""Times a worker that writes much: into a plain file, and under nvrx with its output written by the log process.

Ways take turns, every turn is a fresh worker; what is timed is the worker, from its first write to its last.
One node's own parts alone (supervisor and log process), no coordinator. Compares sizes, so that nothing is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from nvrx.client.log_link import LogLink
from nvrx.client.supervisor_link import Exited, Identity, SupervisorLink, WorkerSpec

ROOT = Path(__file__).resolve().parents[1]
MEBIBYTE = 1024 * 1024
_TIMED = """
import os, sys, time
begun = time.monotonic()
{body}
sys.stdout.flush()
took = time.monotonic() - begun
open(os.environ['BENCH_TOOK'], 'w').write(str(took))
"""
KINDS = {
    "blocks": """
block = b'y' * 65535 + b'\\n'
for _ in range(int(sys.argv[1]) * 16):
    for fd in (1, 2):
        rest = memoryview(block)
        while rest:
            rest = rest[os.write(fd, rest):]
""",
    "lines": """
line = 'step 123456 | loss 1.234567 | lr 3.0e-4 | ' + 'x' * 57
for _ in range(int(sys.argv[1]) * 1024 * 1024 // 100):
    print(line)
    print(line, file=sys.stderr)
""",
}
"""Python's standard output is written 8 KiB at a time, its standard error line by line."""
WAYS = {
    "file": "plain file",
    "none": "nvrx --tee none",
    "all": "nvrx --tee all, into a file",
}


def paths(directory: Path) -> tuple[Path, Path]:
    return directory / "rank-0.out", directory / "rank-0.err"


def command(kind: str, megabytes: int) -> list[str]:
    return [sys.executable, "-S", "-c", _TIMED.format(body=KINDS[kind]), str(megabytes)]


async def under_nvrx(kind: str, megabytes: int, way: str, directory: Path) -> None:
    """This process stands for the agent: its standard output and error are where lines are shown."""
    logs = await LogLink.start()
    link = await SupervisorLink.start(
        directory / "runtime", "bench", Identity("bench", "n0", "1"), handover_fd=logs.handover_fd
    )
    logs.supervised(link.hand_outputs_over_again)
    out, err = paths(directory)
    worker = WorkerSpec(
        local_rank=0,
        argv=command(kind, megabytes),
        env=dict(os.environ),
        cwd=str(directory),
        stdout_path=str(out),
        stderr_path=str(err),
        prefix="[rank 0] " if way == "all" else None,
    )
    await link.spawn(0, [worker])
    while not isinstance(event := await link.events.get(), Exited):
        pass
    await link.close()
    await logs.close()
    if event.exit_code != 0:
        raise SystemExit(f"the worker ended with {event.message}")


def measure(kind: str, megabytes: int, way: str) -> float:
    """The worker's time in seconds. Raises SystemExit where output is missing."""
    with tempfile.TemporaryDirectory(prefix="nvrx-bench-logs-", dir=os.environ.get("BENCH_DIR")) as name:
        directory = Path(name)
        took = directory / "took"
        env = {**os.environ, "BENCH_TOOK": str(took), "PYTHONPATH": str(ROOT)}
        out, err = paths(directory)
        if way == "file":
            with out.open("ab") as to_out, err.open("ab") as to_err:
                subprocess.run(command(kind, megabytes), stdout=to_out, stderr=to_err, env=env, check=True)
        else:
            argv = [sys.executable, "-m", "bench.logs", "--one", way, "--kind", kind, "--megabytes", str(megabytes)]
            with (directory / "shown.out").open("wb") as to_out, (directory / "shown.err").open("wb") as to_err:
                subprocess.run([*argv, "--directory", name], stdout=to_out, stderr=to_err, env=env, check=True)
        least = megabytes * MEBIBYTE - 100
        for path in (out, err):
            if path.stat().st_size < least:
                raise SystemExit(f"{WAYS[way]}: {path.name} has {path.stat().st_size} bytes of {least}")
        return float(took.read_text())


def compare(kind: str, megabytes: int, turns: int) -> None:
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    load = os.getloadavg()[0]
    for turn in range(turns):
        ways = list(WAYS)
        for at in range(len(ways)):
            way = ways[(turn + at) % len(ways)]
            times[way].append(measure(kind, megabytes, way))
    base = statistics.median(times["file"])
    print(f"\n{kind}: {megabytes} MiB to standard output and as much to standard error, {turns} turns")
    print(f"{os.cpu_count()} processors, load {load:.1f} before and {os.getloadavg()[0]:.1f} after")
    print(f"{'':30}{'median s':>10}{'least s':>10}{'most s':>10}{'MB/s':>8}{'ratio':>8}{'ratio of least':>16}")
    for way, name in WAYS.items():
        seconds = times[way]
        median = statistics.median(seconds)
        rate = 2 * megabytes * MEBIBYTE / 1e6 / median
        print(
            f"{name:30}{median:10.3f}{min(seconds):10.3f}{max(seconds):10.3f}{rate:8.0f}"
            f"{median / base:8.2f}{min(seconds) / min(times['file']):16.2f}"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=200, help="to each of both outputs (default %(default)s)")
    parser.add_argument("--turns", type=int, default=5, help="per way (default %(default)s)")
    parser.add_argument("--kind", choices=list(KINDS), help="default: both")
    parser.add_argument("--one", choices=["none", "all"], help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one is not None:
        asyncio.run(under_nvrx(options.kind, options.megabytes, options.one, options.directory))
        return
    for kind in [options.kind] if options.kind else list(KINDS):
        compare(kind, options.megabytes, options.turns)


if __name__ == "__main__":
    main()
