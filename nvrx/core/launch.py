"""Whether Slurm started one agent per node (rules A0, A1), read from a mapping of variables.

Takes the mapping as an argument and never looks at the process's own environment. Knows no run and no coordinator:
what it refuses is refused before anything is joined.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from .shape import NodeCounts
from .topology import variable

FIRST_RESERVED_STEP_ID = 0xFFFF_FFF0
"""Slurm numbers the batch script, the interactive shell and the like from the top: such a step was not made by srun."""

_COUNT = r"[0-9]{1,9}(?:\(x[0-9]{1,9}\))?"
_COUNTS = re.compile(rf"{_COUNT}(?:,{_COUNT})*")
_SHOWN = 64


def is_under_slurm(env: Mapping[str, str]) -> bool:
    """A0: `SLURM_JOB_ID` is set and not empty."""
    return bool(variable(env, "SLURM_JOB_ID"))


def srun_step(env: Mapping[str, str]) -> str | None:
    """The id of the srun step that the process runs in; None in a batch script, an interactive shell or under ssh."""
    step = variable(env, "SLURM_STEP_ID")
    if not step or (_is_number(step) and int(step) >= FIRST_RESERVED_STEP_ID):
        return None
    return step


def launch_problem(env: Mapping[str, str], nnodes: NodeCounts) -> str | None:
    """Why an agent must not start here, in one line with the value seen and the `srun` line to use; None if it may."""
    if not is_under_slurm(env):
        return None
    found = next(_problems(env, nnodes), None)
    if found is None:
        return None
    return f"{found}; start one agent per node: srun --ntasks={_nodes(env)} --ntasks-per-node=1 nvrx-node join ..."


def _problems(env: Mapping[str, str], nnodes: NodeCounts) -> Iterator[str]:
    """A1. Job-scoped task counts are believed only where there is no step: within one they may be stale."""
    several = "this Slurm step runs several agents on a node"
    yield from _tasks_per_node(env, "SLURM_STEP_TASKS_PER_NODE", several)
    tasks, nodes = variable(env, "SLURM_STEP_NUM_TASKS"), variable(env, "SLURM_STEP_NUM_NODES")
    if tasks and nodes and _plain(tasks) != _plain(nodes):
        yield f"SLURM_STEP_NUM_TASKS={_shown(tasks)} but SLURM_STEP_NUM_NODES={_shown(nodes)}: {several}"
    local = variable(env, "SLURM_LOCALID")
    if local and _plain(local) != "0":
        yield f"SLURM_LOCALID={_shown(local)}: {several}, and this one is not its first"
    ranks = variable(env, "SLURM_GTIDS")
    if "," in ranks:
        yield f"SLURM_GTIDS={_shown(ranks)}: {several}"
    if srun_step(env) is None:
        if not _counts_processors(env, nnodes):
            yield from _tasks_per_node(env, "SLURM_TASKS_PER_NODE", "this Slurm job has several tasks on a node")
        yield from _one_of_many(env, nnodes)


def _counts_processors(env: Mapping[str, str], nnodes: NodeCounts) -> bool:
    """Whether SLURM_TASKS_PER_NODE says how many tasks there would be room for: nobody has asked for any number.

    So in the batch script of a job of one node, which may start the agent of that node by itself.
    """
    asked = any(variable(env, name) for name in ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE"))
    return not asked and variable(env, "SLURM_JOB_NUM_NODES") == "1" and nnodes.max_nodes == 1


def _tasks_per_node(env: Mapping[str, str], name: str, what: str) -> Iterator[str]:
    text = variable(env, name)
    if not text:
        return
    if _COUNTS.fullmatch(text) is None:
        yield f"{name}={_shown(text)} is no list of task counts such as 1(x3),2"
    elif any(int(one.partition("(")[0]) > 1 for one in text.split(",")):
        yield f"{name}={_shown(text)}: {what}"


def _one_of_many(env: Mapping[str, str], nnodes: NodeCounts) -> Iterator[str]:
    """A batch script or a shell runs on one node of its job, and would join as if it were that node's step."""
    if nnodes.min_nodes < 2:
        return
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_NNODES"):
        text = variable(env, name)
        if _is_number(text) and int(text) > 1:
            yield (
                f"{name}={_shown(text)} and --nnodes has MIN {nnodes.min_nodes}, but this is no srun step "
                "(SLURM_STEP_ID names none): a batch script, an interactive shell or ssh"
            )


def _nodes(env: Mapping[str, str]) -> str:
    """How many nodes the step has, or should have; a blank to fill in where no variable says it."""
    of_step = ("SLURM_STEP_NUM_NODES",) if srun_step(env) is not None else ()
    for name in (*of_step, "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"):
        text = variable(env, name)
        if _is_number(text) and int(text) > 0:
            return _plain(text)
    return "<nodes>"


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,18}", text) is not None


def _plain(text: str) -> str:
    return str(int(text)) if _is_number(text) else text


def _shown(text: str) -> str:
    return text if text.isascii() and text.isprintable() and len(text) <= _SHOWN else ascii(text[:_SHOWN])
