"""Who may be a member of a run (rules A2, A3, A5, B1, B2, B4)."""

from __future__ import annotations

from functools import reduce

from .commands import Join
from .facts import Fact, NodeInfo, NodeJoined, NodeLost, RunReopened
from .groups import counted, places_taken, replaced_by, require_own_group
from .ids import name_problem
from .member import Member
from .presence import Presence
from .refused import Reason, Refused
from .run import Run, evolve
from .shape import Settings, SettingsWish, Shape, differences
from .topology import VARIABLE, OrderSource, advice_on_tie, order_key, order_value_problem, settle_source

MAX_CHECKPOINT_PATH = 4096
MAX_FINGERPRINT = 256 * 1024
MAX_MEMBERS_PER_NODE = 4
"""Live members for each node of MAX, those that do not count among them."""
MAX_LAST_CYCLE = 2**30
"""Cycles are 32-bit on the wire: far from the end, whatever a node says it has seen."""


def check_join(command: Join) -> Settings:
    """The settings of a run that this node would open. Raises Refused where a field can be in no run."""
    node = command.node
    problems = [
        name_problem("node id", node.node_id),
        name_problem("incarnation", node.incarnation),
        name_problem("address", node.address),
        name_problem("replacement group id", node.replacement_group_id) if node.replacement_group_id else None,
        name_problem("array job id", node.group_array_job_id) if node.group_array_job_id else None,
        name_problem("domain id", node.domain_id) if node.domain_id else None,
        _size_problem("checkpoint path", len(command.shape.checkpoint_path), MAX_CHECKPOINT_PATH),
        _size_problem("fingerprint", _fingerprint_size(command.shape), MAX_FINGERPRINT),
        _last_cycle_problem(node),
        *(order_value_problem(source, text) for source, text in node.order_sources.items()),
    ]
    for problem in problems:
        if problem is not None:
            raise Refused(Reason.INVALID_FIELD, problem, {"node_id": ascii(node.node_id)})
    settings = command.wish.over_defaults()
    for problem in (command.shape.problem(), settings.problem()):
        if problem is not None:
            raise Refused(Reason.ILLEGAL_WORLD, problem, {"node_id": node.node_id})
    return settings


def _size_problem(what: str, size: int, most: int) -> str | None:
    return f"{what} has {size} characters, at most {most} are allowed" if size > most else None


def _fingerprint_size(shape: Shape) -> int:
    return sum(len(name) + len(value) for name, value in shape.fingerprint.items())


def _last_cycle_problem(node: NodeInfo) -> str | None:
    if node.last_cycle is None or 0 <= node.last_cycle <= MAX_LAST_CYCLE:
        return None
    return f"last_cycle is {node.last_cycle}; 0 to {MAX_LAST_CYCLE} are possible"


def decide_join(run: Run, presence: Presence, command: Join, now: float) -> list[Fact]:
    """NodeJoined, or nothing for a member already there; raises Refused and leaves the run as it was."""
    settings = check_join(command)
    facts: list[Fact] = []
    if not run.is_open:
        _require_reopening(run, command)
        reopened = RunReopened(now, settings, command.shape, command.node.restart_count)
        return [reopened, NodeJoined(now, command.node)]
    _require_agreement(run, command.shape, command.wish)
    member = run.members.get(command.node.node_id)
    if member is not None and member.info.incarnation == command.node.incarnation:
        if member.is_live:
            return []
        raise Refused(
            Reason.STALE_INCARNATION,
            f"incarnation {command.node.incarnation} of node {command.node.node_id} was declared "
            f"{member.membership.value.lower()} ({member.gone_reason}); join as a new one",
            {"node_id": command.node.node_id, "incarnation": command.node.incarnation},
        )
    if member is not None and member.is_live:
        facts.append(_replace(presence, member, command, now))
    require_own_group(run, command.node)
    older = replaced_by(run, command.node)
    why = f"its unit was started again: node {command.node.node_id} is of restart {command.node.restart_count}"
    facts += [NodeLost(now, one.info.node_id, one.info.incarnation, why) for one in older]
    run = reduce(evolve, facts, run)
    _require_room(run, command.node)
    _require_own_place(run, command.node, presence.timing.lease_ttl_s)
    return [*facts, NodeJoined(now, command.node)]


def _require_reopening(run: Run, command: Join) -> None:
    if command.reopen or command.node.restart_count > run.restart_count:
        return
    raise Refused(
        Reason.RUN_CLOSED,
        f"run {run.run_id} is closed ({run.state.value}: {run.close_reason}); start another with --run-id, or "
        "this one again with --reopen",
        {"run_id": run.run_id, "state": run.state.value, "exit_code": str(run.exit_code)},
    )


def _require_agreement(run: Run, shape: Shape, wish: SettingsWish) -> None:
    found = differences(run.shape, run.settings, shape, wish)
    if found:
        listed = "; ".join(f"{one.field}: run has {one.run_has}, this node gives {one.node_gives}" for one in found)
        raise Refused(
            Reason.SHAPE_MISMATCH,
            f"this node does not agree with run {run.run_id}: {listed}; start all nodes with the same options "
            "and environment (--ignore-env NAME leaves a variable out)",
            {
                "run_id": run.run_id,
                **{
                    f"{one.field}.{side}": value
                    for one in found
                    for side, value in (("run", one.run_has), ("node", one.node_gives))
                },
            },
        )


def _replace(presence: Presence, member: Member, command: Join, now: float) -> NodeLost:
    """B2: a new incarnation takes an old one's place once that one's lease is over, Slurm requeued it, or the newcomer,
    on the same host, knows it to be dead."""
    old, newcomer = member.info, command.node
    known = presence.nodes.get(old.node_id)
    is_over = known is None or now >= known.lease_until
    free_in_s = max(0.0, known.lease_until - now) if known is not None else 0.0
    was_requeued = newcomer.restart_count > old.restart_count and not (known and known.connected)
    is_dead = command.replaces == old.incarnation and newcomer.host != "" and newcomer.host == old.host
    if is_over or was_requeued or is_dead:
        why = f"replaced by incarnation {newcomer.incarnation}"
        return NodeLost(now, old.node_id, old.incarnation, why)
    raise Refused(
        Reason.NODE_ALREADY_JOINED,
        f"node {old.node_id} has already joined from {old.address} (pid {old.pid}); this is {newcomer.address} "
        f"(pid {newcomer.pid}); give each agent its own --node-id",
        {
            "node_id": old.node_id,
            "joined_address": old.address,
            "joined_pid": str(old.pid),
            "joined_incarnation": old.incarnation,
            "joined_host": old.host,
            "address": newcomer.address,
            "pid": str(newcomer.pid),
            "lease_ttl_s": str(presence.timing.lease_ttl_s),
            "free_in_s": f"{free_in_s:.1f}",
        },
    )


def _require_room(run: Run, newcomer: NodeInfo) -> None:
    others = [one for one in run.live_members() if one.info.node_id != newcomer.node_id]
    if len(others) >= MAX_MEMBERS_PER_NODE * run.shape.max_nodes:
        raise Refused(
            Reason.LIMIT_EXCEEDED,
            f"run {run.run_id} has {len(others)} members that cannot be chosen or stand by; stop the agents of "
            "broken units",
            {"run_id": run.run_id},
        )
    before = sum(1 for one in counted(run) if one.info.node_id != newcomer.node_id)
    after = evolve(run, NodeJoined(run.last_at, newcomer))
    there, kept = sum(1 for _ in counted(after)), places_taken(run)
    if there <= run.shape.max_nodes < places_taken(after) > kept:
        raise Refused(
            Reason.RUN_FULL,
            f"run {run.run_id} has {before} nodes, keeps {kept - before} places for the rest of their units and allows "
            f"{run.shape.max_nodes}; there is no room for the unit of {newcomer.node_id}",
            {"run_id": run.run_id, "nodes": str(before), "max_nodes": str(run.shape.max_nodes)},
        )
    # One that does not count itself, as it is in quarantine, may make a group whole whose others then do.
    if there > max(before, run.shape.max_nodes):
        raise Refused(
            Reason.RUN_FULL,
            f"run {run.run_id} has {before} nodes and allows {run.shape.max_nodes}; {newcomer.node_id} would be "
            f"one more{'' if there == before + 1 else f', and make its group whole: {there}'}",
            {"run_id": run.run_id, "nodes": str(before), "max_nodes": str(run.shape.max_nodes)},
        )


def _require_own_place(run: Run, newcomer: NodeInfo, lease_ttl_s: float) -> None:
    """B4: no two live nodes with the same value in the source that the run orders by."""
    others = [one.info for one in run.live_members() if one.info.node_id != newcomer.node_id]
    everyone = [*others, newcomer]
    source = run.order_source or settle_source([one.order_sources for one in everyone])
    taken: dict[object, NodeInfo] = {}
    for one in everyone:
        text = one.order_sources.get(source)
        if text is None or source is OrderSource.NODE_ID:
            continue
        key = order_key(source, text, one.node_id)
        if key in taken:
            # A newcomer that lacks a source makes the run fall back to one in which others may tie.
            why = "" if one is newcomer else f" (as {newcomer.node_id}, which asks to join, has no better one)"
            raise Refused(
                Reason.DUPLICATE_INFRA_RANK,
                f"nodes {taken[key].node_id} and {one.node_id} both have {VARIABLE[source]}={text}, the order of "
                f"run {run.run_id}{why}; {advice_on_tie(source, text)}",
                {
                    "node_id": one.node_id,
                    "other_node_id": taken[key].node_id,
                    "variable": VARIABLE[source],
                    "value": text,
                    "lease_ttl_s": str(lease_ttl_s),
                },
            )
        taken[key] = one
