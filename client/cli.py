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
from pathlib import Path
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
    EndpointType,
    Failed,
    NnodesType,
    Seconds,
    leave,
    open_standard_streams,
    option,
    program_version,
    run,
    token_in,
)
from nvrx.core.budgets import EXIT_NO_RESTART
from nvrx.core.endpoint import HostPort
from nvrx.core.facts import DEFAULT_STOP_GRACE_S
from nvrx.core.fingerprint import Wishes
from nvrx.core.parallel import MAX_SIZE
from nvrx.core.shape import (
    DEFAULT_JOIN_TIMEOUT_S,
    DEFAULT_LAST_CALL_S,
    DEFAULT_MAX_NO_PROGRESS_CYCLES,
    DEFAULT_MAX_NODE_FAILURES,
    DEFAULT_MAX_RESTARTS,
    DEFAULT_RESTART_BACKOFF_S,
    DEFAULT_SETTLE_S,
    RestartBudget,
)

from .app import run_node
from .check import check_node
from .config import DEFAULT_COORDINATOR_GRACE_S, JoinOptions, resolve
from .local_coordinator import with_local_coordinator

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


class _Endpoints(click.ParamType[tuple[HostPort, ...]]):
    name = "HOST:PORT[,...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[HostPort, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(EndpointType().convert(one.strip(), param, ctx) for one in value.split(","))


_SIZE_OF = {
    "tensor_parallel": "Tensor-parallel size",
    "pipeline_parallel": "Pipeline-parallel size",
    "context_parallel": "Context-parallel size",
    "expert_parallel": "Expert-parallel size",
    "global_batch_size": "Global batch size",
    "micro_batch_size": "Micro batch size",
}
_SIZES = [
    option(
        f"--{name.replace('_', '-')}",
        type=click.IntRange(1, MAX_SIZE),
        help=f"{what} [default: as Megatron's own flag in COMMAND says].",
    )
    for name, what in _SIZE_OF.items()
]

_FAILURE_OPTIONS = [
    option(
        "--settle",
        type=Seconds(),
        help="Nodes lost this soon after a failure belong to it and cost nothing more "
        f"[default: {DEFAULT_SETTLE_S:g}].",
    ),
    option(
        "--restart-backoff",
        type=Seconds(),
        help="First wait when workers fail within 10 s of two starts in a row; doubles up to 30 s; 0: none "
        f"[default: {DEFAULT_RESTART_BACKOFF_S:g}].",
    ),
    option(
        "--restart-budget",
        type=click.Choice(["fixed", "per-progress"]),
        help="What --max-restarts counts: all restarts, or those since training last came further [default: fixed].",
    ),
    option(
        "--checkpoint-iteration-file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="File with the latest checkpoint's iteration, as Megatron's latest_checkpointed_iteration.txt.",
    ),
    option(
        "--max-no-progress-cycles",
        type=click.IntRange(0),
        help="Failed cycles in a row without progress that end the run with exit code 93; 0: no limit "
        f"[default: {DEFAULT_MAX_NO_PROGRESS_CYCLES}, where progress is told].",
    ),
    option(
        "--no-restart-exit-code",
        type=click.IntRange(1, 255),
        default=EXIT_NO_RESTART,
        show_default=True,
        help="Exit code of this agent when the run is not worth starting again.",
    ),
    option(
        "--max-node-failures",
        type=click.IntRange(0),
        help="Cycles in a row that one node's workers may fail first before it is quarantined; 0: no limit "
        f"[default: {DEFAULT_MAX_NODE_FAILURES}].",
    ),
    option(
        "--quarantine",
        type=Seconds(),
        help="How long such a node is chosen last [default: for the rest of the run].",
    ),
]

_NODE_OPTIONS = [
    option(
        "--coordinator",
        type=_Endpoints(),
        required=True,
        help="Where nvrx-coord serve listens; several with commas. localhost:0 starts one for this node alone.",
    ),
    option(
        "--run-id",
        help="The run to join [default: Slurm's array job or job id, else the coordinator's run, else 'default'].",
    ),
    option(
        "--nnodes",
        type=NnodesType(),
        default="1",
        show_default=True,
        help="MIN:MAX nodes: MIN train, always; up to MAX - MIN stand by.",
    ),
    option("--nproc-per-node", default="1", show_default=True, help="Workers on this node: a number, or cpu."),
    option("--node-id", help="Name of this node [default: SLURMD_NODENAME, else the host name]."),
    option(
        "--advertise-addr",
        help="Address at which other nodes reach this one [default: the one this host uses towards the coordinator].",
    ),
    option(
        "--max-restarts",
        type=click.IntRange(0),
        help=f"Cycles that failing workers may end before the run fails [default: {DEFAULT_MAX_RESTARTS}].",
    ),
    option(
        "--max-replacements",
        type=click.IntRange(0),
        help="Cycles that lost nodes may end before the run fails [default: as capacity allows].",
    ),
    option(
        "--join-timeout",
        type=Seconds(),
        help=f"How long to wait for the coordinator, and the run for its MIN nodes "
        f"[default: {DEFAULT_JOIN_TIMEOUT_S:g}].",
    ),
    option(
        "--last-call",
        type=Seconds(),
        help=f"How long the first cycle waits for MAX nodes once MIN are there [default: {DEFAULT_LAST_CALL_S:g}].",
    ),
    option(
        "--stop-grace",
        type=Seconds(),
        default=DEFAULT_STOP_GRACE_S,
        show_default=True,
        help="Time between SIGTERM and SIGKILL for workers.",
    ),
    option(
        "--coordinator-grace",
        type=Seconds(),
        default=DEFAULT_COORDINATOR_GRACE_S,
        show_default=True,
        help="How long workers run on while the coordinator is out of reach.",
    ),
    option(
        "--on-partition",
        type=click.Choice(["keep", "stop"]),
        default="keep",
        show_default=True,
        help="What workers do while the coordinator is out of reach: run on, or stop when this node's lease is over.",
    ),
    option(
        "--exit-when-excluded/--no-exit-when-excluded",
        default=None,
        help="End with exit code 5 when this node is drained or quarantined [default: in a Slurm array].",
    ),
    *_FAILURE_OPTIONS,
    *_SIZES,
    option(
        "--segment-size",
        type=click.IntRange(1),
        help="Nodes taken together from one NVLink domain, at consecutive group ranks.",
    ),
    option(
        "--replacement-group-size",
        type=click.IntRange(1),
        help="Nodes of a whole replacement group; 1 turns grouping off [default: in an array, nodes per task].",
    ),
    option(
        "--rank-policy",
        type=click.Choice(["infra", "sticky"]),
        help="How the world's nodes get their group ranks [default: infra].",
    ),
    option(
        "--same-env",
        multiple=True,
        metavar="NAME",
        help="A variable that must be the same on all nodes, beside NCCL_*, TORCH_*, CUDA_* and OMP_NUM_THREADS.",
    ),
    option(
        "--ignore-env",
        multiple=True,
        metavar="NAME",
        help="A variable, or command, python or torch, that may differ on this node.",
    ),
    option("--no-env-check", is_flag=True, help="Compare neither command nor environment with the other nodes'."),
    option("--checkpoint-path", default="", help="Where the run keeps its checkpoints; must be the same on all nodes."),
    option(
        "--log-dir",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("nvrx-logs"),
        show_default=True,
        help="Workers' output, rank maps and the agent's log go below it.",
    ),
    option("--token-file", type=click.Path(path_type=Path), help="File with the coordinator's token."),
    option("--reopen", is_flag=True, help="Begin the run's next life if it has ended."),
    option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True),
    option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True),
]


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
    for decorate in reversed(_NODE_OPTIONS):
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
        resolve(options, ENVIRONMENT)
        _warn_of_loopback(options)
        with with_local_coordinator(options) as found:
            return asyncio.run(run_node(resolve(found, ENVIRONMENT), program_version()))
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
        token=token,
        reopen=given["reopen"],
        segment_size=given["segment_size"],
        replacement_group_size=given["replacement_group_size"],
        rank_policy=given["rank_policy"],
        parallel_sizes={name: given[name] for name in _SIZE_OF},
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
    open_standard_streams()
    leave(main())


if __name__ == "__main__":
    program()
