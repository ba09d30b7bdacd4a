"""Run simulations: `python -m tests.sim --seed N [--shrink]` shows one, `--seeds N` runs many and stops at none."""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from .plan import make_plan
from .report import describe
from .shrink import shrunk
from .simulation import simulate

DEFAULT_SEEDS = 10_000
SEEDS_AT_ONCE = 50
SHOWN_EVERY_S = 5.0
MAX_SHOWN = 5
FIRST_OF = "NVRX_SOAK_FIRST"
COUNT_OF = "NVRX_SOAK_SEEDS"


@dataclass(frozen=True)
class _Broken:
    seed: int
    text: str


@dataclass(frozen=True)
class _Some:
    """What some seeds came to."""

    count: int
    simulated_s: float
    broken: tuple[_Broken, ...]


def _run_some(seeds: range) -> _Some:
    simulated_s = 0.0
    broken: list[_Broken] = []
    for seed in seeds:
        outcome = simulate(make_plan(seed))
        simulated_s += outcome.simulated_s
        if outcome.broken is not None:
            broken.append(_Broken(seed, str(outcome.broken)))
    return _Some(len(seeds), simulated_s, tuple(broken))


def _show(seed: int, *, shrink: bool) -> bool:
    """Show one seed. True if all rules held."""
    outcome = simulate(make_plan(seed))
    if outcome.broken is not None and shrink:
        outcome = shrunk(outcome, simulate)
    print(describe(outcome))
    return outcome.broken is None


def _soak(first: int, count: int, processes: int) -> bool:
    """Run many seeds, with progress. True if all rules held in all of them."""
    parts = [range(at, min(at + SEEDS_AT_ONCE, first + count)) for at in range(first, first + count, SEEDS_AT_ONCE)]
    began = shown = time.monotonic()
    done, simulated_s = 0, 0.0
    broken: list[_Broken] = []
    with ProcessPoolExecutor(processes) as pool:
        for part in pool.map(_run_some, parts):
            done += part.count
            simulated_s += part.simulated_s
            for one in part.broken:
                print(f"seed {one.seed} broke {one.text}", flush=True)
            broken += part.broken
            now = time.monotonic()
            if now - shown >= SHOWN_EVERY_S or done == count:
                shown = now
                hours = simulated_s / 3600
                print(
                    f"{done} of {count} seeds, {len(broken)} broke, {hours:.1f} simulated hours in {now - began:.0f} s",
                    flush=True,
                )
    for one in broken[:MAX_SHOWN]:
        print(f"\n== seed {one.seed}, with the faults that it takes ==")
        _show(one.seed, shrink=True)
    return not broken


def main() -> int:
    """The exit code: 0 where all rules held."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="show one seed with its transcript")
    parser.add_argument("--shrink", action="store_true", help="leave out the faults that it does not take")
    parser.add_argument("--seeds", type=int, default=int(os.environ.get(COUNT_OF, DEFAULT_SEEDS)), metavar="N")
    parser.add_argument("--first", type=int, default=int(os.environ.get(FIRST_OF, 0)), metavar="N")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, metavar="N")
    asked = parser.parse_args()
    if asked.seed is not None:
        held = _show(asked.seed, shrink=asked.shrink)
    else:
        held = _soak(asked.first, asked.seeds, asked.processes)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
