"""The environment of a worker (rule G1): torchrun's names and ours. Pure; inherited values of these are replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nvrx.core.endpoint import HostPort
from nvrx.core.ids import GlobalRank, GroupId, LocalRank, NodeId, RunId, global_rank
from nvrx.core.ranks import Assignment
from nvrx.worker import SOCKET_VARIABLE

ROLE = "default"
OURS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    "NVRX_RUN_ID",
    "NVRX_CYCLE",
    "NVRX_NODE_ID",
    "NVRX_INFRA_RANK",
    "NVRX_REPLACEMENT_GROUP_ID",
    "NVRX_RANK_MAP",
    "NVRX_FAILED_RANK_MAP",
    "NVRX_COORDINATOR",
    "NVRX_STORE_ENDPOINT",
    SOCKET_VARIABLE,
)


@dataclass(frozen=True)
class WorkerPaths:
    """Files named to one worker; `failed_rank_map` is None where no cycle of this node has failed."""

    error_file: str
    rank_map: str
    failed_rank_map: str | None
    socket: str | None = None
    """Where it speaks to its agent."""


@dataclass(frozen=True)
class Place:
    """The node that a worker belongs to."""

    run_id: RunId
    node_id: NodeId
    coordinator: HostPort


def worker_environment(
    inherited: Mapping[str, str], place: Place, given: Assignment, local_rank: LocalRank, paths: WorkerPaths
) -> dict[str, str]:
    """The whole environment of one worker."""
    rank: GlobalRank = global_rank(given.group_rank, local_rank, given.workers_per_node)
    # torch's rank 0 hosts the store itself, unless told that somebody else does.
    hosted = given.master is not None and given.master.lasting_port is not None
    env = {name: value for name, value in inherited.items() if name not in OURS}
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(given.world_size),
        "LOCAL_WORLD_SIZE": str(given.workers_per_node),
        "GROUP_RANK": str(given.group_rank),
        "GROUP_WORLD_SIZE": str(given.group_world_size),
        "ROLE_NAME": ROLE,
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(given.world_size),
        "TORCHELASTIC_RUN_ID": place.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(given.cycle),
        "TORCHELASTIC_MAX_RESTARTS": str(given.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(hosted),
        "TORCHELASTIC_ERROR_FILE": paths.error_file,
        "NVRX_RUN_ID": place.run_id,
        "NVRX_CYCLE": str(given.cycle),
        "NVRX_NODE_ID": place.node_id,
        "NVRX_INFRA_RANK": str(given.infra_rank),
        "NVRX_REPLACEMENT_GROUP_ID": str(GroupId(given.replacement_group_id)),
        "NVRX_RANK_MAP": paths.rank_map,
        "NVRX_COORDINATOR": str(place.coordinator),
    }
    if paths.failed_rank_map is not None:
        env["NVRX_FAILED_RANK_MAP"] = paths.failed_rank_map
    if paths.socket is not None:
        env[SOCKET_VARIABLE] = paths.socket
    if given.master is not None:
        address = given.master.address or place.coordinator.host
        env["MASTER_ADDR"] = address
        env["MASTER_PORT"] = str(given.master.port)
        if given.master.lasting_port is not None:
            env["NVRX_STORE_ENDPOINT"] = str(HostPort(address, given.master.lasting_port))
    return with_default_threads(env, given.workers_per_node)


def with_default_threads(env: Mapping[str, str], workers_per_node: int) -> dict[str, str]:
    """Several workers, each with a thread for every core, would stand in each other's way."""
    return {"OMP_NUM_THREADS": "1", **env} if workers_per_node > 1 else dict(env)
