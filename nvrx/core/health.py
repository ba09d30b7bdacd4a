"""What nodes' health checks lead to (rule G11): who is unhealthy, who is well again, which check is itself the suspect.

Reads a Run and what is heard. Ends no cycle and chooses no world.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .facts import CheckSuspected, CheckTrusted, Fact, NodeFailedCheck, NodeRecovered
from .groups import places_taken
from .ids import NodeId
from .narrate import list_names
from .placement.words import LAST_RESORT
from .presence import Health, HealthReport, NodePresence, Presence
from .run import Run, evolve
from .standing import Ailment

MASS_WITHIN_S = 60.0
"""A check that fails on too many nodes within this time is itself the suspect."""
MASS_SHARE = 10
"""Too many: more than one node in so many, and more than one."""


def judge(run: Run, presence: Presence, now: float) -> Iterator[Fact]:
    """One step of what nodes' health leads to. After a restart nobody is judged before all may be back (rule E5)."""
    if presence.is_recovering(now):
        return
    failing = _failing(run, presence)
    yield from _suspected(run, failing, now) or _failed(run, failing, now) or _recovered(run, presence, now)
    yield from _trusted(run, presence, failing, now)


def is_excused(run: Run, report: HealthReport) -> bool:
    """Whether a failed check counts for nobody: a node that it fails on is chosen last, not never."""
    return report.state is Health.UNHEALTHY and report.check in run.suspected_checks


def is_excused_with_others(run: Run, found: Ailment) -> bool:
    """Whether a node was found unhealthy by a check that is suspect by now, as one of those that made it so."""
    suspect = run.suspected_checks.get(found.check)
    return suspect is not None and found.at >= suspect.at - MASS_WITHIN_S


def may_train(run: Run, presence: Presence, node_id: NodeId) -> bool:
    """C1: nothing that is known of a node's health keeps it out of a world."""
    report = presence.health_of(node_id)
    return node_id not in run.unhealthy and (report.state is not Health.UNHEALTHY or is_excused(run, report))


def why_last(run: Run, presence: Presence, node_id: NodeId) -> str:
    """C1, D7: why a node is chosen last, not never; empty where it is not."""
    report = presence.health_of(node_id)
    if report.state is Health.DEGRADED:
        return f"degraded ({report}): chosen last" if report.reason else LAST_RESORT
    if is_excused(run, report):
        return f"degraded ({report}; but that check is suspect itself): chosen last"
    return "quarantined: chosen last" if node_id in run.quarantined else ""


def why_absent(run: Run, presence: Presence, node_id: NodeId) -> str:
    """Why a node's health keeps it out of every world; empty where it does not."""
    if may_train(run, presence, node_id):
        return ""
    told = str(run.unhealthy.get(node_id) or presence.health_of(node_id))
    return f"unhealthy ({told})" if told else "unhealthy"


def _failing(run: Run, presence: Presence) -> dict[NodeId, NodePresence]:
    """Members that say that a check fails on them now."""
    return {
        node_id: node
        for node_id, node in presence.nodes.items()
        if node.health is not None
        and node.health.state is Health.UNHEALTHY
        and (member := run.live(node_id)) is not None
        and member.info.incarnation == node.incarnation
    }


def _is_mass(run: Run, found: Mapping[NodeId, float]) -> bool:
    there = {one.info.node_id for one in run.live_members()} | found.keys()
    return len(found) > max(1.0, len(there) / MASS_SHARE)


def _suspected(run: Run, failing: Mapping[NodeId, NodePresence], now: float) -> list[Fact]:
    """Checks that began to fail on too many nodes within a minute, those counted that have left since."""
    new = {node.failing_check for node_id, node in failing.items() if node_id not in run.unhealthy}
    facts: list[Fact] = []
    for check in sorted(new - run.suspected_checks.keys()):
        began = {node_id: node.failing_from for node_id, node in failing.items() if node.failing_check == check}
        began |= {node_id: found.at for node_id, found in run.unhealthy.items() if found.check == check}
        recent = {node_id: at for node_id, at in began.items() if now < at + MASS_WITHIN_S}
        if _is_mass(run, recent):
            count = sum(1 for _ in {one.info.node_id for one in run.live_members()} | recent.keys())
            facts.append(CheckSuspected(now, check, tuple(sorted(recent)), count))
    return facts


def _failed(run: Run, failing: Mapping[NodeId, NodePresence], now: float) -> list[Fact]:
    return [
        NodeFailedCheck(now, node_id, node.incarnation, node.health.check, node.health.reason)
        for node_id, node in failing.items()
        if node_id not in run.unhealthy and node.health is not None and not is_excused(run, node.health)
    ]


def _recovered(run: Run, presence: Presence, now: float) -> list[Fact]:
    """A5, E8: who is well again, or was found unhealthy by mistake, may be chosen; who would be one too many then waits
    for a place."""
    facts: list[Fact] = []
    for node_id, found in run.unhealthy.items():
        is_excused_now = _is_excused_now(run, presence, node_id, found)
        if not is_excused_now and not well_again(run, presence, node_id):
            continue
        fact = NodeRecovered(now, node_id, found.check if is_excused_now else "")
        after = evolve(run, fact)
        if places_taken(after) <= run.shape.max_nodes:
            facts.append(fact)
            run = after
    return facts


def _is_excused_now(run: Run, presence: Presence, node_id: NodeId, found: Ailment) -> bool:
    """Whether nothing speaks against a node but a check that is suspect: of those on which it fails one was the first,
    and was believed."""
    node, member = presence.nodes.get(node_id), run.live(node_id)
    if node is None or member is None or node.incarnation != member.info.incarnation or node.health is None:
        return False
    return node.health.check == found.check and is_excused(run, node.health) and is_excused_with_others(run, found)


def _fails_within(
    run: Run, presence: Presence, failing: Mapping[NodeId, NodePresence], suspect: CheckSuspected
) -> dict[NodeId, float]:
    """Nodes that speak for a check still being suspect, and until when they do; for ever while it fails on them."""
    before = suspect.at - MASS_WITHIN_S
    found = {
        node_id: known.at + MASS_WITHIN_S
        for node_id, known in run.unhealthy.items()
        if known.check == suspect.check and run.live(node_id) is None
    }
    for node_id, node in presence.nodes.items():
        known = run.unhealthy.get(node_id)
        if node.failing_until is None or node.failing_check != suspect.check:
            continue
        if known is None or known.at >= before:
            fails = node_id in failing and failing[node_id].failing_check == suspect.check
            found[node_id] = float("inf") if fails else node.failing_until + MASS_WITHIN_S
    return found


def _trusted(run: Run, presence: Presence, failing: Mapping[NodeId, NodePresence], now: float) -> Iterator[Fact]:
    for check, suspect in run.suspected_checks.items():
        if now < _suspect_until(presence, suspect):
            continue
        until = _fails_within(run, presence, failing, suspect)
        if not _is_mass(run, {node_id: at for node_id, at in until.items() if now < at}):
            yield CheckTrusted(now, check)


def _suspect_until(presence: Presence, suspect: CheckSuspected) -> float:
    """A minute at least; after a restart of the coordinator, once more."""
    return max(suspect.at, presence.recovering_until or 0.0) + MASS_WITHIN_S


def deadlines(run: Run, presence: Presence, now: float) -> Iterator[float]:
    """When a check may count again, if nothing more is heard."""
    failing = _failing(run, presence) if run.suspected_checks else {}
    for suspect in run.suspected_checks.values():
        times = [_suspect_until(presence, suspect), *_fails_within(run, presence, failing, suspect).values()]
        yield from (one for one in times if now < one < float("inf"))


def well_again(run: Run, presence: Presence, node_id: NodeId) -> bool:
    """Whether a node that is kept out as unhealthy says that it is well: it waits for a place."""
    node, member = presence.nodes.get(node_id), run.live(node_id)
    if node is None or member is None or node.incarnation != member.info.incarnation or node.health is None:
        return False
    return node.health.state is not Health.UNHEALTHY


def degraded(run: Run, presence: Presence) -> str:
    """Members that are chosen last for the next world, with why; empty where there are none."""
    names = [
        f"{node_id} ({node.health})"
        for node_id, node in presence.nodes.items()
        if node.health is not None
        and (node.health.state is Health.DEGRADED or is_excused(run, node.health))
        and node_id not in run.unhealthy
        and run.live(node_id) is not None
    ]
    return list_names(names)
