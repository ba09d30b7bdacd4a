"""What a node has in common with others: its replacement group and its NVLink domain (rules B6, B7).

Reads a mapping of variables that it is given, never the process's own environment, and asks no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .ids import DomainId, GroupId, name_problem
from .topology import BadVariable, block_address, nodes_per_array_task, variable

GROUP_VARIABLE = "NVRX_REPLACEMENT_GROUP_ID"
DOMAIN_VARIABLE = "NVRX_DOMAIN_ID"


@dataclass(frozen=True)
class Group:
    """A replacement group. Two arrays have equal task ids: only with `array_job_id` are their groups told apart.

    `array_job_id` is empty where the id was given by name: such a group may span arrays.
    """

    group_id: GroupId
    array_job_id: str = ""


def replacement_group(env: Mapping[str, str]) -> Group | None:
    """B6: the group given by name, else the array task; None outside arrays. Raises BadVariable."""
    named = variable(env, GROUP_VARIABLE)
    task = variable(env, "SLURM_ARRAY_TASK_ID")
    if not named and not task:
        return None
    group = Group(GroupId(named)) if named else Group(GroupId(task), variable(env, "SLURM_ARRAY_JOB_ID"))
    problem = name_problem(GROUP_VARIABLE if named else "SLURM_ARRAY_TASK_ID", group.group_id)
    if problem is None and group.array_job_id:
        problem = name_problem("SLURM_ARRAY_JOB_ID", group.array_job_id)
    if problem is not None:
        raise BadVariable(problem)
    return group


def replacement_group_size(env: Mapping[str, str], given: int | None, group: Group | None) -> int | None:
    """B6: how many nodes a whole group has; 1 turns grouping off, None where there are no groups.

    `given` is the option's value. Raises BadVariable for a node that has a group of unknown size.
    """
    if given is not None:
        return given
    size = nodes_per_array_task(env) if variable(env, "SLURM_ARRAY_TASK_ID") else None
    if size is None and group is not None:
        raise BadVariable(
            f"this node is in replacement group {group.group_id}, but nothing says how many nodes a whole group has; "
            "give --replacement-group-size (1: no grouping), or in an array SLURM_NNODES or SLURM_JOB_NUM_NODES"
        )
    return size


def domain_id(env: Mapping[str, str], gpu_cluster_uuid: str | None) -> DomainId:
    """B7: the NVLink domain of a node whose run has a segment size.

    Given by name, else what the GPUs say, else the block of `block.node`. Raises BadVariable where there is none.
    """
    address = block_address(env)
    found = variable(env, DOMAIN_VARIABLE) or gpu_cluster_uuid or (address or "").partition(".")[0]
    if not found:
        raise BadVariable(
            f"--segment-size needs this node's NVLink domain, but {DOMAIN_VARIABLE} is not set, no GPU names its "
            "cluster, and SLURM_TOPOLOGY_ADDR has no block (pattern block.node); set "
            f"{DOMAIN_VARIABLE}, or leave out --segment-size on all nodes"
        )
    problem = name_problem("the NVLink domain", found)
    if problem is not None:
        raise BadVariable(f"{problem}; set {DOMAIN_VARIABLE}")
    return DomainId(found)
