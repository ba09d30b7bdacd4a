"""Times the recovery of a training job after a kill: nvrx, cold and warm, torchrun and the floor side by side.

Peers take turns, every repetition is a fresh job; repetitions that failed are counted, not hidden.
The parts: frame, hostnames, processes, marks, worker, floor, peers, measure, figures; here the command line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

if __package__ in (None, ""):  # run as a file: the repository's root is not on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from bench import figures, processes
from bench.frame import framed, say
from bench.measure import LAYOUTS, QUIET_BEFORE_KILL_S, Kill, Recovery, measure
from bench.peers import PEERS, Nvrx
from nvrx.core.presence import DEFAULT_LEASE_TTL_S

DEFAULT_TIMEOUT_S = 120.0
FOR_NVRX_ALONE = {"node", "coordinator"}
STRUCK: dict[Kill, str] = {
    "worker": "SIGKILL of one worker",
    "agent": "SIGKILL of a node (its launcher or agent, and its workers)",
    "node": "SIGSTOP of a node (its agent, supervisor and workers)",
    "coordinator": "SIGKILL of the coordinator, its start, and SIGKILL of one worker as soon as it answers",
}
_NOTE_WIDTH = 110
_CLOCK_REALTIME_COARSE = 5  # what Linux file systems stamp files with; not named in the time module


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--reps", type=int, default=10, help="repetitions per peer (default %(default)s)")
    parser.add_argument("--peers", help=f"comma-separated (default {','.join(PEERS)}, or of nvrx where it is alone)")
    parser.add_argument(
        "--kill",
        choices=list(LAYOUTS),
        default="worker",
        help="worker: 4 nodes x 2, one worker dies; agent: 3 nodes x 2 and a standby, a node's processes die; node: "
        "the same, suspended, so that nothing is closed; coordinator: 4 nodes x 2, it is killed and started again, "
        "then one worker dies; the last two for nvrx alone, cold and warm",
    )
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, metavar="S", help="per wait")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every single figure there")
    parser.add_argument("--work-dir", type=Path, metavar="DIR", help="where jobs keep logs and the journal")
    parser.add_argument("--keep", action="store_true", help="keep the work directory")
    options = parser.parse_args(argv)
    possible = [name for name, peer in PEERS.items() if options.kill not in FOR_NVRX_ALONE or issubclass(peer, Nvrx)]
    options.peers = options.peers.split(",") if options.peers is not None else possible
    if unknown := [name for name in options.peers if name not in possible]:
        parser.error(f"peers {unknown} are unknown, or take no part in --kill {options.kill}; there are {possible}")
    if options.reps < 1:
        parser.error("--reps must be at least 1")
    return options


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def commit() -> str:
    """Of the repository that is measured; "unknown" in a copy without its history."""
    argv = ["git", "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(argv, cwd=processes.REPOSITORY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()


def conditions(options: argparse.Namespace, names_problem: str | None) -> dict[str, object]:
    return {
        "kill": options.kill,
        "reps": options.reps,
        "layout": asdict(LAYOUTS[options.kill]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "commit": commit(),
        "host_names": f"as set up here ({names_problem})" if names_problem else "files only",
        "file_clock_resolution_s": time.clock_getres(_CLOCK_REALTIME_COARSE),
    }


def headline(facts: dict[str, object], kill: Kill) -> str:
    layout = LAYOUTS[kill]
    standby = f" and {layout.standby_nodes} standby" if layout.standby_nodes else ""
    world = f"{layout.active_nodes} nodes x {layout.workers_per_node} workers{standby}"
    software = ", ".join(f"{name} {facts[name]}" for name in ("kernel", "python", "torch", "commit"))
    return "\n".join(
        [
            f"Recovery after {STRUCK[kill]}; {world}, gloo, all on one machine",
            f"{facts['cores']} cores, {software}; host names: {facts['host_names']}",
            f"{facts['reps']} repetitions each, peers in turn, a fresh job each time, struck "
            f"{QUIET_BEFORE_KILL_S:.0f} s after its first all_reduce",
        ]
    )


def notes(facts: dict[str, object], kill: Kill, peers: Sequence[str], results: Sequence[Recovery]) -> list[str]:
    imports = f"{LAYOUTS[kill].world_size} cold imports of torch on {facts['cores']} cores"
    loads = [r.load_before for r in results]
    lines = [PEERS[name].note for name in peers]
    lines.append(f"the first all_reduce comes after {imports}, the same for all peers that start workers cold")
    if "nvrx-warm" in peers:
        lines.append("nvrx-warm imports nothing after the strike: its workers are forked from what was imported before")
    if any(issubclass(PEERS[name], Nvrx) for name in peers):
        lines.append(
            "new map: when the last agent's rank map file was written, by its file time against that of a "
            "file written once the pidfd was readable, or the node suspended; "
            f"within {facts['file_clock_resolution_s']} s (the file system's clock)"
        )
    if kill == "node":
        lines.append(
            f"the lease is {DEFAULT_LEASE_TTL_S:g} s and counts from the node's last heartbeat, up to an interval "
            "before the SIGSTOP; when it is over is known to within the time of a call"
        )
    if kill == "coordinator":
        lines.append(
            "the worker dies while agents are still on their way back (they try at most a second apart), and the new "
            "world waits for them"
        )
    if kill == "agent":
        lines.append(
            "a killed process closes its connections; a machine that goes silent does not: it is missed when "
            "its lease is over (nvrx) or its keep-alives fail (torchrun, which needs them in both cases)"
        )
    lines.append(f"load average when a job was started: {min(loads):.1f}-{max(loads):.1f}")
    return lines


def run_all(options: argparse.Namespace, scratch: Path) -> list[Recovery]:
    """Each round starts with another peer, so that none always runs on what another left behind."""
    results: list[Recovery] = []
    for rep in range(options.reps):
        turn = rep % len(options.peers)
        for name in options.peers[turn:] + options.peers[:turn]:
            directory = scratch / f"{name}-{rep}"
            result = measure(PEERS[name], options.kill, rep, directory, options.timeout, say)
            results.append(result)
            say(f"{name} {rep + 1}: {one_line(result, options.kill, directory)}")
    return results


def one_line(result: Recovery, kill: Kill, directory: Path) -> str:
    if result.failure:
        return f"NOT RECOVERED: {result.failure}; logs in {directory}"
    found = {measure.key: measure.value(result) for measure in figures.measures(kill)}
    return ", ".join(f"{key} {value:.3f}" for key, value in found.items() if value is not None)


def print_report(facts: dict[str, object], kill: Kill, peers: Sequence[str], results: Sequence[Recovery]) -> None:
    print(headline(facts, kill), end="\n\n")
    print(figures.table(results, peers, kill), end="\n\n")
    if len(peers) > 1:
        print(figures.comparisons(results, peers, kill), end="\n\n")
    for line in notes(facts, kill, peers, results):
        print(textwrap.fill(f"- {line}", _NOTE_WIDTH, subsequent_indent="  "))


def write_json(
    file: Path, facts: dict[str, object], kill: Kill, peers: Sequence[str], results: Sequence[Recovery]
) -> None:
    report = {
        "conditions": facts,
        "summary": figures.summary(results, peers, kill),
        "recoveries": [asdict(result) for result in results],
    }
    file.write_text(json.dumps(report, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    with framed(options, keep_logs=options.keep, where="figures") as frame:
        facts = conditions(options, frame.names_problem)
        results = run_all(options, frame.scratch)
        failed = any(result.failure for result in results)
        frame.keep_logs = frame.keep_logs or failed

    print_report(facts, options.kill, options.peers, results)
    if options.json:
        write_json(options.json, facts, options.kill, options.peers, results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
