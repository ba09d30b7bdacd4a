"""`nvrx-coord plan`: what world would be chosen, and why, for nodes in a file. Needs no coordinator.

Reads options and prints; the file is read by `plan_file`, the world chosen in `planning`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from nvrx.commandline import EXIT_FAILED, EXIT_OK, NnodesType, option
from nvrx.core.ids import first_rank
from nvrx.core.run import Cycle
from nvrx.core.shape import NodeCounts
from nvrx.logs import one_line
from nvrx.wire.text import to_json
from nvrx.wire.views import whole_rank_map

from .plan_file import read_plan
from .planning import Chosen, Short
from .planning import plan as choose

EXIT_REFUSED = 3

_EPILOG = """\b
Example:
  nvrx-coord plan --nodes cluster.yaml --nnodes 6:8 --lose n3,n7

\b
Exit codes: 0 a world is chosen, 1 there is none, 2 usage, 3 a node would be refused.
"""


@click.command(epilog=_EPILOG)
@option(
    "--nodes",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    envvar=None,
    help="File with shape and nodes, YAML or JSON; see docs/plan.md.",
)
@option("--nnodes", type=NnodesType(), envvar=None, help="Instead of the file's.")
@option("--lose", default="", metavar="ID,...", envvar=None, help="Nodes that are lost, whatever the file says.")
@option("--output", type=click.Choice(["table", "json"]), default="table", show_default=True, envvar=None)
def plan(nodes: Path, nnodes: NodeCounts | None, lose: str, output: str) -> int:
    """The world that a coordinator would choose, and why: for trying a topology, a loss or a policy."""
    lost = tuple(name for one in lose.split(",") if (name := one.strip()))
    found = choose(read_plan(nodes, nnodes, lost))
    if isinstance(found, Chosen):
        print(_json(found) if output == "json" else _table(found))
        return EXIT_OK
    if isinstance(found, Short):
        print(json.dumps({"shortage": found.reason}, indent=2) if output == "json" else f"no world: {found.reason}")
        return EXIT_FAILED
    refused = {"node_id": found.node_id, "reason": found.reason.value, "message": found.message}
    if output == "json":
        print(json.dumps({"refused": refused}, indent=2))
    else:
        whom = f"{found.node_id}: " if found.node_id else ""
        print(one_line(f"refused: {whom}{found.reason.value}: {found.message}"))
    return EXIT_REFUSED


def _json(found: Chosen) -> str:
    message = whole_rank_map(found.run, found.cycle)
    message.ClearField("start_time")  # it never starts
    return to_json(message)


def _table(found: Chosen) -> str:
    parts = [_world(found.cycle)]
    left_out = [[str(one.node.node_id), one.reason] for one in found.cycle.standbys]
    left_out += [[str(one.node_id), one.why] for one in found.absent]
    if left_out:
        parts.append(_aligned(["not in the world", "why"], left_out))
    cycle = found.cycle
    workers = cycle.shape.world_size
    summary = (
        f"cycle {cycle.number}: {len(cycle.seats)} nodes, world size {workers}; {len(cycle.standbys)} stand by; "
        f"ordered by {cycle.order_source.value}; policy {cycle.shape.rank_policy.value.lower()}"
    )
    if found.warning:
        parts.append(f"warning: {found.warning}")
    parts.append(f"{summary}; {found.remark}" if found.remark else summary)
    return "\n\n".join(parts)


def _world(cycle: Cycle) -> str:
    """The world by domain, then by group, then by rank."""
    domain_at: dict[str, int] = {}
    group_at: dict[str, int] = {}
    by_group = cycle.shape.replacement_group_size > 1
    for seat in cycle.seats:
        domain_at.setdefault(seat.node.domain_id or "", seat.group_rank)
        group_at.setdefault(seat.node.replacement_group_id or "", seat.group_rank)
    seats = sorted(
        cycle.seats,
        key=lambda one: (
            domain_at[one.node.domain_id or ""] if cycle.shape.segment_size is not None else 0,
            group_at[one.node.replacement_group_id or ""] if by_group else 0,
            one.group_rank,
        ),
    )
    per_node = cycle.shape.workers_per_node
    rows = []
    for seat in seats:
        first = first_rank(seat.group_rank, per_node)
        rows.append(
            [
                seat.node.domain_id or "",
                seat.node.replacement_group_id or "",
                str(seat.group_rank),
                f"{first}-{first + per_node - 1}",
                str(seat.node.node_id),
                str(seat.node.infra_rank),
                seat.node.order_key,
            ]
        )
    columns = ["domain", "group", "group rank", "ranks", "node", "infra rank", "ordered by"]
    return _aligned(columns, rows)


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts; columns in which nothing stands are left out."""
    shown = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    table = [[row[index] for index in shown] for row in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table)
    return "\n".join(line.rstrip() for line in lines)
