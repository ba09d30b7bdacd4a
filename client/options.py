"""The options of `nvrx-node join` and `check`, by topic. No rule stands here; what they mean is said in their help."""

from __future__ import annotations

from pathlib import Path

import click

from nvrx.commandline import EndpointsType, NnodesType, Seconds, Size, option
from nvrx.core.budgets import EXIT_NO_RESTART
from nvrx.core.facts import DEFAULT_STOP_GRACE_S
from nvrx.core.parallel import MAX_SIZE
from nvrx.core.shape import (
    DEFAULT_JOIN_TIMEOUT_S,
    DEFAULT_LAST_CALL_S,
    DEFAULT_MAX_NO_PROGRESS_CYCLES,
    DEFAULT_MAX_NODE_FAILURES,
    DEFAULT_MAX_RESTARTS,
    DEFAULT_RESTART_BACKOFF_S,
    DEFAULT_SETTLE_S,
)

from .config import DEFAULT_COORDINATOR_GRACE_S

LEAST_LOG_BYTES = 4096
DEFAULT_LOG_KEEP = 5

SIZE_OF = {
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
    for name, what in SIZE_OF.items()
]

_FAILURE = [
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

_WORKERS = [
    option(
        "--stop-grace",
        type=Seconds(),
        default=DEFAULT_STOP_GRACE_S,
        show_default=True,
        help="Time between SIGTERM and SIGKILL for workers.",
    ),
]

_LOGS = [
    option(
        "--log-dir",
        type=click.Path(path_type=Path, file_okay=False),
        default=Path("nvrx-logs"),
        show_default=True,
        help="Workers' output, rank maps and the agent's log go below it.",
    ),
    option(
        "--tee",
        type=click.Choice(["all", "rank0", "none"]),
        help="Whose output is also shown here, each line with its rank before it [default: all where MAX is 1 node, "
        "else rank0].",
    ),
    option(
        "--log-max-size",
        type=Size(least=LEAST_LOG_BYTES),
        help="A worker's log file over this size becomes FILE.1, and so on, as 64M [default: no limit].",
    ),
    option(
        "--log-keep",
        type=click.IntRange(1, 1000),
        default=DEFAULT_LOG_KEEP,
        show_default=True,
        help="Old files kept beside each log file that --log-max-size limits.",
    ),
    option(
        "--cycle-info-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="Each cycle's rank map goes there as a JSON file too, with a link `current` to the latest.",
    ),
    option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True),
    option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True),
]

NODE_OPTIONS = [
    option(
        "--coordinator",
        type=EndpointsType(),
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
    *_FAILURE,
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
    option("--token-file", type=click.Path(path_type=Path), help="File with the coordinator's token."),
    option("--reopen", is_flag=True, help="Begin the run's next life if it has ended."),
    *_WORKERS,
    *_LOGS,
]
"""In the order of the help text."""
