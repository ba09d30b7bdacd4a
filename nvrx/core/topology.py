"""A node's place in the machine room, read from a mapping of variables (rules B3, B5, B6).

Takes the mapping as an argument and never looks at the process's own environment.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from .ids import ArrayRank, NodeId

MAX_ORDER_TEXT = 256
MAX_WIRE_INT = 2**31 - 1
"""Ranks and counts are 32-bit on the wire."""
FROM_NODENAME = "NVRX_INFRA_RANK_FROM_NODENAME"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"", "0", "false", "no", "off"}


class OrderSource(enum.Enum):
    """Where a node's infra rank comes from, in the order of precedence (rule B3)."""

    NODENAME = "NODENAME"
    CROSS = "CROSS"
    TOPOLOGY = "TOPOLOGY"
    PROCID = "PROCID"
    GROUP_RANK = "GROUP_RANK"
    NODE_ID = "NODE_ID"


NUMERIC = frozenset({OrderSource.CROSS, OrderSource.PROCID, OrderSource.GROUP_RANK})
VARIABLE = {
    OrderSource.NODENAME: "SLURMD_NODENAME",
    OrderSource.CROSS: "CROSS_SLURM_PROCID",
    OrderSource.TOPOLOGY: "SLURM_TOPOLOGY_ADDR",
    OrderSource.PROCID: "SLURM_PROCID",
    OrderSource.GROUP_RANK: "GROUP_RANK",
    OrderSource.NODE_ID: "--node-id",
}


_SRUN = "srun --ntasks=<nodes> --ntasks-per-node=1"


def advice_on_tie(source: OrderSource, text: str) -> str:
    """What to do about two nodes that have the same value (rule B4)."""
    match source:
        case OrderSource.PROCID if int(text) == 0:
            return f"every process has 0 where srun did not start it: start the agents with {_SRUN}"
        case OrderSource.PROCID:
            return (
                f"start the agents of one job with {_SRUN}, and number those of several jobs through with "
                f"{VARIABLE[OrderSource.CROSS]}"
            )
        case OrderSource.CROSS:
            return f"give each node a {VARIABLE[source]} of its own"
        case OrderSource.GROUP_RANK:
            return "unset GROUP_RANK for the agents if another launcher left it in their environment"
        case _:
            return f"start one agent per node: {_SRUN}"


class BadVariable(ValueError):
    """A variable whose value cannot be used; the message names both."""


NaturalKey: TypeAlias = tuple[tuple[int, int, str], ...]


def natural_key(text: str) -> NaturalKey:
    """Sort key in which groups of digits compare as numbers; different texts never have the same key."""
    chunks = re.findall(r"[0-9]+|[^0-9]+", text)
    key = tuple((0, int(one), "") if one[0] in "0123456789" else (1, 0, one) for one in chunks)
    return (*key, (-1, 0, text))


@dataclass(frozen=True, order=True)
class OrderKey:
    """What nodes are sorted by: `missing` nodes (which lack the run's source) come after all others."""

    missing: bool
    first: NaturalKey
    second: NaturalKey


@lru_cache(maxsize=1 << 16)  # each join compares its key with those of all members
def order_key(source: OrderSource, text: str | None, node_id: NodeId) -> OrderKey:
    """The key of a node whose value in the run's source is `text`; None where the node has no such value."""
    if text is None:
        return OrderKey(True, natural_key(node_id), ())
    if source is OrderSource.TOPOLOGY:
        block, _, node = text.partition(".")
        return OrderKey(False, natural_key(block), natural_key(node))
    if source in NUMERIC:
        return OrderKey(False, ((0, int(text), ""),), ())
    return OrderKey(False, natural_key(text), ())


def order_value_problem(source: OrderSource, text: str) -> str | None:
    """Why `text` cannot be a value of `source`, in one line; None if it can."""
    if not text or len(text) > MAX_ORDER_TEXT:
        return f"{VARIABLE[source]} has {len(text)} characters; 1 to {MAX_ORDER_TEXT} are possible"
    if source in NUMERIC and re.fullmatch(r"[0-9]+", text) is None:
        return f"{VARIABLE[source]}={text!a} is not a whole number from 0 up"
    return None


def settle_source(nodes: list[Mapping[OrderSource, str]]) -> OrderSource:
    """The first source in order of precedence that all nodes have; every node has NODE_ID."""
    for source in OrderSource:
        if all(source in values for values in nodes):
            return source
    return OrderSource.NODE_ID


def variable(env: Mapping[str, str], name: str) -> str:
    """The value of a variable without blanks around it; an empty one counts as unset (rule A0)."""
    return env.get(name, "").strip()


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = variable(env, name)
    if not text:
        return None
    if re.fullmatch(r"[0-9]+", text) is None or len(text) > MAX_ORDER_TEXT:
        raise BadVariable(f"{name}={text[:64]!a} is not a whole number from 0 up; unset it or correct it")
    return int(text)


def restart_count(env: Mapping[str, str]) -> int:
    """How often Slurm has started the job again. Raises BadVariable."""
    text = variable(env, "SLURM_RESTART_COUNT") or "0"
    if not (text.isascii() and text.isdigit()) or len(text) > MAX_ORDER_TEXT or int(text) > MAX_WIRE_INT:
        raise BadVariable(f"SLURM_RESTART_COUNT={text[:64]!a} is not a number; unset it or correct it")
    return int(text)


def switch(env: Mapping[str, str], name: str) -> bool:
    """An on/off variable: 1/true/yes/on or 0/false/no/off/empty, any case. Raises BadVariable otherwise."""
    text = variable(env, name).lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise BadVariable(f"{name}={env[name]!a} is neither 1/true/yes/on nor 0/false/no/off")


def nodes_per_array_task(env: Mapping[str, str]) -> int | None:
    """Nodes of one task of the array: those of the step where Slurm says it, else those of the job."""
    return _number(env, "SLURM_NNODES") or _number(env, "SLURM_JOB_NUM_NODES") or None


def told_array_rank(env: Mapping[str, str]) -> ArrayRank | None:
    """The array rank as it is told to a coordinator: none where it does not fit. Raises BadVariable."""
    rank = array_rank(env)
    return rank if rank is not None and rank <= MAX_WIRE_INT else None


def array_rank(env: Mapping[str, str]) -> ArrayRank | None:
    """SLURM_PROCID; in an array, task id * nodes per task + SLURM_PROCID (rules B3.4, B5)."""
    procid = _number(env, "SLURM_PROCID")
    if procid is None:
        return None
    task = _number(env, "SLURM_ARRAY_TASK_ID")
    if task is None:
        return ArrayRank(procid)
    nodes = nodes_per_array_task(env)
    if nodes is None:
        raise BadVariable(
            f"SLURM_ARRAY_TASK_ID={task} needs the nodes per array task, but neither SLURM_NNODES nor "
            "SLURM_JOB_NUM_NODES is set; start the agent with srun or export one of them"
        )
    return ArrayRank(task * nodes + procid)


def block_address(env: Mapping[str, str]) -> str | None:
    """SLURM_TOPOLOGY_ADDR where its pattern is `block.node`; a switch or a ring is no block, and a node outside
    every block has the pattern `node`."""
    address = variable(env, "SLURM_TOPOLOGY_ADDR")
    is_block = variable(env, "SLURM_TOPOLOGY_ADDR_PATTERN").lower() == "block.node"
    return address if is_block and "." in address else None


def order_sources(env: Mapping[str, str], host_name: str, node_id: NodeId) -> dict[OrderSource, str]:
    """Every order source that this node has, with its value (rule B3).

    Raises BadVariable, with the variable and its value, where one is set to something unusable.
    """
    found = {OrderSource.NODE_ID: str(node_id)}
    if switch(env, FROM_NODENAME):
        found[OrderSource.NODENAME] = variable(env, "SLURMD_NODENAME") or host_name
    cross = _number(env, "CROSS_SLURM_PROCID")
    if cross is not None:
        found[OrderSource.CROSS] = str(cross)
    address = block_address(env)
    if address is not None:
        found[OrderSource.TOPOLOGY] = address
    procid = array_rank(env)
    if procid is not None:
        found[OrderSource.PROCID] = str(procid)
    group_rank = _number(env, "GROUP_RANK")
    if group_rank is not None:
        found[OrderSource.GROUP_RANK] = str(group_rank)
    job = variable(env, "SLURM_JOB_ID")
    if job and not found.keys() - {OrderSource.NODE_ID, OrderSource.GROUP_RANK}:
        raise BadVariable(
            f"SLURM_JOB_ID={job[:64]} is set but SLURM_PROCID is not, so this node has no place in "
            "order; start the agent with srun --ntasks=<nodes> --ntasks-per-node=1"
        )
    return found
