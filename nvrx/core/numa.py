"""Which NUMA node each worker of a node is bound to, and how (rule G7): values and decisions.

Decides from a description of the machine that it is given; reads no sysfs, runs no numactl, knows no cycle.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .ids import LocalRank
from .topology import BadVariable, variable

GPUS_PER_NUMA = "NVRX_GPUS_PER_NUMA"
MAX_PER_NUMA = 4096
_CPU_LIST = re.compile(r"[0-9]+(-[0-9]+)?")
_MAX_CPU = 1 << 20


class NumaSource(enum.Enum):
    """Where a worker's node comes from (`--numa-binding`)."""

    FORMULA = "formula"
    GPU = "gpu"
    OFF = "off"


class MemoryMode(enum.Enum):
    """What holds for a bound worker's memory (`--numa-memory`)."""

    MEMBIND = "membind"
    """Only of its node: an allocation that does not fit fails."""
    LOCAL = "local"
    """Of the node that the worker runs on, while there is any."""
    NONE = "none"
    """Nothing is said; only the processors are bound."""


class Means(enum.Enum):
    """How a worker is held on its node."""

    NODE = "node"
    """numactl, by the node's number."""
    CPUS = "cpus"
    """numactl, by the CPUs one by one, where the number would not do: numactl refuses a node without memory, and would
    take CPUs that this process was not given."""
    TASKSET = "taskset"
    """taskset, by the CPUs, where memory is not bound and numactl refuses to work at all: since 2.0.19 it does so
    wherever get_mempolicy is forbidden, as in most containers."""


@dataclass(frozen=True)
class NumaNode:
    """A node as the kernel describes it. `cpus`: those online."""

    number: int
    cpus: frozenset[int]
    has_memory: bool


@dataclass(frozen=True)
class NumaMachine:
    """A machine, and what this process may use of it.

    `nodes` is None where the kernel shows none at all (built without NUMA, or hidden from a container).
    `allowed_memory` (Mems_allowed_list) and `allowed_cpus` (Cpus_allowed_list) are None where they are not known.
    """

    nodes: Mapping[int, NumaNode] | None
    allowed_memory: frozenset[int] | None = None
    allowed_cpus: frozenset[int] | None = None

    def usable_cpus(self, node: int) -> frozenset[int]:
        """The CPUs of a node that this process may run on; empty where the node is not known."""
        if self.nodes is None or node not in self.nodes:
            return frozenset()
        cpus = self.nodes[node].cpus
        return cpus if self.allowed_cpus is None else cpus & self.allowed_cpus

    def memory_is_usable(self, node: int) -> bool:
        """Whether this process may have memory of the node."""
        known = self.nodes is not None and node in self.nodes
        has = not known or (self.nodes is not None and self.nodes[node].has_memory)
        return has and (self.allowed_memory is None or node in self.allowed_memory)


@dataclass(frozen=True)
class Binding:
    """What one worker is bound to, as data: what numactl is told comes from it, and whatever else starts workers.

    `cpus`: those of the node that this process may run on; empty where the kernel does not show them.
    """

    local_rank: LocalRank
    node: int
    cpus: tuple[int, ...]
    memory: MemoryMode = MemoryMode.MEMBIND
    means: Means = Means.NODE


@dataclass(frozen=True)
class NodeProblem:
    """Why workers cannot be bound to a node.

    `certain`: the kernel shows the node and says so itself. A node that it does not show may be hidden (a container
    without /sys), and then numactl knows better.
    """

    what: str
    advice: str
    certain: bool = True


def gpus_per_numa(env: Mapping[str, str]) -> int | None:
    """The value of NVRX_GPUS_PER_NUMA; None where it is unset or empty. Raises BadVariable."""
    text = variable(env, GPUS_PER_NUMA)
    if not text:
        return None
    if re.fullmatch(r"[0-9]{1,9}", text) is None or not 1 <= int(text) <= MAX_PER_NUMA:
        raise BadVariable(
            f"{GPUS_PER_NUMA}={text[:64]!a} is not a whole number from 1 to {MAX_PER_NUMA}; give how many GPUs of this "
            "machine belong to one NUMA node, or unset it"
        )
    return int(text)


def formula_nodes(workers: int, per_numa: int) -> tuple[int, ...]:
    """The node of each local rank."""
    return tuple(local_rank // per_numa for local_rank in range(workers))


def node_problem(machine: NumaMachine, node: int, memory: MemoryMode) -> NodeProblem | None:
    """Why no worker of this process can be bound to `node`; None where it can, as far as the kernel says."""
    if machine.nodes is None:
        what = "but this kernel shows no NUMA nodes (/sys/devices/system/node is missing)"
        return NodeProblem(what, "leave the binding out here", certain=False)
    here = f"nodes here: {number_list(machine.nodes)}"
    if node not in machine.nodes:
        allowed = machine.allowed_memory
        told = f"; allowed to this process (Mems_allowed_list): {number_list(allowed)}" if allowed is not None else ""
        what = f"which this machine does not have; {here}{told}"
        return NodeProblem(what, "", certain=False)
    described = machine.nodes[node]
    if not described.cpus:
        return NodeProblem(
            f"which has no CPUs{' (only memory)' if described.has_memory else ''}; nodes with CPUs: "
            f"{number_list(one.number for one in machine.nodes.values() if one.cpus)}; {here}",
            "",
        )
    if not machine.usable_cpus(node):
        return NodeProblem(
            f"none of whose CPUs ({number_list(described.cpus)}) is allowed to this process (Cpus_allowed_list: "
            f"{number_list(machine.allowed_cpus or ())}); {here}",
            "start the agent with CPUs of that node (cpuset, taskset, srun --cpu-bind)",
        )
    return _memory_problem(machine, described, here) if memory is MemoryMode.MEMBIND else None


def _memory_problem(machine: NumaMachine, node: NumaNode, here: str) -> NodeProblem | None:
    if not node.has_memory:
        having = number_list(one.number for one in (machine.nodes or {}).values() if one.has_memory)
        return NodeProblem(
            f"which has no memory; nodes with memory: {having}; {here}",
            "--numa-memory local or none binds to its CPUs alone",
        )
    if not machine.memory_is_usable(node.number):
        return NodeProblem(
            f"whose memory is not allowed to this process (its cpuset: Mems_allowed_list "
            f"{number_list(machine.allowed_memory or ())}); {here}",
            "start the agent in a cpuset with that node, or give --numa-memory local or none",
        )
    return None


def bind(machine: NumaMachine, local_rank: LocalRank, node: int, memory: MemoryMode) -> Binding:
    """The binding of a worker to a node without a problem."""
    known = machine.nodes is not None and node in machine.nodes
    means = Means.CPUS if known and not machine.memory_is_usable(node) else Means.NODE
    return Binding(local_rank, node, tuple(sorted(machine.usable_cpus(node))), memory, means)


def binding_words(binding: Binding) -> tuple[str, ...]:
    """What stands before the command: a program that becomes it, and its options."""
    cpus = number_list(binding.cpus)
    if binding.means is Means.TASKSET:
        return ("taskset", "-c", cpus)
    where = f"--physcpubind={cpus}" if binding.means is Means.CPUS else f"--cpunodebind={binding.node}"
    memory = {
        MemoryMode.MEMBIND: (f"--membind={binding.node}",),
        MemoryMode.LOCAL: ("--localalloc",),
        MemoryMode.NONE: (),
    }
    return ("numactl", where, *memory[binding.memory])


def wrapped(command: Sequence[str], binding: Binding) -> tuple[str, ...]:
    """The command behind numactl, which becomes it: pid, signals and exit code are the command's own (rule G7).

    The scan for options of numactl, and of taskset, ends at the first word that is none, so the command's own arguments
    are safe; only from numactl one whose name begins with a dash has to be told apart.
    """
    apart = ("--",) if command[0].startswith("-") and binding.means is not Means.TASKSET else ()
    return (*binding_words(binding), *apart, *command)


def unlike_first_gpus(env: Mapping[str, str]) -> str | None:
    """The variable that leaves other GPUs visible than the first ones in order, as text; None where none does.

    The formula takes the worker of local rank 0 to use GPU 0. GPUs named otherwise than by number say nothing here.
    """
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        words = [one.strip() for one in variable(env, name).split(",")]
        if all(re.fullmatch(r"[0-9]{1,9}", one) for one in words) and [int(one) for one in words] != [
            *range(len(words))
        ]:
            return f"{name}={variable(env, name)[:64]}"
    return None


def parse_number_list(text: str) -> frozenset[int]:
    """A list as the kernel prints it: `0-3,8`, or nothing. Raises ValueError."""
    found: set[int] = set()
    for one in text.strip().split(",") if text.strip() else ():
        if _CPU_LIST.fullmatch(one) is None:
            raise ValueError(f"{text[:64]!a} is no list of numbers such as 0-3,8")
        first, _, last = one.partition("-")
        if int(last or first) > _MAX_CPU:
            raise ValueError(f"{text[:64]!a} has a number above {_MAX_CPU}")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def number_list(numbers: Iterable[int]) -> str:
    """The same the other way; `none` where there are none."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, one)) for one in runs) or "none"


def describe_bindings(bindings: Sequence[Binding]) -> str:
    """One line: `local ranks 0-3 on node 0 (CPUs 0-55), 4-7 on node 1 (CPUs 56-111)`."""
    by_node: dict[int, list[Binding]] = {}
    for one in bindings:
        by_node.setdefault(one.node, []).append(one)
    told = []
    for node, them in by_node.items():
        cpus = f" (CPUs {number_list(them[0].cpus)})" if them[0].cpus else ""
        told.append(f"{number_list(one.local_rank for one in them)} on node {node}{cpus}")
    memory = {
        MemoryMode.MEMBIND: "memory of that node only",
        MemoryMode.LOCAL: "memory of that node first",
        MemoryMode.NONE: "memory not bound",
    }
    return f"local {'rank' if len(bindings) == 1 else 'ranks'} {', '.join(told)}; {memory[bindings[0].memory]}"
