"""The smallest plan that still breaks the same rule: what a person wants to read. Knows no fault by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from .plan import Fault, Plan
from .simulation import Outcome

MAX_TRIES = 400


def shrunk(outcome: Outcome, simulate: Callable[[Plan], Outcome]) -> Outcome:
    """Leave out faults, many at once and then one by one, for as long as the same rule breaks."""
    assert outcome.broken is not None
    best, tries = outcome, 0
    size = max(1, len(best.plan.faults) // 2)
    while size and tries < MAX_TRIES:
        start = 0
        while start < len(best.plan.faults) and tries < MAX_TRIES:
            faults = best.plan.faults
            tried = simulate(_with(best.plan, (*faults[:start], *faults[start + size :])))
            tries += 1
            if tried.broken is not None and tried.broken.rule == outcome.broken.rule:
                best = tried
            else:
                start += size
        size //= 2
    return best


def _with(plan: Plan, faults: tuple[Fault, ...]) -> Plan:
    return dataclasses.replace(plan, faults=faults)
