"""Times how soon a coordinator answers that is started on the journal of a long run.

For each size the journal is made with the core, then the real process is started on it again and again. A probe beside
it says where the time goes: imports, opening, reading rows, replaying them.
The parts: frame, processes, restart_journal; here the measurements and the command line.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import processes
from bench.frame import framed, say

_PROBE = "--probe"
_WIDTH = 11


@dataclass(frozen=True)
class Sample:
    """One start, in seconds. `listening_s`, `answer_s`: the real process, from its start on; the others: the probe.

    `read_s`: all rows, decoded; `load_s`: the same, and replayed.
    """

    imports_s: float
    open_s: float
    read_s: float
    load_s: float
    listening_s: float
    answer_s: float


@dataclass(frozen=True)
class Measured:
    """The starts on one journal."""

    members: int
    cycles: int
    rows: int
    size_mb: float
    samples: tuple[Sample, ...]


def probe(directory: Path) -> None:
    """In a process of its own: what a start is made of, as JSON on standard output."""
    began = time.perf_counter()
    import nvrx.server.cli  # noqa: F401  # its imports are what is timed
    from nvrx.core.presence import StoreMode, Timing
    from nvrx.server.engine import Engine
    from nvrx.server.journals.sqlite import SqliteJournal

    imported = time.perf_counter()
    journal = SqliteJournal(directory, allow_network_file_system=True)
    opened = time.perf_counter()
    gc.disable()  # as the coordinator does
    for _ in journal.load():
        pass
    read = time.perf_counter()
    engine = Engine(journal, clock=time.monotonic, wall=time.time, timing=Timing(), store=StoreMode.OFF)
    engine.load()
    loaded = time.perf_counter()
    journal.close()
    times = {
        "imports_s": imported - began,
        "open_s": opened - imported,
        "read_s": read - opened,
        "load_s": loaded - read,
    }
    print(json.dumps(times))


def first_answer(directory: Path, log: Path) -> dict[str, float]:
    """Start the real process, wait for its first answer to GetRun, end it."""
    import grpc

    from bench.restart_journal import RUN_ID
    from nvrx.v1 import run_pb2, run_pb2_grpc

    options = ["--listen", "127.0.0.1:0", "--state-dir", str(directory), "--allow-network-state"]
    began = time.perf_counter()
    process = processes.start(
        [sys.executable, "-m", "nvrx.server.cli", "serve", *options], os.environ, log, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    line = process.stdout.readline().decode()
    listening = time.perf_counter()
    if not line:
        raise RuntimeError(f"the coordinator did not start; see {log}")
    with grpc.insecure_channel(line.split()[-1]) as channel:
        run_pb2_grpc.RunServiceStub(channel).GetRun(run_pb2.GetRunRequest(run_id=RUN_ID), timeout=60.0)
    answered = time.perf_counter()
    process.terminate()
    process.wait()
    return {"listening_s": listening - began, "answer_s": answered - began}


def measure(directory: Path, log: Path) -> Sample:
    """One start of each."""
    probed = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), _PROBE, str(directory)],
        stdout=subprocess.PIPE,
        check=True,
        cwd=processes.REPOSITORY,
    )
    return Sample(**json.loads(probed.stdout), **first_answer(directory, log))


def table(found: Sequence[Measured]) -> str:
    names = list(Sample.__annotations__)
    heads = ["members", "cycles", "rows", "MB", *(name.removesuffix("_s") for name in names)]
    lines = ["seconds, medians", "".join(head.rjust(_WIDTH) for head in heads)]
    for one in found:
        cells = [str(one.members), str(one.cycles), str(one.rows), f"{one.size_mb:.1f}"]
        cells += [f"{median(getattr(sample, name) for sample in one.samples):.3f}" for name in names]
        lines.append("".join(cell.rjust(_WIDTH) for cell in cells))
    return "\n".join(lines)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--members", default="100,1000,4000", help="comma-separated (default %(default)s)")
    parser.add_argument("--cycles", type=int, default=100, help="(default %(default)s)")
    parser.add_argument("--exits", action="store_true", help="with a row for each node of each ended cycle")
    parser.add_argument("--reps", type=int, default=5, help="starts on each journal (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every single figure there")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="where journals and logs are kept meanwhile")
    parser.add_argument(_PROBE, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.members = [int(one) for one in options.members.split(",")]
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    if options.probe is not None:
        probe(options.probe)
        return 0
    from bench.restart_journal import write

    found = []
    with framed(options, keep_logs=False, where="the figures") as frame:
        for members in options.members:
            directory = frame.scratch / f"state-{members}"
            rows = write(directory, members, options.cycles, exits=options.exits)
            size_mb = sum(one.stat().st_size for one in directory.iterdir()) / 1e6
            say(f"{members} members, {options.cycles} cycles: {rows} rows, {size_mb:.1f} MB")
            samples = tuple(measure(directory, frame.scratch / "log") for _ in range(options.reps))
            found.append(Measured(members, options.cycles, rows, size_mb, samples))
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
