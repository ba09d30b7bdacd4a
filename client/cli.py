"""`nvrx-node`: the command line of the agent. Reads options, hands them on; no rule stands here."""

# ruff: noqa: E402 - the environment is prepared before gRPC is imported

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

# What the user gave, before anything of ours is added: workers get this one.
ENVIRONMENT = dict(os.environ)
# gRPC's own lines on standard error are not for our users; what matters reaches them through our log.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# The agent never forks while a channel is open, so gRPC's fork handlers have nothing to guard.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import click

from nvrx import logs
from nvrx.commandline import (
    EXIT_USAGE,
    HELP_SETTINGS,
    Failed,
    leave,
    open_standard_streams,
    program_version,
    run,
    token_in,
)
from nvrx.core.fingerprint import Wishes
from nvrx.core.shape import (
    RestartBudget,
)
from nvrx.pid1 import be_below_process_1

from .app import run_node
from .check import check_node
from .config import JoinOptions, resolve
from .local_coordinator import with_local_coordinator
from .log_file import Rotation
from .options import NODE_OPTIONS, SIZE_OF

log = logging.getLogger("nvrx.node")

PROGRAM = "nvrx-node"


@dataclass(frozen=True)
class _Line:
    """A command line: what stands before the first `--`, and what after it, untouched (rule G3)."""

    ours: tuple[str, ...]
    worker_command: tuple[str, ...]

    @classmethod
    def split(cls, arguments: Sequence[str]) -> _Line:
        given = tuple(arguments)
        if "--" not in given:
            return cls(given, ())
        at = given.index("--")
        return cls(given[:at], given[at + 1 :])


# Options end at the first stray word, so that the options of a command without its "--" are not taken for ours.
_OPTIONS_FIRST = {"allow_interspersed_args": False}
_JOIN_EPILOG = """\b
Examples:
  nvrx-node join --coordinator head:7700 --nnodes 6:8 --nproc-per-node 8 -- python train.py --lr 3e-4
  nvrx-node join --coordinator localhost:0 --nproc-per-node 2 -- python train.py

Every option is also read from NVRX_<OPTION>, as NVRX_RUN_ID; the command line wins.

\b
Exit codes: 0 run succeeded, 1 run failed, 2 usage, 3 refused by the coordinator,
4 coordinator not reached or lost, 5 this node was excluded, 93 not worth starting again,
128+n ended by signal n.
"""


def _node_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for decorate in reversed(NODE_OPTIONS):
        command = decorate(command)
    return command


@click.group(context_settings=HELP_SETTINGS)
@click.version_option(package_name="nvrx", prog_name=PROGRAM)
def nvrx_node() -> None:
    """The agent of one node: joins a run, starts the node's workers, keeps them alive."""


@nvrx_node.command(
    options_metavar="--coordinator HOST:PORT [OPTIONS] -- COMMAND [ARG...]",
    context_settings=_OPTIONS_FIRST,
    epilog=_JOIN_EPILOG,
)
@_node_options
@click.argument("stray", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.pass_obj
def join(line: _Line, /, stray: tuple[str, ...], **given: Any) -> int:
    """Join a run and work until it ends. COMMAND runs as given, without a shell."""
    options = _options(given, line, stray)
    logs.start(given["log_level"], given["log_format"])
    try:
        config = resolve(options, ENVIRONMENT)
        _warn_of_loopback(options)
        with with_local_coordinator(options) as found:
            return asyncio.run(run_node(dataclasses.replace(config, options=found), program_version()))
    finally:
        logs.finish()


@nvrx_node.command(
    options_metavar="--coordinator HOST:PORT [OPTIONS] [-- COMMAND [ARG...]]", context_settings=_OPTIONS_FIRST
)
@_node_options
@click.argument("stray", nargs=-1, type=click.UNPROCESSED, metavar="")
@click.pass_obj
def check(line: _Line, /, stray: tuple[str, ...], **given: Any) -> int:
    """Make the checks of join, reach the coordinator, and start nothing."""
    if not line.worker_command:
        line = dataclasses.replace(line, worker_command=(sys.executable,))
    config = resolve(_options(given, line, stray), ENVIRONMENT)
    return asyncio.run(check_node(config))


def _warn_of_loopback(options: JoinOptions) -> None:
    """Several nodes and a coordinator on loopback: right on one host only; elsewhere each host would ask itself."""
    for one in options.coordinators:
        if one.is_loopback and one.port != 0 and options.nnodes.max_nodes > 1:
            log.warning("coordinator %s is reached from this host only; agents on other hosts need its address", one)


def _options(given: dict[str, Any], line: _Line, stray: tuple[str, ...]) -> JoinOptions:
    worker_command, given_line = line.worker_command, line.ours
    if stray:
        # A command without its "--" is the commonest slip: show the line as it was meant.
        before = given_line[: len(given_line) - len(stray)]
        meant = shlex.join([PROGRAM, *before, "--", *stray, *worker_command])
        raise Failed(f"{stray[0]!r} stands before --; the command must follow it: {meant}", EXIT_USAGE)
    if not worker_command:
        raise Failed("no command to run; give it after --: nvrx-node join [OPTIONS] -- python train.py", EXIT_USAGE)
    token = token_in(given["token_file"])
    return JoinOptions(
        coordinators=given["coordinator"],
        command=worker_command,
        nnodes=given["nnodes"],
        nproc_per_node=given["nproc_per_node"],
        run_id=given["run_id"],
        node_id=given["node_id"],
        advertise_addr=given["advertise_addr"],
        max_restarts=given["max_restarts"],
        max_replacements=given["max_replacements"],
        join_timeout_s=given["join_timeout"],
        last_call_s=given["last_call"],
        stop_grace_s=given["stop_grace"],
        coordinator_grace_s=given["coordinator_grace"],
        checkpoint_path=given["checkpoint_path"],
        checkpoint_iteration_file=given["checkpoint_iteration_file"],
        settle_s=given["settle"],
        restart_backoff_s=given["restart_backoff"],
        max_no_progress_cycles=given["max_no_progress_cycles"],
        restart_budget=_restart_budget(given["restart_budget"]),
        max_node_failures=given["max_node_failures"],
        quarantine_s=given["quarantine"],
        no_restart_exit_code=given["no_restart_exit_code"],
        exit_when_excluded=given["exit_when_excluded"],
        stops_on_partition=given["on_partition"] == "stop",
        log_dir=given["log_dir"],
        tee=given["tee"],
        log_rotation=Rotation(given["log_max_size"], given["log_keep"]) if given["log_max_size"] else None,
        cycle_info_dir=given["cycle_info_dir"],
        token=token,
        reopen=given["reopen"],
        segment_size=given["segment_size"],
        replacement_group_size=given["replacement_group_size"],
        rank_policy=given["rank_policy"],
        parallel_sizes={name: given[name] for name in SIZE_OF},
        fingerprint=Wishes(given["same_env"], given["ignore_env"], given["no_env_check"]),
    )


def _restart_budget(text: str | None) -> RestartBudget | None:
    return RestartBudget(text.upper().replace("-", "_")) if text is not None else None


def main(arguments: Sequence[str] | None = None) -> int:
    """The program `nvrx-node`."""
    line = _Line.split(sys.argv[1:] if arguments is None else arguments)
    return run(nvrx_node, PROGRAM, line.ours, obj=line)


def program() -> NoReturn:
    """The process `nvrx-node`."""
    be_below_process_1()
    open_standard_streams()
    leave(main())


if __name__ == "__main__":
    program()
