"""Times our store server and torch's own side by side: operations, bursts of connections, waking, memory.

Servers take turns; the clients are raw sockets in a process beside them, so that the server is what is measured.
The parts: frame, hostnames, processes, store_servers, store_load, store_measure, store_figures; here the command line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import processes, store_figures, store_measure
from bench.frame import framed, say
from bench.recovery import commit, package_version
from bench.store_measure import Sample
from bench.store_servers import KINDS

MEMORY_REPS = 2
LATE_REPS = 2
_NOTE_WIDTH = 110
_PARTS = ("operations", "bursts", "late", "memory")


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--reps", type=int, default=5, help="of each measurement (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.2, help="per operation, each time (default %(default)s)")
    parser.add_argument("--kinds", default="bridge,torch", help=f"of {','.join(KINDS)} (default %(default)s)")
    parser.add_argument("--parts", default=",".join(_PARTS), help="comma-separated (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every single figure there")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="where servers keep logs")
    parser.add_argument("--keep", action="store_true", help="keep the work directory")
    options = parser.parse_args(argv)
    for name, known in (("kinds", KINDS), ("parts", _PARTS)):
        chosen = getattr(options, name).split(",")
        if unknown := [one for one in chosen if one not in known]:
            parser.error(f"unknown {name} {unknown}; there are {list(known)}")
        setattr(options, name, chosen)
    if options.reps < 1:
        parser.error("--reps must be at least 1")
    return options


def conditions(options: argparse.Namespace, names_problem: str | None) -> dict[str, object]:
    return {
        "reps": options.reps,
        "seconds": options.seconds,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": os.uname().release,
        "python": sys.version.split()[0],
        "torch": package_version("torch"),
        "uvloop": package_version("uvloop"),
        "commit": commit(),
        "host_names": f"as set up here ({names_problem})" if names_problem else "files only",
    }


def headline(facts: dict[str, object]) -> str:
    software = ", ".join(f"{name} {facts[name]}" for name in ("kernel", "python", "torch", "uvloop", "commit"))
    return "\n".join(
        [
            "A store server under load; raw clients on the same machine, values of 64 bytes",
            f"{facts['cores']} cores, {software}; host names: {facts['host_names']}",
            f"{facts['reps']} repetitions of {facts['seconds']} s each, servers in turn "
            f"(memory {MEMORY_REPS}, late names {LATE_REPS})",
        ]
    )


NOTES = [
    "get is WAIT and GET, multi_get is WAIT and MULTI_GET, as torch's client does them: two round trips; set is SET, "
    "which is not answered, and a CHECK after it",
    "clients and server share the machine's cores, and with many clients the rate is as much theirs as the server's: "
    "the CPU time per operation is the scheduler's account of all the server's threads, and the better figure",
    "kernel memory of sockets is not in the resident memory of either",
]


def measure(options: argparse.Namespace, scratch: Path) -> Iterator[Sample]:
    kinds, reps = options.kinds, options.reps
    if "operations" in options.parts:
        yield from store_measure.operations(kinds, reps, options.seconds, scratch)
    if "bursts" in options.parts:
        yield from store_measure.bursts(kinds, reps, scratch)
    if "late" in options.parts:
        yield from late_names(kinds, min(reps, LATE_REPS), scratch)
    if "memory" in options.parts:
        yield from store_measure.memory(kinds, min(reps, MEMORY_REPS), scratch)


def late_names(kinds: Sequence[str], reps: int, scratch: Path) -> Iterator[Sample]:
    argv = [sys.executable, "-m", "bench.store_measure", ",".join(kinds), str(reps), str(scratch)]
    log = scratch / "late.log"
    running = processes.start(argv, os.environ, log, stdout=subprocess.PIPE)
    assert running.stdout is not None
    for line in running.stdout:
        yield Sample(**json.loads(line))
    if running.wait() != 0:
        say(f"without figures where names are answered late: {log.read_text().strip().rpartition(chr(10))[2]}")


def collect(options: argparse.Namespace, scratch: Path) -> list[Sample]:
    samples = []
    started_s = time.monotonic()
    for sample in measure(options, scratch):
        samples.append(sample)
        elapsed_s = time.monotonic() - started_s
        say(f"{elapsed_s:.0f} s, {sample.kind} {sample.rep + 1}: {sample.measure} {sample.value:,.1f}")
    return samples


def write_json(file: Path, facts: dict[str, object], kinds: Sequence[str], samples: Sequence[Sample]) -> None:
    report = {
        "conditions": facts,
        "summary": store_figures.summary(samples, kinds),
        "samples": [asdict(sample) for sample in samples],
    }
    file.write_text(json.dumps(report, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    with framed(options, keep_logs=True, where="torch's figures") as frame:
        facts = conditions(options, frame.names_problem)
        samples = collect(options, frame.scratch)
        frame.keep_logs = options.keep

    print(headline(facts), end="\n\n")
    print(store_figures.tables(samples, options.kinds), end="\n\n")
    for line in NOTES:
        print(textwrap.fill(f"- {line}", _NOTE_WIDTH, subsequent_indent="  "))
    if options.json:
        write_json(options.json, facts, options.kinds, samples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
