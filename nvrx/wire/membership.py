"""Joining and heartbeats, both ways. Refuses what cannot be read; decides nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from nvrx.core.commands import CycleExits, Join
from nvrx.core.facts import MAX_MESSAGE, MAX_STDERR_TAIL, Device, Endpoint, NodeInfo, WorkerExit
from nvrx.core.ids import (
    ArrayRank,
    CycleNumber,
    DomainId,
    GroupId,
    GroupRank,
    Incarnation,
    LocalRank,
    NodeId,
    RunId,
    first_rank,
)
from nvrx.core.parallel import ParallelSizes
from nvrx.core.presence import AgentPhase, Health, HealthReport, Word, health_report
from nvrx.core.ranks import Action, Assignment, Desired
from nvrx.core.refused import Reason, Refused
from nvrx.core.shape import RankPolicy, RestartBudget, Settings, SettingsWish, Shape
from nvrx.core.topology import OrderSource
from nvrx.v1 import common_pb2, heartbeat_pb2, join_pb2

from .units import duration, seconds

WIRE_VERSION = 1
MAX_REPORTS = 4096
MAX_STORE_PORTS = 16
MAX_HOST = 128
_SIGNAL_NAME = 32


def join_request(run_id: RunId, command: Join) -> join_pb2.JoinRequest:
    """What an agent sends to join."""
    node, shape, wish = command.node, command.shape, command.wish
    return join_pb2.JoinRequest(
        run_id=run_id,
        node_id=node.node_id,
        incarnation=node.incarnation,
        address=node.address,
        pid=node.pid,
        version=node.version,
        shape=shape_message(shape),
        settings=settings_message(wish),
        order_sources={source.value: text for source, text in node.order_sources.items()},
        array_rank=node.array_rank,
        replacement_group_id=node.replacement_group_id or "",
        domain_id=node.domain_id or "",
        fingerprint=shape.fingerprint,
        devices=[device_message(one) for one in node.devices],
        restart_count=node.restart_count,
        last_cycle=node.last_cycle,
        wire_version=WIRE_VERSION,
        reopen=command.reopen,
        group_array_job_id=node.group_array_job_id,
        stop_grace=duration(node.stop_grace_s),
        host=node.host,
        replaces=command.replaces or "",
    )


def join_command(request: join_pb2.JoinRequest) -> Join:
    """What a node asks for. Raises Refused where a field cannot be read."""
    theirs = request.wire_version if request.HasField("wire_version") else 1
    if theirs != WIRE_VERSION:
        raise Refused(
            Reason.WIRE_VERSION_MISMATCH,
            f"the agent (nvrx {request.version[:64]!a}) speaks wire version {theirs}, this coordinator "
            f"{WIRE_VERSION}; install the same major version on both sides",
            {"agent_wire_version": str(theirs), "coordinator_wire_version": str(WIRE_VERSION)},
        )
    replaces = Incarnation(request.replaces) if request.replaces else None
    return Join(_node_info(request), _shape(request), _wish(request.settings), request.reopen, replaces)


def _shape(request: join_pb2.JoinRequest) -> Shape:
    told = request.shape
    return Shape(
        told.min_nodes,
        told.max_nodes,
        told.workers_per_node,
        told.checkpoint_path,
        dict(request.fingerprint),
        parallel=_parallel_sizes(told.parallel_sizes),
        segment_size=told.segment_size if told.HasField("segment_size") else None,
        replacement_group_size=told.replacement_group_size if told.HasField("replacement_group_size") else 1,
        rank_policy=_rank_policy(told.rank_policy),
    )


def _rank_policy(value: common_pb2.RankPolicy.ValueType) -> RankPolicy:
    return RankPolicy.STICKY if value == common_pb2.RANK_POLICY_STICKY else RankPolicy.INFRA


def _parallel_sizes(told: common_pb2.ParallelSizes) -> ParallelSizes:
    return ParallelSizes(**{field.name: value for field, value in told.ListFields()})


def _node_info(request: join_pb2.JoinRequest) -> NodeInfo:
    known = {source.value: source for source in OrderSource}
    sources = {known[name]: text for name, text in request.order_sources.items() if name in known}
    sources.setdefault(OrderSource.NODE_ID, request.node_id)
    return NodeInfo(
        node_id=NodeId(request.node_id),
        incarnation=Incarnation(request.incarnation),
        address=request.address,
        pid=request.pid,
        version=request.version[:64],
        order_sources=sources,
        array_rank=ArrayRank(request.array_rank) if request.HasField("array_rank") else None,
        replacement_group_id=GroupId(request.replacement_group_id) if request.replacement_group_id else None,
        domain_id=DomainId(request.domain_id) if request.domain_id else None,
        devices=tuple(_device(one) for one in request.devices[:1024]),
        restart_count=request.restart_count,
        last_cycle=CycleNumber(request.last_cycle) if request.HasField("last_cycle") else None,
        group_array_job_id=request.group_array_job_id,
        host=request.host[:MAX_HOST],
        **({"stop_grace_s": seconds(request.stop_grace)} if request.HasField("stop_grace") else {}),
    )


def shape_message(shape: Shape) -> common_pb2.Shape:
    """The shape on the wire, without its fingerprint."""
    return common_pb2.Shape(
        min_nodes=shape.min_nodes,
        max_nodes=shape.max_nodes,
        workers_per_node=shape.workers_per_node,
        checkpoint_path=shape.checkpoint_path,
        parallel_sizes=_parallel_sizes_message(shape.parallel),
        segment_size=shape.segment_size,
        replacement_group_size=shape.replacement_group_size,
        rank_policy=common_pb2.RankPolicy.Value(f"RANK_POLICY_{shape.rank_policy.value}"),
    )


def _parallel_sizes_message(sizes: ParallelSizes) -> common_pb2.ParallelSizes | None:
    """Only what was given: a reader takes the rest as absent, which means the same."""
    given = {
        field.name: getattr(sizes, field.name)
        for field in dataclasses.fields(sizes)
        if getattr(sizes, field.name) != field.default
    }
    return common_pb2.ParallelSizes(**given) if given else None


def settings_message(settings: Settings | SettingsWish) -> common_pb2.Settings:
    """The settings that a run has, or those of them that a node asks for."""
    message = common_pb2.Settings()
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if value is None:
            continue
        name = field.name.removesuffix("_s")
        if field.name.endswith("_s"):
            getattr(message, name).CopyFrom(duration(value))
        elif isinstance(value, RestartBudget):
            message.restart_budget = common_pb2.RestartBudget.Value(f"RESTART_BUDGET_{value.value}")
        else:
            setattr(message, name, value)
    return message


def _wish(message: common_pb2.Settings) -> SettingsWish:
    asked: dict[str, Any] = {}
    for field in dataclasses.fields(SettingsWish):
        name = field.name.removesuffix("_s")
        if name == "restart_budget":
            asked[name] = _restart_budget(message.restart_budget)
        elif message.HasField(name):  # type: ignore[arg-type]
            value = getattr(message, name)
            asked[field.name] = seconds(value) if field.name.endswith("_s") else value
    return SettingsWish(**asked)


def _restart_budget(value: common_pb2.RestartBudget.ValueType) -> RestartBudget | None:
    known = {
        common_pb2.RESTART_BUDGET_FIXED: RestartBudget.FIXED,
        common_pb2.RESTART_BUDGET_PER_PROGRESS: RestartBudget.PER_PROGRESS,
    }
    return known.get(value)


def _device(message: common_pb2.Device) -> Device:
    numa = message.numa_node if message.HasField("numa_node") else None
    return Device(LocalRank(message.local_rank), message.uuid[:128], message.pci_bus_id[:128], numa)


def device_message(device: Device) -> common_pb2.Device:
    return common_pb2.Device(
        local_rank=device.local_rank, uuid=device.uuid, pci_bus_id=device.pci_bus_id, numa_node=device.numa_node
    )


def word_of(request: heartbeat_pb2.HeartbeatRequest) -> Word:
    """What a node says in a heartbeat, beside how its workers ended."""
    return Word(
        phase_of(request),
        CycleNumber(request.cycle) if request.HasField("cycle") else None,
        tuple(port for port in request.store_ports[:MAX_STORE_PORTS] if 0 < port < 65536),
        CycleNumber(request.acknowledged_cycle) if request.HasField("acknowledged_cycle") else None,
        max(0, request.progress.step) if request.progress.HasField("step") else None,
        _health_report(request.health) if request.HasField("health") else None,
    )


_HEALTH = {
    common_pb2.HEALTH_STATE_HEALTHY: Health.HEALTHY,
    common_pb2.HEALTH_STATE_DEGRADED: Health.DEGRADED,
    common_pb2.HEALTH_STATE_FAILED: Health.UNHEALTHY,
}
_HEALTH_STATE = {state: value for value, state in _HEALTH.items()}


def _health_report(told: common_pb2.Health) -> HealthReport | None:
    """What a node says of its health; None for a state of a later version."""
    state = _HEALTH.get(told.state)
    return None if state is None else health_report(state, told.check, told.reason)


def health_message(report: HealthReport) -> common_pb2.Health:
    return common_pb2.Health(state=_HEALTH_STATE[report.state], check=report.check, reason=report.reason)


def phase_of(request: heartbeat_pb2.HeartbeatRequest) -> AgentPhase:
    """The phase that an agent reports; one from a later version counts as idle."""
    if request.phase not in common_pb2.AgentPhase.values():
        return AgentPhase.IDLE
    name = common_pb2.AgentPhase.Name(request.phase).removeprefix("AGENT_PHASE_")
    return AgentPhase(name) if name in AgentPhase.__members__ else AgentPhase.IDLE


def cycle_exits(request: heartbeat_pb2.HeartbeatRequest) -> tuple[CycleExits, ...]:
    """The workers' ends in a heartbeat, by cycle. Reports of running workers say nothing that is kept."""
    by_cycle: dict[CycleNumber, list[WorkerExit]] = {}
    for told in request.workers[:MAX_REPORTS]:
        if told.outcome == common_pb2.WORKER_OUTCOME_UNSPECIFIED:
            continue
        by_cycle.setdefault(CycleNumber(told.cycle), []).append(
            WorkerExit(
                local_rank=LocalRank(told.local_rank),
                exit_code=told.exit_code if told.HasField("exit_code") else None,
                signal=told.signal[:_SIGNAL_NAME],
                message=told.message[:MAX_MESSAGE],
                stopped_by_agent=told.stopped_by_agent,
                stderr_tail=told.stderr_tail[-MAX_STDERR_TAIL:].decode("utf-8", "replace"),
                hung=told.hung,
            )
        )
    return tuple(CycleExits(cycle, tuple(exits)) for cycle, exits in by_cycle.items())


def _outcome_of(one: WorkerExit) -> common_pb2.WorkerOutcome.ValueType:
    if one.succeeded:
        return common_pb2.WORKER_OUTCOME_SUCCEEDED
    return common_pb2.WORKER_OUTCOME_FAILED if one.failed else common_pb2.WORKER_OUTCOME_STOPPED_BY_AGENT


def worker_reports(cycle: CycleNumber, exits: Iterable[WorkerExit]) -> list[heartbeat_pb2.WorkerReport]:
    """How an agent tells that workers ended."""
    return [
        heartbeat_pb2.WorkerReport(
            cycle=cycle,
            local_rank=one.local_rank,
            outcome=_outcome_of(one),
            exit_code=one.exit_code,
            signal=one.signal,
            message=one.message,
            stopped_by_agent=one.stopped_by_agent,
            stderr_tail=one.stderr_tail.encode(),
            hung=one.hung,
        )
        for one in exits
    ]


def phase_value(phase: AgentPhase) -> common_pb2.AgentPhase.ValueType:
    return common_pb2.AgentPhase.Value(f"AGENT_PHASE_{phase.value}")


def desired_message(desired: Desired, *, fetch_rank_map: bool) -> heartbeat_pb2.DesiredState:
    """What a node is told to do; `fetch_rank_map`: the assigned cycle's map is too large to be sent along."""
    message = heartbeat_pb2.DesiredState(
        action=_action_value(desired.action),
        cycle=desired.cycle,
        reason=desired.reason,
        exit_code=desired.exit_code,
        excluded=desired.excluded,
    )
    given = desired.assignment
    if given is not None:
        message.assignment.CopyFrom(
            heartbeat_pb2.Assignment(
                cycle=given.cycle,
                group_rank=given.group_rank,
                first_rank=first_rank(given.group_rank, given.workers_per_node),
                world_size=given.world_size,
                group_world_size=given.group_world_size,
                workers_per_node=given.workers_per_node,
                master_address=given.master.address if given.master is not None else "",
                master_port=given.master.port if given.master is not None else 0,
                max_restarts=given.max_restarts,
                infra_rank=given.infra_rank,
                replacement_group_id=given.replacement_group_id,
                fetch_rank_map=fetch_rank_map,
                lasting_store_port=(given.master.lasting_port or 0) if given.master is not None else 0,
            )
        )
    return message


def _action_value(action: Action) -> common_pb2.DesiredAction.ValueType:
    return common_pb2.DesiredAction.Value(f"DESIRED_ACTION_{action.value}")


def desired_of(response: heartbeat_pb2.HeartbeatResponse) -> Desired | None:
    """What this node is to do; None where the answer says nothing of it, or nothing that this version knows."""
    told = response.desired
    if not told.action or told.action not in common_pb2.DesiredAction.values():
        return None
    assignment = None
    if told.HasField("assignment"):
        given = told.assignment
        lasting_port = given.lasting_store_port or None
        master = Endpoint(given.master_address, given.master_port, lasting_port) if given.master_port else None
        assignment = Assignment(
            cycle=CycleNumber(given.cycle),
            group_rank=GroupRank(given.group_rank),
            world_size=given.world_size,
            group_world_size=given.group_world_size,
            workers_per_node=given.workers_per_node,
            max_restarts=given.max_restarts,
            infra_rank=given.infra_rank,
            replacement_group_id=given.replacement_group_id,
            master=master,
            fetch_rank_map=given.fetch_rank_map,
        )
    return Desired(
        action=Action(common_pb2.DesiredAction.Name(told.action).removeprefix("DESIRED_ACTION_")),
        cycle=CycleNumber(told.cycle) if told.HasField("cycle") else None,
        assignment=assignment,
        reason=told.reason,
        exit_code=told.exit_code if told.HasField("exit_code") else None,
        failed_cycle=CycleNumber(response.failed_cycle) if response.HasField("failed_cycle") else None,
        excluded=told.excluded,
    )
