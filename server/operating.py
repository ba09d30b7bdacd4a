"""`nvrx-coord promote|drain|undrain|stop`: an operator's commands. A client like any other, which decides nothing."""

from __future__ import annotations

import click
from google.protobuf.message import Message

from nvrx.commandline import option
from nvrx.v1 import common_pb2, promote_pb2
from nvrx.wire.text import to_json

from .viewer import Viewer
from .views import print_rank_map, view

_immediate = option("--immediate", is_flag=True, envvar=None, help="End the running cycle and make the change now.")
_dry_run = option("--dry-run", is_flag=True, envvar=None, help="Change nothing; show the world that would result.")


@click.command(epilog="Example: nvrx-coord promote n7 --replace n2 --dry-run")
@view
@click.argument("node")
@option("--replace", envvar=None, help="The active node whose place it takes; default: the coordinator chooses.")
@_immediate
@_dry_run
def promote(viewer: Viewer, output: str, node: str, replace: str | None, immediate: bool, dry_run: bool) -> None:
    """Make a standby, with its replacement group, active: at the next cycle boundary, or now."""
    request = promote_pb2.PromoteRequest(
        run_id=viewer.run_id, node_id=node, replace_node_id=replace or "", immediate=immediate, dry_run=dry_run
    )
    response = viewer.call(viewer.promotes.Promote, request)
    _print_change(response, response.rank_map, output, dry_run, immediate, f"{node} is promoted")


@click.command(epilog="Example: nvrx-coord drain n2 --immediate")
@view
@click.argument("node")
@_immediate
@_dry_run
def drain(viewer: Viewer, output: str, node: str, immediate: bool, dry_run: bool) -> None:
    """Take a node, with its replacement group, out of the world: at the next cycle boundary, or now."""
    request = promote_pb2.DrainRequest(run_id=viewer.run_id, node_id=node, immediate=immediate, dry_run=dry_run)
    response = viewer.call(viewer.promotes.Drain, request)
    _print_change(response, response.rank_map, output, dry_run, immediate, f"{node} is drained")


@click.command(epilog="Example: nvrx-coord undrain n2")
@view
@click.argument("node")
def undrain(viewer: Viewer, output: str, node: str) -> None:
    """Let a drained node, with its replacement group, be chosen again."""
    request = promote_pb2.UndrainRequest(run_id=viewer.run_id, node_id=node)
    response = viewer.call(viewer.promotes.Undrain, request)
    print(to_json(response) if output == "json" else f"{node} may be chosen again")


@click.command(epilog="Example: nvrx-coord stop --run-id llm")
@view
def stop(viewer: Viewer, output: str) -> None:
    """Stop all workers and close the run."""
    response = viewer.call(viewer.promotes.StopRun, promote_pb2.StopRunRequest(run_id=viewer.run_id))
    print(to_json(response) if output == "json" else "the run is stopped; its agents end their workers and exit")


def _print_change(
    response: Message, rank_map: common_pb2.RankMap, output: str, dry_run: bool, immediate: bool, what: str
) -> None:
    if output == "json":
        print(to_json(response))
        return
    when = "now" if immediate else "at the next cycle boundary"
    then = (
        f"nothing was changed; {what} {when}, the world would be:" if dry_run else f"{what} {when}; the world is then:"
    )
    print(then)
    print_rank_map(rank_map)


OPERATIONS = (promote, drain, undrain, stop)
