"""The rules hold in each of some hundreds of simulated runs, and a seed always has the same course."""

from __future__ import annotations

import os
from collections import Counter
from typing import get_args

import pytest

from nvrx.core.facts import Cause, CycleEnded, Fact

from .plan import make_plan
from .report import describe
from .simulation import simulate

SEEDS_OF = "NVRX_SIM_SEEDS"
SEEDS = int(os.environ.get(SEEDS_OF, 480))
PARTS = 12
PER_PART = SEEDS // PARTS
LIVELY_SEEDS = 90
RARE = {"RunReopened", "NodeQuarantined", "QuarantineEnded", "CheckTrusted"}


@pytest.mark.rule(
    "A3", "B2", "C1", "C2", "C3", "D1", "D2", "D4", "D5", "D8", "D9", "D10", "E1", "E2", "E4", "E5", "F1", "G11", "H1"
)
@pytest.mark.parametrize("part", range(PARTS))
def test_the_rules_hold_whatever_happens(part: int) -> None:
    for seed in range(part * PER_PART, (part + 1) * PER_PART):
        outcome = simulate(make_plan(seed))
        assert outcome.broken is None, describe(outcome)


def test_a_seed_has_one_course() -> None:
    for seed in range(5):
        assert simulate(make_plan(seed)).transcript == simulate(make_plan(seed)).transcript


def test_much_happens_in_the_simulations() -> None:
    """Rules that hold of runs in which nothing happens say little."""
    kinds: Counter[str] = Counter()
    causes: Counter[Cause] = Counter()
    for seed in range(LIVELY_SEEDS):
        for fact in simulate(make_plan(seed)).facts:
            kinds[type(fact).__name__] += 1
            if isinstance(fact, CycleEnded):
                causes[fact.failure.cause] += 1
    missing = {one.__name__ for one in get_args(Fact)} - RARE - kinds.keys()
    assert not missing, kinds
    assert kinds["CycleRunning"] > 2 * LIVELY_SEEDS, kinds
    assert causes.keys() >= {
        Cause.WORKER_FAILED,
        Cause.HANG,
        Cause.NODE_LOST,
        Cause.NODE_LEFT,
        Cause.NODE_UNHEALTHY,
        Cause.DRAINED,
        Cause.PROMOTED,
    }, causes
