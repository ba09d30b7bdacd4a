"""`nvrx-coord status|nodes|cycles|rank-map|lookup|events`: what a coordinator knows, as tables or JSON.

A client like any other: talks to a coordinator over gRPC and decides nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import grpc
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from nvrx.channel import bearer
from nvrx.commandline import EXIT_USAGE, EndpointsType, Failed, option, token_in
from nvrx.core.endpoint import HostPort
from nvrx.v1 import common_pb2, rank_map_pb2, run_pb2
from nvrx.wire.text import to_json

from .viewer import Viewer

_PIPE_WIDTH = 200


def view(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that every view has."""

    def connected(coordinator: tuple[HostPort, ...], run_id: str | None, token_file: Path | None, **rest: Any) -> Any:
        token = token_in(token_file)
        return command(Viewer(coordinator, run_id or "", bearer(token)), **rest)

    connected.__name__ = command.__name__
    connected.__doc__ = command.__doc__
    connected.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    decorated: Callable[..., Any] = connected
    for decorate in (
        option("--output", type=click.Choice(["table", "json"]), default="table", show_default=True, envvar=None),
        option("--token-file", type=click.Path(path_type=Path), help="File with the coordinator's token."),
        option("--run-id", help="May be left out when there is one run."),
        option("--coordinator", type=EndpointsType(), default="127.0.0.1:7700", show_default=True),
    ):
        decorated = decorate(decorated)
    return decorated


def _print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)
    table = Table(*columns, title=title or None, title_justify="left", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*[cell.replace("[", "\\[") for cell in row])
    console.print(table, soft_wrap=not sys.stdout.isatty())


def _name(enum: Any, value: int, prefix: str) -> str:
    """A value in words; one that a later coordinator knows by its number (rule A8)."""
    if value not in enum.values():
        return str(value)
    return str(enum.Name(value)).removeprefix(prefix) if value else ""


def _number(message: Any, field: str) -> str:
    return str(getattr(message, field)) if message.HasField(field) else ""


def _time(stamp: Any) -> str:
    return stamp.ToDatetime().strftime("%H:%M:%S.%f")[:-3] if stamp.seconds else ""


def _rows_json(key: str, messages: list[Message]) -> str:
    return json.dumps({key: [json.loads(to_json(one)) for one in messages]}, indent=2)


@click.command(epilog="Example: nvrx-coord status --coordinator head:7700")
@view
def status(viewer: Viewer, output: str) -> None:
    """How a run stands, and why nothing runs if nothing does."""
    run = viewer.call(viewer.runs.GetRun, run_pb2.GetRunRequest(run_id=viewer.run_id)).run
    if output == "json":
        print(to_json(run))
        return
    shape = run.shape
    print(f"run       {run.run_id}: {_name(common_pb2.RunState, run.state, 'RUN_STATE_')}")
    print(f"cycle     {_cycle_line(run)}")
    print(
        f"nodes     {run.active_nodes} active, {run.standby_nodes} standby; {shape.min_nodes}:{shape.max_nodes} wanted"
    )
    print(f"workers   {shape.workers_per_node} per node, world size {shape.min_nodes * shape.workers_per_node}")
    allowed = run.settings.max_restarts
    print(f"restarts  {min(run.restarts_used, allowed)} of {allowed} used")
    print(f"losses    {run.replacements_used}{_of_at_most(run.settings)} (cycles ended by a lost or leaving node)")
    if run.HasField("step"):
        print(f"progress  step {run.step}")
    for notice in run.health_notices:
        print(f"health    {notice}")
    if run.remark:
        print(f"world     {run.remark}")
    if run.waiting_reason:
        print(f"waiting   {run.waiting_reason}")
    if run.reason:
        print(f"closed    {run.reason} (exit code {run.exit_code})")


def _cycle_line(run: run_pb2.Run) -> str:
    forming = run.phase == common_pb2.CYCLE_STATE_FORMING
    if not run.HasField("cycle"):
        return "none yet; the first is being formed" if forming else "none"
    state = _name(common_pb2.CycleState, run.cycle_state, "CYCLE_STATE_")
    return f"{run.cycle}: {state}{'; the next is being formed' if forming else ''}"


def _of_at_most(settings: common_pb2.Settings) -> str:
    return f" of at most {settings.max_replacements}" if settings.HasField("max_replacements") else ""


@click.command(epilog="Example: nvrx-coord nodes --output json")
@view
def nodes(viewer: Viewer, output: str) -> None:
    """Every node that is or was a member."""
    request = run_pb2.ListNodesRequest(run_id=viewer.run_id)
    found = [one for page in viewer.pages(viewer.runs.ListNodes, request) for one in page.nodes]
    if output == "json":
        print(_rows_json("nodes", found))
        return
    rows = [
        [
            one.node_id,
            _name(common_pb2.NodeState, one.state, "NODE_STATE_"),
            _number(one, "group_rank"),
            _number(one, "infra_rank"),
            one.address,
            str(one.pid),
            _name(common_pb2.AgentPhase, one.phase, "AGENT_PHASE_"),
            _number(one, "cycle"),
            f"{one.last_heard.ToNanoseconds() / 1e9:.1f} s ago" if one.HasField("last_heard") else "",
            _health(one),
            one.reason,
        ]
        for one in found
    ]
    columns = [
        "node",
        "state",
        "group rank",
        "infra rank",
        "address",
        "pid",
        "phase",
        "cycle",
        "heard",
        "health",
        "reason",
    ]
    _print_table("", columns, rows)


def _health(node: run_pb2.Node) -> str:
    if not node.HasField("health"):
        return ""
    state = _name(common_pb2.HealthState, node.health.state, "HEALTH_STATE_")
    why = f"{node.health.check}: {node.health.reason}" if node.health.check else node.health.reason
    return f"{state} ({why})" if why else state


@click.command(epilog="Example: nvrx-coord cycles")
@view
def cycles(viewer: Viewer, output: str) -> None:
    """Every cycle, the latest first: how long, why it ended, who was replaced by whom."""
    request = rank_map_pb2.ListCyclesRequest(run_id=viewer.run_id)
    found = [one for page in viewer.pages(viewer.maps.ListCycles, request) for one in page.cycles]
    if output == "json":
        print(_rows_json("cycles", found))
        return
    rows = [
        [
            str(one.cycle),
            _name(common_pb2.CycleState, one.state, "CYCLE_STATE_"),
            _time(one.start_time),
            _lasted(one),
            f"{one.recovery_time.ToNanoseconds() / 1e9:.3f} s" if one.HasField("recovery_time") else "",
            one.cause_text,
            ", ".join(f"{pair.left_node_id} -> {pair.came_node_id}" for pair in one.replacements),
        ]
        for one in found
    ]
    _print_table("", ["cycle", "state", "start (UTC)", "lasted", "recovery", "cause", "replaced"], rows)


def _lasted(cycle: rank_map_pb2.Cycle) -> str:
    if not cycle.HasField("end_time"):
        return ""
    return f"{(cycle.end_time.ToNanoseconds() - cycle.start_time.ToNanoseconds()) / 1e9:.1f} s"


@click.command("rank-map", epilog="Example: nvrx-coord rank-map --cycle -1, or rank-map --cycle 3 --diff 2")
@view
@option("--cycle", type=click.IntRange(-1), envvar=None, help="-1: the one before the current one [default: current].")
@option("--diff", type=click.IntRange(-1), envvar=None, help="Another cycle, to see who left, who came, what moved.")
def rank_map(viewer: Viewer, output: str, cycle: int | None, diff: int | None) -> None:
    """Which node and which worker had which rank in a cycle, and how each ended."""
    found = viewer.rank_map(cycle)
    if diff is not None:
        _print_diff(viewer.rank_map(diff), found, output)
        return
    if output == "json":
        print(to_json(found))
        return
    print_rank_map(found)


def print_rank_map(found: common_pb2.RankMap) -> None:
    """A rank map as a table."""
    rows = [
        [
            _ranks(one),
            str(one.group_rank),
            one.node_id,
            one.address,
            str(one.infra_rank),
            one.replacement_group_id,
            one.domain_id,
            _outcome(one),
        ]
        for one in found.nodes
    ]
    rows += [
        [
            "standby",
            "",
            one.node_id,
            one.address,
            str(one.infra_rank),
            one.replacement_group_id,
            one.domain_id,
            one.reason,
        ]
        for one in found.standbys
    ]
    state = _name(common_pb2.CycleState, found.state, "CYCLE_STATE_")
    source = _name(common_pb2.OrderSource, found.order_source, "ORDER_SOURCE_")
    title = f"run {found.run_id} cycle {found.cycle}: {state}, world size {found.world_size}, ordered by {source}"
    _print_table(title, ["ranks", "group rank", "node", "address", "infra rank", "group", "domain", "outcome"], rows)
    if found.HasField("failure"):
        print(_failure_lines(found.failure))


def _ranks(row: common_pb2.RankMapNode) -> str:
    return f"{row.first_rank}-{row.first_rank + row.local_world_size - 1}"


def _outcome(row: common_pb2.RankMapNode) -> str:
    state = _name(common_pb2.WorkerOutcome, row.outcome.state, "WORKER_OUTCOME_")
    exits = [f"rank {one.rank}: {_end(one)}" for one in row.outcome.exits if one.hung or not one.stopped_by_agent]
    return f"{state} ({', '.join(exits)})" if exits else state


def _end(one: common_pb2.WorkerExit) -> str:
    has_ended = one.HasField("exit_code") or one.signal
    if not one.hung:
        return _how(one)
    return f"hung, then {_how(one)}" if has_ended else "hangs"


def _how(one: Any) -> str:
    return str(one.signal) if one.signal else f"exit {one.exit_code}"


def _failure_lines(failure: common_pb2.Failure) -> str:
    lines = [f"ended by {_describe(failure)}"]
    lines += [f"  then   {_describe(one)}" for one in failure.consequences]
    return "\n".join(lines)


def _describe(one: Any) -> str:
    cause = _name(common_pb2.Cause, one.cause, "CAUSE_")
    rank = f" rank {one.rank} (local rank {one.local_rank})" if one.HasField("rank") else ""
    how = f" {_how(one)}" if one.HasField("exit_code") or one.signal else ""
    where = f" on {one.node_id}" if one.node_id else ""
    return f"{cause}{where}{rank}{how}{': ' + one.message if one.message else ''}"


def _print_diff(before: common_pb2.RankMap, after: common_pb2.RankMap, output: str) -> None:
    was = {one.group_rank: one.node_id for one in before.nodes}
    where = {node_id: group_rank for group_rank, node_id in was.items()}
    now = {one.node_id for one in after.nodes}
    # Paired in group-rank order, as `cycles` shows them: a newcomer need not sit where the lost node sat.
    left = (node_id for node_id in was.values() if node_id not in now)
    came_for = dict(zip((one.node_id for one in after.nodes if one.node_id not in where), left, strict=False))
    rows = []
    for one in after.nodes:
        earlier = where.get(one.node_id)
        if earlier is None:
            note = f"came, for {came_for[one.node_id]}" if one.node_id in came_for else "came"
        else:
            note = "" if earlier == one.group_rank else f"moved from group rank {earlier}"
        rows.append([_ranks(one), str(one.group_rank), was.get(one.group_rank, ""), one.node_id, note])
    if output == "json":
        keys = ["ranks", "group_rank", "before", "after", "change"]
        print(
            json.dumps(
                {
                    "before": before.cycle,
                    "after": after.cycle,
                    "rows": [dict(zip(keys, row, strict=True)) for row in rows],
                },
                indent=2,
            )
        )
        return
    title = f"cycle {before.cycle} -> cycle {after.cycle}"
    _print_table(title, ["ranks", "group rank", f"cycle {before.cycle}", f"cycle {after.cycle}", "change"], rows)


@click.command(epilog="Example: nvrx-coord lookup --rank 417 --cycle 12")
@view
@option("--rank", type=click.IntRange(0), envvar=None, help="A worker's global rank, in the current cycle or --cycle.")
@option("--gpu", envvar=None, help="A GPU's UUID: every rank it has been.")
@option("--node", envvar=None, help="A node's id: every rank it has been.")
@option("--cycle", type=click.IntRange(-1), envvar=None, help="Look in this cycle only.")
def lookup(viewer: Viewer, output: str, rank: int | None, gpu: str | None, node: str | None, cycle: int | None) -> None:
    """Which machine and GPU was rank R, and which ranks has a machine or GPU been."""
    if sum(one is not None for one in (rank, gpu, node)) != 1:
        raise Failed("give one of --rank, --gpu, --node", EXIT_USAGE)
    request = rank_map_pb2.LookupRankRequest(run_id=viewer.run_id, cycle=cycle)
    if rank is not None:
        request.rank = rank
    elif gpu is not None:
        request.gpu_uuid = gpu
    else:
        request.node_id = node or ""
    found = [one for page in viewer.pages(viewer.maps.LookupRank, request) for one in page.matches]
    if output == "json":
        print(_rows_json("matches", found))
        return
    rows = [
        [
            str(one.cycle),
            str(one.rank),
            one.node_id,
            str(one.local_rank),
            str(one.group_rank),
            one.address,
            one.device.uuid,
            one.device.pci_bus_id,
            str(one.device.numa_node) if one.device.HasField("numa_node") else "",
            _name(common_pb2.CycleState, one.state, "CYCLE_STATE_"),
        ]
        for one in found
    ]
    columns = ["cycle", "rank", "node", "local rank", "group rank", "address", "GPU", "PCI address", "NUMA", "state"]
    _print_table("", columns, rows)


@click.command(epilog="Example: nvrx-coord events --follow")
@view
@option("--from-revision", type=click.IntRange(1), default=1, envvar=None, help="First revision to show.")
@option("--follow", is_flag=True, envvar=None, help="Go on with what happens, until the run closes.")
def events(viewer: Viewer, output: str, follow: bool, from_revision: int) -> None:
    """What happened, fact by fact."""
    for fact in _facts(viewer, from_revision, follow):
        if output == "json":
            print(json.dumps(json.loads(to_json(fact))), flush=True)
        else:
            print(f"{fact.revision:>6}  {_time(fact.time)}  {fact.text}", flush=True)


def _facts(viewer: Viewer, first: int, follow: bool) -> Iterator[run_pb2.Fact]:
    if not follow:
        request = run_pb2.ListFactsRequest(run_id=viewer.run_id, from_revision=first)
        for page in viewer.pages(viewer.runs.ListFacts, request):
            yield from page.facts
        return
    while True:
        watch = run_pb2.WatchFactsRequest(run_id=viewer.run_id, from_revision=first)
        try:
            for response in viewer.call(viewer.runs.WatchFacts, watch, timeout_s=None):
                yield response.fact
                first = response.fact.revision + 1
            return
        except grpc.RpcError as error:
            if not viewer.turn_from(error):
                raise viewer.failed(error) from error
        # Whoever leads by now goes on from there; asked first, because a stream tells only when it is read.
        viewer.call(viewer.runs.GetRun, run_pb2.GetRunRequest(run_id=viewer.run_id))


VIEWS = (status, nodes, cycles, rank_map, lookup, events)
