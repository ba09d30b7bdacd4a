"""What torchrun was asked for, as options of ours: endpoint, `--rdzv-conf`, and what its own agent knows.

Checks what can be checked before anything is joined. Never imports torch; reads no environment.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvrx.commandline import EXIT_USAGE, Failed

from .cli import options_of
from .config import JoinOptions

NO_RUN_ID = "none"
"""What torchrun makes of a missing --rdzv-id."""
STOP_GRACE_S = 30
"""How long torch's agent lets workers end between SIGTERM and SIGKILL."""

VALUES = (
    "advertise_addr",
    "checkpoint_iteration_file",
    "checkpoint_path",
    "context_parallel",
    "coordinator_grace",
    "expert_parallel",
    "global_batch_size",
    "join_timeout",
    "last_call",
    "log_dir",
    "max_no_progress_cycles",
    "max_node_failures",
    "max_replacements",
    "max_restarts",
    "micro_batch_size",
    "no_restart_exit_code",
    "node_id",
    "nproc_per_node",
    "on_partition",
    "pipeline_parallel",
    "quarantine",
    "rank_policy",
    "replacement_group_size",
    "restart_backoff",
    "restart_budget",
    "segment_size",
    "settle",
    "tensor_parallel",
    "token_file",
)
LISTS = ("same_env", "ignore_env")
"""Several values with blanks between."""
FLAGS = ("exit_when_excluded", "no_env_check", "reopen")
_OTHER_BACKENDS = frozenset(
    {
        "timeout",  # torchrun always gives it
        "close_timeout",
        "heartbeat_timeout",
        "is_host",
        "keep_alive_interval",
        "keep_alive_max_attempt",
        "last_call_timeout",
        "rank",
        "read_timeout",
        "store_type",
        "use_libuv",
    }
)
"""Keys of torch's own backends: passed over, so that a line needs no more than another backend's name."""
_YES = frozenset({"1", "true", "yes", "on", ""})
_NO = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True)
class Rendezvous:
    """torch's RendezvousParameters, without torch."""

    endpoint: str
    run_id: str
    min_nodes: int
    max_nodes: int
    local_addr: str | None
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Launch:
    """What torch's agent on this node is to start."""

    workers_per_node: int
    command: tuple[str, ...]
    max_restarts: int
    """torch's own count, of this node alone."""


def conf_problem(config: Mapping[str, Any]) -> str | None:
    """Why `--rdzv-conf` cannot be meant so, in one line; None if it can."""
    for key, value in config.items():
        name = key.replace("-", "_")
        if name in FLAGS and str(value).lower() not in _YES | _NO:
            return f"--rdzv-conf {key}={value}: give true or false"
        if name not in {*VALUES, *LISTS, *FLAGS, *_OTHER_BACKENDS}:
            return f"--rdzv-conf {key}: not known to nvrx; known are {', '.join(sorted((*VALUES, *LISTS, *FLAGS)))}"
    return None


def join_options(asked: Rendezvous, launch: Launch) -> JoinOptions:
    """The options of a node, as `nvrx-node join` would have them. Raises Failed with one line."""
    if not asked.endpoint:
        raise Failed("--rdzv-endpoint is missing; give HOST:PORT, where nvrx-coord serve listens", EXIT_USAGE)
    problem = conf_problem(asked.config)
    if problem is not None:
        raise Failed(problem, EXIT_USAGE)
    arguments = ["--coordinator", asked.endpoint, "--nnodes", f"{asked.min_nodes}:{asked.max_nodes}"]
    if asked.run_id and asked.run_id != NO_RUN_ID:
        arguments += ["--run-id", asked.run_id]
    if asked.local_addr:
        arguments += ["--advertise-addr", asked.local_addr]
    arguments += _from_conf(asked.config)
    arguments += ["--nproc-per-node", str(launch.workers_per_node), "--stop-grace", str(STOP_GRACE_S)]
    options = options_of(arguments, launch.command)
    if any(one.port == 0 for one in options.coordinators):
        raise Failed(
            f"--rdzv-endpoint {asked.endpoint} has port 0; give the port that nvrx-coord serve printed", EXIT_USAGE
        )
    return options


def _from_conf(config: Mapping[str, Any]) -> list[str]:
    arguments: list[str] = []
    for key, value in config.items():
        name = key.replace("-", "_")
        option = f"--{name.replace('_', '-')}"
        if name == "exit_when_excluded":
            arguments.append(option if str(value).lower() in _YES else "--no-exit-when-excluded")
        elif name in FLAGS:
            arguments += [option] if str(value).lower() in _YES else []
        elif name in LISTS:
            arguments += [word for one in str(value).split() for word in (option, one)]
        elif name in VALUES:
            arguments += [option, str(value)]
    return arguments


def command_of(entrypoint: object, arguments: Sequence[object]) -> tuple[str, ...]:
    """The worker command, as nodes compare it; a function stands there by its name."""
    words = tuple(map(str, arguments))
    if isinstance(entrypoint, str):
        return (entrypoint, *words)
    name = getattr(entrypoint, "__qualname__", type(entrypoint).__name__)
    return (sys.executable, f"{getattr(entrypoint, '__module__', '?')}:{name}", *words)
