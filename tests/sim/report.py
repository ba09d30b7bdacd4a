"""What a broken simulation is told with: its seed, its plan, its transcript, and how to see it again."""

from __future__ import annotations

from .plan import Plan
from .simulation import Outcome


def describe_plan(plan: Plan) -> list[str]:
    """The plan in lines for a person."""
    shape, wish, timing = plan.shape, plan.wish, plan.timing
    return [
        f"seed {plan.seed}: {shape.min_nodes}:{shape.max_nodes} nodes of {len(plan.places)}, "
        f"{shape.workers_per_node} workers each, replacement groups of {shape.replacement_group_size}, "
        f"segments of {shape.segment_size}, ranks {shape.rank_policy.value.lower()}",
        f"max_restarts {wish.max_restarts}, max_replacements {wish.max_replacements}, "
        f"join_timeout {wish.join_timeout_s:g} s, last_call {wish.last_call_s:g} s, "
        f"stop grace {plan.stop_grace_s:g} s, coordinator grace {plan.coordinator_grace_s:g} s",
        f"heartbeats every {timing.heartbeat_interval_s:g} s, lease {timing.lease_ttl_s:g} s, "
        f"reconnect grace {timing.reconnect_grace_s:g} s",
        *(f"fault {fault}" for fault in plan.faults),
    ]


def describe(outcome: Outcome) -> str:
    """All of a simulation, and what broke."""
    lines = [*describe_plan(outcome.plan), "", *outcome.transcript, ""]
    if outcome.broken is None:
        lines.append(f"all rules held for {outcome.simulated_s:.0f} simulated seconds")
    else:
        lines.append(f"seed {outcome.plan.seed} broke {outcome.broken}")
        lines.append(f"again: python -m tests.sim --seed {outcome.plan.seed} --shrink")
    return "\n".join(lines)
