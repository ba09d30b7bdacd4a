"""What the workers of a node are started with in a cycle: command, environment, files. Starts nothing itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from nvrx.core.ids import CycleNumber, LocalRank, global_rank
from nvrx.core.numa import wrapped
from nvrx.core.ranks import Assignment

from .config import NodeConfig
from .supervisor_link import SupervisorLink, WorkerSpec
from .worker_environment import Place, WorkerPaths, with_default_threads, worker_environment
from .worker_files import WorkerFiles

PREWARM_AFTER_S = 3.0
"""From the start of an agent: where a cycle begins at once, its workers' own start goes first."""


def worker_specs(
    config: NodeConfig,
    files: WorkerFiles,
    place: Place,
    given: Assignment,
    failed: CycleNumber | None,
    sockets: Sequence[str] = (),
) -> list[WorkerSpec]:
    """One for each local rank; `failed` is the latest cycle that failed with this node in it, `sockets` where each
    speaks to its agent, if there are any.

    Makes the cycle's directory. Raises OSError.
    """
    specs = []
    files.cycle(given.cycle)
    for index in range(given.workers_per_node):
        local_rank = LocalRank(index)
        rank = global_rank(given.group_rank, local_rank, given.workers_per_node)
        paths = WorkerPaths(
            error_file=str(files.output(given.cycle, rank, "error.json")),
            rank_map=str(files.rank_map(given.cycle)),
            failed_rank_map=str(files.failed_rank_map(failed)) if failed is not None else None,
            socket=sockets[index] if sockets else None,
        )
        specs.append(
            WorkerSpec(
                local_rank=index,
                argv=_argv(config, local_rank),
                env=worker_environment(config.environment, place, given, local_rank, paths),
                cwd=config.working_directory,
                stdout_path=str(files.output(given.cycle, rank, "out")),
                stderr_path=str(files.output(given.cycle, rank, "err")),
                prefix=f"[rank {rank}] " if config.options.shows(rank) else None,
            )
        )
    return specs


def _argv(config: NodeConfig, local_rank: LocalRank) -> tuple[str, ...]:
    """The command, behind numactl where this worker is bound (rule G7).

    A program that has gone meanwhile is left to the supervisor, which says `not found` where numactl would exit with 1.
    """
    binding = config.numa.binding(local_rank)
    is_there = shutil.which(config.argv[0], path=config.environment.get("PATH", os.defpath)) is not None
    return wrapped(config.argv, binding) if binding is not None and is_there else config.argv


def prewarm(link: SupervisorLink, config: NodeConfig) -> None:
    """G10: also on a standby, from the agent's first moment; what differs between workers is not known yet."""
    if config.options.prewarm:
        env = with_default_threads(config.environment, config.shape.workers_per_node)
        link.prewarm(config.options.prewarm, config.argv, env, config.working_directory, after_s=PREWARM_AFTER_S)


def describe_place(given: Assignment) -> str:
    """One line: which ranks of the world run here."""
    first = global_rank(given.group_rank, LocalRank(0), given.workers_per_node)
    last = first + given.workers_per_node - 1
    return (
        f"cycle {given.cycle}: ranks {first}-{last} of {given.world_size} (group rank {given.group_rank} of "
        f"{given.group_world_size})"
    )
