"""The world that a coordinator would choose for nodes that are not there: the rules themselves, on a run made up.

Knows no file and prints nothing; holds no rule of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from nvrx.core.allocation import DOMAIN_VARIABLE, GROUP_VARIABLE, domain_id, replacement_group, replacement_group_size
from nvrx.core.commands import Join
from nvrx.core.facts import (
    Cause,
    CycleEnded,
    Failure,
    NodeInfo,
    NodeJoined,
    NodeLost,
    NodesDrained,
    Placed,
    RunOpened,
    Seat,
    Standby,
    WorldChosen,
)
from nvrx.core.ids import CycleNumber, DomainId, GroupRank, Incarnation, InfraRank, RunId
from nvrx.core.join import check_join
from nvrx.core.launch import launch_problem
from nvrx.core.muster import Muster
from nvrx.core.narrate import order_warning
from nvrx.core.placement import Absent, Shortage
from nvrx.core.presence import Health, HealthReport, Presence
from nvrx.core.refused import Reason, Refused
from nvrx.core.run import Cycle, Run, evolve
from nvrx.core.shape import Settings, SettingsWish, Shape
from nvrx.core.topology import BadVariable, order_sources, restart_count, settle_source, told_array_rank, variable
from nvrx.core.world import absent, place_world, world_chosen

from .plan_file import NodeState, PlanFile, PlannedNode, PlannedShape

RUN_ID = RunId("plan")
_NOW = 0.0
_HEALTH = {NodeState.DEGRADED: HealthReport(Health.DEGRADED), NodeState.UNHEALTHY: HealthReport(Health.UNHEALTHY)}


@dataclass(frozen=True)
class Chosen:
    """The world: the run after it was chosen, who could not be, and what a person should know."""

    run: Run
    cycle: Cycle
    absent: tuple[Absent, ...]
    remark: str = ""
    warning: str = ""


@dataclass(frozen=True)
class Short:
    """There is no world, and why."""

    reason: str


@dataclass(frozen=True)
class RefusedNode:
    """A node that could not join, so that there is nothing to choose from."""

    node_id: str
    reason: Reason
    message: str


Plan: TypeAlias = Chosen | Short | RefusedNode


def plan(file: PlanFile) -> Plan:
    """Let the nodes of a file join in its order, lose those that are lost, and choose."""
    presence = Presence()
    try:
        run = _gathered(file, presence)
    except _NodeRefused as error:
        return RefusedNode(error.node_id, error.refused.reason, error.refused.message)
    run = _with_previous_world(run, file.nodes)
    drained = tuple(one.node_id for one in file.nodes if one.state is NodeState.DRAINING)
    if drained:
        run = evolve(run, NodesDrained(_NOW, drained))
    for one in file.nodes:
        if one.state in _HEALTH and one.node_id in presence.nodes:
            presence.nodes[one.node_id].health = _HEALTH[one.state]
    found = place_world(run, presence, _NOW)
    if isinstance(found, Shortage):
        return Short(found.reason)
    fact = world_chosen(run, presence, found, None, _NOW)
    after = evolve(run, fact)
    cycle = after.cycle
    assert cycle is not None
    warning = order_warning(after, fact) or ""
    shown = {one.node.node_id for one in cycle.standbys}
    gone = tuple(one for one in absent(run, presence, _NOW) if one.node_id not in shown)
    return Chosen(after, cycle, gone, found.remark, warning)


class _NodeRefused(Exception):
    """A refusal, and whom it was for."""

    def __init__(self, node_id: str, refused: Refused) -> None:
        super().__init__(refused.message)
        self.node_id = node_id
        self.refused = refused


def _gathered(file: PlanFile, presence: Presence) -> Run:
    """The run once all have joined: first those that are lost by now, so that they take nobody's place."""
    live = [(one, Incarnation(f"plan-{number}")) for number, one in enumerate(file.nodes) if not _is_lost(one)]
    lost = [(one, Incarnation(f"plan-{number}")) for number, one in enumerate(file.nodes) if _is_lost(one)]
    muster: Muster | None = None
    for node, incarnation in live:
        try:
            command = _join(node, file.shape, incarnation)
            if muster is None:
                muster = Muster(_opened(command.shape, check_join(command), lost), presence, _NOW)
            muster.join(command)
        except BadVariable as error:
            raise _NodeRefused(node.node_id, Refused(Reason.INVALID_FIELD, str(error))) from error
        except Refused as error:
            raise _NodeRefused(node.node_id, error) from error
    if muster is None:
        shape = _shape(file.shape, file.shape.replacement_group_size)
        problem = shape.problem()
        if problem is not None:
            raise _NodeRefused("", Refused(Reason.ILLEGAL_WORLD, problem))
        return _opened(shape, Settings(), lost)
    return muster.run()


def _is_lost(node: PlannedNode) -> bool:
    return node.state is NodeState.LOST


def _opened(shape: Shape, settings: Settings, lost: Sequence[tuple[PlannedNode, Incarnation]]) -> Run:
    """The run when nobody is left of those that were lost."""
    run = evolve(None, RunOpened(_NOW, RUN_ID, shape, settings))
    for node, incarnation in lost:
        joined = NodeJoined(_NOW, _lost(node, shape, incarnation))
        run = evolve(evolve(run, joined), NodeLost(_NOW, node.node_id, incarnation, ""))
    return run


def _join(node: PlannedNode, given: PlannedShape, incarnation: Incarnation) -> Join:
    """What the agent of a node would ask. Raises BadVariable where it would not start."""
    env = _environment(node)
    problem = launch_problem(env, given.nnodes)
    if problem is not None:
        raise BadVariable(problem)
    group = replacement_group(env)
    segments = given.segment_size is not None
    info = NodeInfo(
        node_id=node.node_id,
        incarnation=incarnation,
        address=str(node.node_id),
        pid=0,
        order_sources=order_sources(env, str(node.node_id), node.node_id),
        array_rank=told_array_rank(env),
        replacement_group_id=group.group_id if group is not None else None,
        group_array_job_id=group.array_job_id if group is not None else "",
        domain_id=domain_id(env, None) if segments else DomainId(variable(env, DOMAIN_VARIABLE)) or None,
        restart_count=restart_count(env),
    )
    size = replacement_group_size(env, given.replacement_group_size, group)
    return Join(info, _shape(given, size), SettingsWish())


def _environment(node: PlannedNode) -> dict[str, str]:
    """The node's variables, with what the file says of its group and domain over them."""
    given = {GROUP_VARIABLE: node.replacement_group_id, DOMAIN_VARIABLE: node.domain_id}
    return {**node.env, **{name: text for name, text in given.items() if text}}


def _lost(node: PlannedNode, shape: Shape, incarnation: Incarnation) -> NodeInfo:
    """What is known of a node that is gone: as much as its variables say. It is not there to be refused."""
    env = _environment(node)
    info = NodeInfo(node.node_id, incarnation, str(node.node_id), 0)
    with contextlib.suppress(BadVariable):
        group = replacement_group(env)
        if group is not None:
            info = dataclasses.replace(info, replacement_group_id=group.group_id, group_array_job_id=group.array_job_id)
    with contextlib.suppress(BadVariable):
        info = dataclasses.replace(info, order_sources=order_sources(env, str(node.node_id), node.node_id))
    with contextlib.suppress(BadVariable):
        if shape.segment_size is not None:
            info = dataclasses.replace(info, domain_id=domain_id(env, None))
    return info


def _shape(given: PlannedShape, group_size: int | None) -> Shape:
    return Shape(
        given.nnodes.min_nodes,
        given.nnodes.max_nodes,
        given.nproc_per_node,
        parallel=given.parallel,
        segment_size=given.segment_size,
        replacement_group_size=1 if group_size is None else group_size,
        rank_policy=given.rank_policy,
    )


def _with_previous_world(run: Run, nodes: Sequence[PlannedNode]) -> Run:
    """The run after a cycle in which the nodes had their previous group ranks, and that has ended."""
    ranks = {one.node_id: one.previous_group_rank for one in nodes if one.previous_group_rank is not None}
    if not ranks:
        return run
    placed = {
        node_id: Placed(node_id, one.info.incarnation, one.info.address, InfraRank(position), str(node_id))
        for position, (node_id, one) in enumerate(run.members.items())
    }
    before = WorldChosen(
        at=_NOW,
        cycle=CycleNumber(0),
        order_source=settle_source([one.info.order_sources for one in run.live_members()]),
        seats=tuple(
            Seat(placed[one], GroupRank(rank)) for one, rank in sorted(ranks.items(), key=lambda item: item[1])
        ),
        standbys=tuple(Standby(one, "") for node_id, one in placed.items() if node_id not in ranks),
        master=None,
    )
    ended = CycleEnded(_NOW, CycleNumber(0), Failure(Cause.NODE_LOST))
    return evolve(evolve(run, before), ended)
