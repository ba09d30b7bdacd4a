"""What people and programs look at: rank maps, cycles, runs, nodes, facts. One way: core -> proto."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf import json_format

from nvrx.core.budgets import replacements_used, restarts_used
from nvrx.core.facts import Fact, Failure, Placed, Standby
from nvrx.core.ids import CycleNumber, Revision, first_rank, global_rank
from nvrx.core.member import Member
from nvrx.core.narrate import describe_failure, subject_of, tell
from nvrx.core.presence import NodePresence
from nvrx.core.ranks import MappedNode, WorkerPlace, active_nodes, mapped_nodes, node_reason, node_state, replacements
from nvrx.core.run import Cycle, CycleState, Run, SeatState
from nvrx.v1 import common_pb2, rank_map_pb2, run_pb2

from .membership import device_message, health_message, phase_value, settings_message, shape_message
from .units import duration, timestamp


def _cycle_state(state: CycleState) -> common_pb2.CycleState.ValueType:
    return common_pb2.CycleState.Value(f"CYCLE_STATE_{state.value}")


def _wall(cycle: Cycle, at: float) -> float:
    """Wall time of a moment on the run's clock, by the nearest stamp of the cycle."""
    if cycle.ended_at is not None:
        return cycle.ended_time + (at - cycle.ended_at)
    return cycle.started_time + (at - cycle.started_at)


def _row(node: Placed) -> common_pb2.RankMapNode:
    return common_pb2.RankMapNode(
        node_id=node.node_id,
        address=node.address,
        incarnation=node.incarnation,
        infra_rank=node.infra_rank,
        order_key=node.order_key,
        replacement_group_id=node.replacement_group_id or "",
        domain_id=node.domain_id or "",
        devices=[device_message(one) for one in node.devices],
    )


_SEAT_OUTCOMES = {
    SeatState.SUCCEEDED: common_pb2.WORKER_OUTCOME_SUCCEEDED,
    SeatState.FAILED: common_pb2.WORKER_OUTCOME_FAILED,
    SeatState.STOPPED_BY_AGENT: common_pb2.WORKER_OUTCOME_STOPPED_BY_AGENT,
    SeatState.LOST: common_pb2.WORKER_OUTCOME_LOST,
}


def rank_map_node(run: Run, mapped: MappedNode) -> common_pb2.RankMapNode:
    """An active node's row."""
    row = _row(mapped.node)
    per_node = run.shape.workers_per_node
    row.group_rank = mapped.group_rank
    row.first_rank = first_rank(mapped.group_rank, per_node)
    row.local_world_size = per_node
    if mapped.state is not None:
        row.outcome.state = _SEAT_OUTCOMES[mapped.state]
    for one in mapped.exits:
        row.outcome.exits.append(
            common_pb2.WorkerExit(
                rank=global_rank(mapped.group_rank, one.local_rank, per_node),
                local_rank=one.local_rank,
                exit_code=one.exit_code,
                signal=one.signal,
                message=one.message,
                stopped_by_agent=one.stopped_by_agent,
                hung=one.hung,
            )
        )
    return row


def standby_node(standby: Standby) -> common_pb2.RankMapNode:
    """The row of a member that was not chosen."""
    row = _row(standby.node)
    row.reason = standby.reason
    return row


def rank_map(run: Run, cycle: Cycle) -> common_pb2.RankMap:
    """A cycle's map, its rows left out."""
    run = run.as_of(cycle)
    message = common_pb2.RankMap(
        run_id=run.run_id,
        cycle=cycle.number,
        state=_cycle_state(cycle.state),
        start_time=timestamp(cycle.started_time),
        end_time=timestamp(cycle.ended_time) if cycle.ended_at is not None else None,
        order_source=common_pb2.OrderSource.Value(f"ORDER_SOURCE_{cycle.order_source.value}"),
        rank_policy=common_pb2.RankPolicy.Value(f"RANK_POLICY_{cycle.shape.rank_policy.value}"),
        world_size=run.shape.world_size,
        group_world_size=run.shape.min_nodes,
        workers_per_node=run.shape.workers_per_node,
    )
    if cycle.failure is not None:
        message.failure.CopyFrom(_failure(cycle, cycle.failure))
    return message


def whole_rank_map(run: Run, cycle: Cycle) -> common_pb2.RankMap:
    """A cycle's map with all its rows; whoever sends it has to mind its size."""
    message = rank_map(run, cycle)
    message.nodes.extend(rank_map_node(run, one) for one in mapped_nodes(run, cycle))
    message.standbys.extend(standby_node(one) for one in cycle.standbys)
    return message


def _failure(cycle: Cycle, failure: Failure) -> common_pb2.Failure:
    return common_pb2.Failure(
        cause=common_pb2.Cause.Value(f"CAUSE_{failure.cause.value}"),
        node_id=failure.node_id or "",
        rank=failure.rank,
        local_rank=failure.local_rank,
        exit_code=failure.exit_code,
        signal=failure.signal,
        message=failure.message,
        time=timestamp(_wall(cycle, failure.at)),
        stderr_tail=failure.stderr_tail,
        consequences=[
            common_pb2.Consequence(
                cause=common_pb2.Cause.Value(f"CAUSE_{one.cause.value}"),
                node_id=one.node_id or "",
                rank=one.rank,
                local_rank=one.local_rank,
                exit_code=one.exit_code,
                signal=one.signal,
                message=one.message,
                time=timestamp(_wall(cycle, one.at)),
            )
            for one in cycle.consequences
        ],
    )


def cycle_summary(run: Run, cycle: Cycle) -> rank_map_pb2.Cycle:
    """One line of the list of cycles."""
    run = run.as_of(cycle)
    message = rank_map_pb2.Cycle(
        cycle=cycle.number,
        state=_cycle_state(cycle.state),
        start_time=timestamp(cycle.started_time),
        world_size=run.shape.world_size,
        replacements=[
            rank_map_pb2.Replacement(left_node_id=one.left, came_node_id=one.came) for one in replacements(run, cycle)
        ],
    )
    if cycle.ended_at is not None:
        message.end_time.CopyFrom(timestamp(cycle.ended_time))
    before = run.find_cycle(CycleNumber(cycle.number - 1))
    is_first = cycle.number == run.life_began_with
    if not is_first and before is not None and before.ended_at is not None and cycle.running_at is not None:
        message.recovery_time.CopyFrom(duration(cycle.running_at - before.ended_at))
    failure = cycle.failure
    if failure is not None:
        message.cause = common_pb2.Cause.Value(f"CAUSE_{failure.cause.value}")
        message.cause_text = describe_failure(failure)
        message.node_id = failure.node_id or ""
        if failure.rank is not None:
            message.rank = failure.rank
    return message


def lookup_match(run: Run, place: WorkerPlace) -> rank_map_pb2.LookupMatch:
    """Where a worker is or was."""
    run = run.as_of(place.cycle)
    node = place.seat.node
    message = rank_map_pb2.LookupMatch(
        cycle=place.cycle.number,
        rank=global_rank(place.seat.group_rank, place.local_rank, run.shape.workers_per_node),
        local_rank=place.local_rank,
        group_rank=place.seat.group_rank,
        node_id=node.node_id,
        address=node.address,
        state=_cycle_state(place.cycle.state),
    )
    device = next((one for one in node.devices if one.local_rank == place.local_rank), None)
    if device is not None:
        message.device.CopyFrom(device_message(device))
    return message


def run_message(run: Run, states: Mapping[str, int], waiting: str, notices: Iterable[str] = ()) -> run_pb2.Run:
    """How a run stands; `states` counts its nodes by state, `waiting` says why nothing runs (may be empty), `notices`
    what speaks against nodes."""
    cycle = run.cycle
    message = run_pb2.Run(
        run_id=run.run_id,
        state=common_pb2.RunState.Value(f"RUN_STATE_{run.state.value}"),
        shape=shape_message(run.shape),
        settings=settings_message(run.settings),
        active_nodes=active_nodes(run),
        standby_nodes=states.get("STANDBY", 0),
        restarts_used=restarts_used(run),
        replacements_used=replacements_used(run),
        waiting_reason=waiting,
        reason=run.close_reason,
        step=run.progress,
        health_notices=notices,
    )
    message.phase = common_pb2.CYCLE_STATE_FORMING
    if cycle is not None:
        message.cycle = cycle.number
        message.cycle_state = _cycle_state(cycle.state)
        message.order_source = common_pb2.OrderSource.Value(f"ORDER_SOURCE_{cycle.order_source.value}")
        if cycle.is_live:
            message.phase = message.cycle_state
            message.remark = cycle.remark
    if not run.is_open:
        message.phase = common_pb2.CYCLE_STATE_ENDED
        message.exit_code = run.exit_code
    return message


def node_message(run: Run, member: Member, heard: NodePresence | None, now: float) -> run_pb2.Node:
    """A member, present or past."""
    info = member.info
    message = run_pb2.Node(
        node_id=info.node_id,
        incarnation=info.incarnation,
        address=info.address,
        pid=info.pid,
        state=common_pb2.NodeState.Value(f"NODE_STATE_{node_state(run, member).value}"),
        replacement_group_id=info.replacement_group_id or "",
        domain_id=info.domain_id or "",
        version=info.version,
        connected=heard is not None and heard.connected,
        reason=node_reason(run, member),
    )
    cycle = run.cycle
    if cycle is not None:
        placed = {one.node.node_id: one.node for one in cycle.standbys}
        seat = cycle.seat_of.get(info.node_id)
        node = seat.node if seat is not None else placed.get(info.node_id)
        if node is not None and node.incarnation == info.incarnation:
            message.infra_rank = node.infra_rank
            message.order_key = node.order_key
            if seat is not None:
                message.group_rank = seat.group_rank
    if heard is not None and member.is_live:
        message.phase = phase_value(heard.phase)
        if heard.cycle is not None:
            message.cycle = heard.cycle
        if heard.health is not None:
            message.health.CopyFrom(health_message(heard.health))
        if heard.heard_at is not None:
            message.last_heard.CopyFrom(duration(max(0.0, now - heard.heard_at)))
    return message


def fact_message(revision: Revision, fact: Fact, detail: Mapping[str, Any]) -> run_pb2.Fact:
    """A row of a run's journal; `detail` is the fact as plain values."""
    about = subject_of(fact)
    message = run_pb2.Fact(
        revision=revision,
        time=timestamp(fact.time),
        kind=type(fact).__name__,
        cycle=about.cycle,
        node_id=about.node_id or "",
        text=tell(fact),
    )
    json_format.ParseDict(dict(detail), message.detail)
    return message
