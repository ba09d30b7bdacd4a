"""What an agent was asked to do, checked against its environment and this host.

Checks what can be checked before anything is joined. Raises Failed with one line and the exit code.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nvrx.commandline import EXIT_USAGE, Failed
from nvrx.core.allocation import DOMAIN_VARIABLE, Group, domain_id, replacement_group, replacement_group_size
from nvrx.core.budgets import EXIT_NO_RESTART
from nvrx.core.endpoint import HostPort
from nvrx.core.facts import DEFAULT_STOP_GRACE_S
from nvrx.core.fingerprint import Wishes, fingerprint, same_env_problem
from nvrx.core.ids import ArrayRank, DomainId, GlobalRank, NodeId, name_problem
from nvrx.core.launch import launch_problem
from nvrx.core.parallel import parallel_sizes
from nvrx.core.shape import NodeCounts, RankPolicy, RestartBudget, SettingsWish, Shape
from nvrx.core.topology import BadVariable, OrderSource, order_sources, restart_count, told_array_rank, variable
from nvrx.runtime_dir import runtime_dir

from . import gpu
from .gpu_devices import VISIBLE, NodeGpus
from .hangs import HangOptions
from .health.gpu_memory import DEFAULT_RECLAIM_TIMEOUT_S
from .health.monitor import DEFAULT_INTERVAL_S, HealthWishes
from .health.wishes import health_wishes
from .log_file import Rotation
from .machine import this_machine
from .numa import NumaPlan, NumaWish, plan_numa

DEFAULT_COORDINATOR_GRACE_S = 600.0
DESCRIPTORS_PER_WORKER = 6
"""In the processes that hold workers' pipes: both ends, or one and a file; one each of the cycle before."""
DESCRIPTORS_BESIDE = 64


@dataclass(frozen=True)
class JoinOptions:
    """The command line of `nvrx-node join`, as given."""

    coordinators: tuple[HostPort, ...]
    command: tuple[str, ...]
    nnodes: NodeCounts
    nproc_per_node: str = "1"
    run_id: str | None = None
    node_id: str | None = None
    advertise_addr: str | None = None
    max_restarts: int | None = None
    max_replacements: int | None = None
    join_timeout_s: float | None = None
    last_call_s: float | None = None
    stop_grace_s: float = DEFAULT_STOP_GRACE_S
    coordinator_grace_s: float = DEFAULT_COORDINATOR_GRACE_S
    checkpoint_path: str = ""
    checkpoint_iteration_file: Path | None = None
    settle_s: float | None = None
    restart_backoff_s: float | None = None
    max_no_progress_cycles: int | None = None
    restart_budget: RestartBudget | None = None
    max_node_failures: int | None = None
    quarantine_s: float | None = None
    no_restart_exit_code: int = EXIT_NO_RESTART
    exit_when_excluded: bool | None = None
    """None: in a Slurm array only, where Slurm takes the node back."""
    stops_on_partition: bool = False
    log_dir: Path = Path("nvrx-logs")
    cycle_info_dir: Path | None = None
    tee: str | None = None
    """`all`, `rank0` or `none`; None: all where there is one node, else rank0."""
    log_rotation: Rotation | None = None
    token: str | None = None
    reopen: bool = False
    hangs: HangOptions = HangOptions()
    health_check: str | None = None
    health_interval_s: float = DEFAULT_INTERVAL_S
    health_paths: tuple[str, ...] = ()
    gpu_reclaim_timeout_s: float = DEFAULT_RECLAIM_TIMEOUT_S
    segment_size: int | None = None
    replacement_group_size: int | None = None
    rank_policy: str | None = None
    parallel_sizes: Mapping[str, int | None] = field(default_factory=dict)
    """By field of ParallelSizes; None where the worker command is to say it."""
    prewarm: tuple[str, ...] = ()
    """Modules that a warm process imports ahead; none: workers start cold."""
    fingerprint: Wishes = Wishes()
    numa: NumaWish = NumaWish()

    def shows(self, rank: GlobalRank) -> bool:
        """G8: whether a worker's output also goes to the agent's own streams."""
        tee = self.tee or ("all" if self.nnodes.max_nodes == 1 else "rank0")
        return tee == "all" or (tee == "rank0" and rank == 0)


@dataclass(frozen=True)
class Surroundings:
    """What this node has in common with others, and what the run is to make of it (rules B6, B7, C6)."""

    group: Group | None
    replacement_group_size: int | None
    domain_id: DomainId | None
    segment_size: int | None
    rank_policy: str | None


@dataclass(frozen=True)
class NodeConfig:
    """Everything an agent needs, checked. `run_id` is empty where the coordinator is to say it."""

    options: JoinOptions
    run_id: str
    node_id: NodeId
    shape: Shape
    wish: SettingsWish
    order_sources: Mapping[OrderSource, str]
    array_rank: ArrayRank | None
    surroundings: Surroundings
    restart_count: int
    leaves_when_excluded: bool
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    working_directory: str
    runtime_dir: Path
    numa: NumaPlan
    health: HealthWishes = HealthWishes()


def resolve(options: JoinOptions, env: Mapping[str, str]) -> NodeConfig:
    """Check the options against this machine and `env`, the environment that the agent was started with."""
    _refuse_local_coordinator_for_many(options)
    _refuse_launch(options, env)
    _refuse_prewarm(options)
    node_id = options.node_id or variable(env, "SLURMD_NODENAME") or socket.gethostname()
    run_id = options.run_id or variable(env, "SLURM_ARRAY_JOB_ID") or variable(env, "SLURM_JOB_ID")
    for problem in (name_problem("--node-id", node_id), name_problem("--run-id", run_id) if run_id else None):
        if problem is not None:
            raise Failed(problem, EXIT_USAGE)
    try:
        sources = order_sources(env, socket.gethostname(), NodeId(node_id))
        place = told_array_rank(env)
        restarts = restart_count(env)
        surroundings = _surroundings(options, env)
    except BadVariable as error:
        raise Failed(str(error), EXIT_USAGE) from error
    gpus = NodeGpus(env)
    shape = _shape(options, env, node_id, surroundings, gpus)
    _refuse_few_descriptors(shape.workers_per_node)
    config = NodeConfig(
        options=options,
        run_id=run_id,
        node_id=NodeId(node_id),
        shape=shape,
        wish=SettingsWish(
            max_restarts=options.max_restarts,
            max_replacements=options.max_replacements,
            join_timeout_s=options.join_timeout_s,
            last_call_s=options.last_call_s,
            settle_s=options.settle_s,
            restart_backoff_s=options.restart_backoff_s,
            max_no_progress_cycles=options.max_no_progress_cycles,
            restart_budget=options.restart_budget,
            max_node_failures=options.max_node_failures,
            quarantine_s=options.quarantine_s,
        ),
        order_sources=sources,
        array_rank=place,
        surroundings=surroundings,
        restart_count=restarts,
        leaves_when_excluded=_leaves_when_excluded(options, env),
        argv=_argv(options.command, env),
        environment=dict(env),
        working_directory=os.getcwd(),
        runtime_dir=Path(runtime_dir(env)),
        numa=plan_numa(options.numa, shape.workers_per_node, env, gpus),
        health=health_wishes(options.health_check, options.health_interval_s, options.health_paths, env),
    )
    _require_writable(options.log_dir, "--log-dir")
    if options.cycle_info_dir is not None:
        _require_writable(options.cycle_info_dir, "--cycle-info-dir")
    return config


def _leaves_when_excluded(options: JoinOptions, env: Mapping[str, str]) -> bool:
    """E8: in an array Slurm is to take an excluded node back; elsewhere it stays, so that it can return."""
    if options.exit_when_excluded is not None:
        return options.exit_when_excluded
    return bool(variable(env, "SLURM_ARRAY_TASK_ID"))


def _refuse_local_coordinator_for_many(options: JoinOptions) -> None:
    """A4: port 0 starts a coordinator for this node alone; with more nodes each would form a world of one."""
    local = [one for one in options.coordinators if one.port == 0]
    if not local:
        return
    if not local[0].is_loopback or len(options.coordinators) > 1:
        raise Failed(f"--coordinator {local[0]} has port 0; give the port that nvrx-coord serve printed", EXIT_USAGE)
    if options.nnodes.max_nodes > 1:
        counts = f"{options.nnodes.min_nodes}:{options.nnodes.max_nodes}"
        raise Failed(
            f"--coordinator {local[0]} starts a coordinator for one node only, but --nnodes is {counts}; start "
            "nvrx-coord serve on a host that all nodes reach, and give its HOST:PORT",
            EXIT_USAGE,
        )


def _refuse_launch(options: JoinOptions, env: Mapping[str, str]) -> None:
    problem = launch_problem(env, options.nnodes)
    if problem is not None:
        raise Failed(problem, EXIT_USAGE)


def _refuse_prewarm(options: JoinOptions) -> None:
    wrong = [name for name in options.prewarm if not all(part.isidentifier() for part in name.split("."))]
    if wrong:
        raise Failed(f"--prewarm {wrong[0]!a} is no module's name; give names with commas, as torch,numpy", EXIT_USAGE)


def _shape(options: JoinOptions, env: Mapping[str, str], node_id: str, around: Surroundings, gpus: NodeGpus) -> Shape:
    """The shape that this node expects of the run (rules A2, A5-A7)."""
    wishes = options.fingerprint
    shape = Shape(
        options.nnodes.min_nodes,
        options.nnodes.max_nodes,
        _workers_per_node(options.nproc_per_node, gpus),
        options.checkpoint_path,
        fingerprint(options.command, env, this_machine(options.command, env, node_id), wishes),
        parallel=parallel_sizes(options.parallel_sizes, options.command),
        segment_size=around.segment_size,
        replacement_group_size=around.replacement_group_size or 1,
        rank_policy=RankPolicy((around.rank_policy or "infra").upper()),
    )
    problem = same_env_problem(wishes.same_env) or shape.problem()
    if problem is not None:
        raise Failed(problem, EXIT_USAGE)
    return shape


def _surroundings(options: JoinOptions, env: Mapping[str, str]) -> Surroundings:
    """Raises BadVariable."""
    group = replacement_group(env)
    return Surroundings(
        group=group,
        replacement_group_size=replacement_group_size(env, options.replacement_group_size, group),
        domain_id=_domain_id(env) if options.segment_size is not None else None,
        segment_size=options.segment_size,
        rank_policy=options.rank_policy,
    )


def _domain_id(env: Mapping[str, str]) -> DomainId:
    """B7. GPUs take seconds to answer: they are asked only where no domain is given by name. Raises BadVariable."""
    return domain_id(env, None if variable(env, DOMAIN_VARIABLE) else gpu.cluster_uuid(env))


def _workers_per_node(text: str, gpus: NodeGpus) -> int:
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    if text == "gpu":
        seen = gpus.visible(surely=True)
        if not seen:
            raise Failed(
                f"--nproc-per-node gpu: workers see no GPU here (as NVML or nvidia-smi tells, and {VISIBLE}); give a "
                "number",
                EXIT_USAGE,
            )
        return len(seen)
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise Failed(f"--nproc-per-node {text!a} is not a number from 1 up, nor gpu, nor cpu", EXIT_USAGE)
    return int(text)


def _refuse_few_descriptors(workers: int) -> None:
    """The soft limit is ours to raise, this one is not; where it is too low, a later cycle is the first to fail."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = workers * DESCRIPTORS_PER_WORKER + DESCRIPTORS_BESIDE
    if resource.RLIM_INFINITY != limit < needed:
        raise Failed(
            f"{workers} workers need {needed} open files in one process, but the hard limit here is {limit} "
            "(ulimit -Hn); raise it, or lower --nproc-per-node",
            EXIT_USAGE,
        )


def _argv(command: Sequence[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """G3: the command as given; a Python script that is not executable runs with this Python."""
    first = command[0]
    if first.endswith(".py") and Path(first).is_file() and not os.access(first, os.X_OK):
        return (sys.executable, *command)
    if shutil.which(first, path=env.get("PATH", os.defpath)) is None:
        why = "is not executable" if Path(first).is_file() else "not found"
        raise Failed(f"{first}: {why}; give the command to run after --", EXIT_USAGE)
    return tuple(command)


def _require_writable(directory: Path, option: str) -> None:
    probe = directory / f".nvrx-write-{uuid.uuid4().hex}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise Failed(
            f"cannot write in the directory {directory}: {error.strerror}; give another with {option}", EXIT_USAGE
        ) from error
