"""The NUMA bindings of this node's workers, settled and tried out before anything is joined (rule G7).

What is decided stands in `nvrx.core.numa`; here the machine is read, GPUs and numactl are asked. Raises Failed with one
line. Must not know cycles or the coordinator.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvrx.commandline import EXIT_USAGE, Failed
from nvrx.core.facts import Device
from nvrx.core.ids import LocalRank
from nvrx.core.numa import (
    GPUS_PER_NUMA,
    Binding,
    Means,
    MemoryMode,
    NodeProblem,
    NumaMachine,
    NumaSource,
    bind,
    binding_words,
    formula_nodes,
    gpus_per_numa,
    node_problem,
    number_list,
    unlike_first_gpus,
)
from nvrx.core.topology import BadVariable

from .gpu_devices import VISIBLE, Gpu, NodeGpus
from .numa_sysfs import pci_local_cpus, pci_numa_node, read_machine

PROBES_WITHIN_S = 10.0
"""For all of them together; one takes some 20 ms."""
_PROBE = (sys.executable, "-I", "-S", "-c", "import os; print(*os.sched_getaffinity(0))")
"""What is run bound to a node, to see that it runs, and on which CPUs."""
_FORBIDDEN = ("not permitted", "denied")
_NO_POLICY = "does not support NUMA policy"
"""What numactl says where get_mempolicy is forbidden, since 2.0.19, and in a kernel without NUMA."""


@dataclass(frozen=True)
class NumaWish:
    """`--numa-binding` and `--numa-memory` as given; without the first it is the formula where its variable is set."""

    source: NumaSource | None = None
    memory: MemoryMode = MemoryMode.MEMBIND


@dataclass(frozen=True)
class NumaPlan:
    """Where the workers of this node run. `bindings` has one for each local rank, or none: then they run anywhere.

    `gpus`: the GPU of each local rank with its own NUMA node, as far as they are known. `notes`: what a person should
    look at.
    """

    source: NumaSource = NumaSource.OFF
    bindings: tuple[Binding, ...] = ()
    gpus: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()

    def binding(self, local_rank: LocalRank) -> Binding | None:
        """The binding of one worker; None where workers are not bound."""
        return self.bindings[local_rank] if self.bindings else None

    @property
    def devices(self) -> tuple[Device, ...]:
        """What rank maps tell of each worker: its GPU's own node where that is known, else the one it is bound to."""
        told = {one.local_rank: one for one in self.gpus}
        for one in self.bindings:
            device = told.get(one.local_rank, Device(one.local_rank))
            if device.numa_node is None:
                told[one.local_rank] = dataclasses.replace(device, numa_node=one.node)
        return tuple(told.values())


@dataclass(frozen=True)
class _Wanted:
    """The node that one worker is to run on, and who says so: the beginning of a sentence."""

    node: int
    because: str
    remedy: str


def plan_numa(
    wish: NumaWish,
    workers: int,
    env: Mapping[str, str],
    seen: NodeGpus,
    root: Path = Path("/"),
    probes_within_s: float = PROBES_WITHIN_S,
) -> NumaPlan:
    """Settle the bindings of `workers` workers started with `env`, who see these GPUs. Raises Failed."""
    try:
        per_numa = gpus_per_numa(env) if wish.source in {None, NumaSource.FORMULA} else None
    except BadVariable as error:
        raise Failed(str(error), EXIT_USAGE) from error
    source = wish.source or (NumaSource.FORMULA if per_numa is not None else NumaSource.OFF)
    if source is NumaSource.FORMULA and per_numa is None:
        raise Failed(f"--numa-binding formula needs {GPUS_PER_NUMA}: how many GPUs belong to one NUMA node", EXIT_USAGE)
    if source is not NumaSource.OFF:
        _require_numactl(env, f"{GPUS_PER_NUMA}={per_numa}" if per_numa is not None else "--numa-binding gpu")
    machine = read_machine(root)
    gpus = seen.visible(surely=source is NumaSource.GPU)
    devices = tuple(_device(LocalRank(index), gpu, root) for index, gpu in enumerate(gpus[:workers]))
    notes: list[str] = []
    if source is NumaSource.GPU:
        wanted = _beside_gpus(gpus, workers, machine, root, notes)
    elif per_numa is not None:
        wanted = _by_formula(workers, per_numa)
        notes += _unlike_formula(wanted, devices, env)
    else:
        return NumaPlan(source, gpus=devices)
    bindings = _Binder(machine, wish.memory, env, probes_within_s).bindings(wanted)
    return NumaPlan(source, bindings, devices, tuple(notes))


def _require_numactl(env: Mapping[str, str], wanted_by: str) -> None:
    if shutil.which("numactl", path=env.get("PATH", os.defpath)) is None:
        raise Failed(
            f"{wanted_by} binds workers with numactl, which is not found in PATH; install it (apt-get install numactl, "
            f"or dnf install numactl), or give --numa-binding off{f' or unset {GPUS_PER_NUMA}'}",
            EXIT_USAGE,
        )


# ---- which node ---------------------------------------------------------------------------------------------


def _by_formula(workers: int, per_numa: int) -> list[_Wanted]:
    remedy = f"correct {GPUS_PER_NUMA} (GPUs per NUMA node), or give --numa-binding gpu or off"
    nodes = formula_nodes(workers, per_numa)
    return [_Wanted(node, f"{GPUS_PER_NUMA}={per_numa} puts {_ranks(nodes, node)}", remedy) for node in nodes]


def _ranks(nodes: Sequence[int], node: int) -> str:
    ranks = [local_rank for local_rank, one in enumerate(nodes) if one == node]
    return f"local {'rank' if len(ranks) == 1 else 'ranks'} {number_list(ranks)}"


def _beside_gpus(
    gpus: Sequence[Gpu], workers: int, machine: NumaMachine, root: Path, notes: list[str]
) -> list[_Wanted]:
    """Each worker on the node of the GPU of its local rank."""
    if len(gpus) < workers:
        raise Failed(
            f"--numa-binding gpu puts each worker beside its GPU, but there are {workers} workers and {len(gpus)} GPUs "
            f"that they see (as NVML or nvidia-smi tells, and {VISIBLE}); correct --nproc-per-node, or give "
            "--numa-binding formula or off",
            EXIT_USAGE,
        )
    remedy = f"give --numa-binding formula with {GPUS_PER_NUMA}, or off"
    wanted = []
    for local_rank, gpu in enumerate(gpus[:workers]):
        node = _node_beside(gpu, machine, root)
        if node is None:
            only = [one.number for one in (machine.nodes or {}).values() if one.cpus]
            if len(only) != 1:
                raise Failed(
                    f"--numa-binding gpu: the kernel tells no NUMA node of GPU {gpu} of local rank {local_rank} "
                    f"(numa_node of its PCI device); nodes with CPUs: {number_list(only)}; {remedy}",
                    EXIT_USAGE,
                )
            node = only[0]
            notes.append(f"the kernel tells no NUMA node of GPU {gpu}; taking node {node}, the only one with CPUs")
        because = f"--numa-binding gpu puts local rank {local_rank} (GPU {gpu})"
        wanted.append(_Wanted(node, because, remedy))
    return wanted


def _node_beside(gpu: Gpu, machine: NumaMachine, root: Path) -> int | None:
    """The node of a GPU, or where that has only memory (its own, on Grace) the one with the CPUs next to it."""
    node = pci_numa_node(gpu.pci_bus_id, root)
    nodes = machine.nodes or {}
    if node is None or node not in nodes or nodes[node].cpus:
        return node
    near = pci_local_cpus(gpu.pci_bus_id, root)
    holding = [one.number for one in nodes.values() if one.cpus & near]
    return holding[0] if len(holding) == 1 else node


def _device(local_rank: LocalRank, gpu: Gpu, root: Path) -> Device:
    return Device(local_rank, gpu.uuid, gpu.pci_bus_id, pci_numa_node(gpu.pci_bus_id, root))


def _unlike_formula(wanted: Sequence[_Wanted], devices: Sequence[Device], env: Mapping[str, str]) -> list[str]:
    """What speaks against the formula here: it assumes that the order of GPUs follows that of nodes."""
    wrong = [
        f"local rank {one.local_rank}: node {wanted[one.local_rank].node}, GPU {one.pci_bus_id} on node {one.numa_node}"
        for one in devices
        if one.numa_node is not None and one.numa_node != wanted[one.local_rank].node
    ]
    if wrong:
        return [
            f"{GPUS_PER_NUMA} binds {len(wrong)} of {len(wanted)} workers to another NUMA node than their GPU's "
            f"({'; '.join(wrong)}); --numa-binding gpu takes the GPU's"
        ]
    unlike = unlike_first_gpus(env)
    if unlike is None or len(devices) == len(wanted):
        return []
    return [
        f"{unlike} does not show GPUs 0, 1, 2, ... in order, but {GPUS_PER_NUMA} counts from GPU 0: workers may run on "
        "another NUMA node than their GPU's; --numa-binding gpu takes the GPU's"
    ]


# ---- trying it out ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Outcome:
    """What came of a probe: the CPUs that it got; or how it failed, and its standard error."""

    cpus: frozenset[int] = frozenset()
    failed: str = ""
    said: str = ""


class _Binder:
    """Makes bindings that work: asks the kernel's description first, then numactl itself, once for each node."""

    def __init__(self, machine: NumaMachine, memory: MemoryMode, env: Mapping[str, str], within_s: float) -> None:
        self._machine = machine
        self._memory = memory
        self._env = env
        self._within_s = within_s
        self._deadline = time.monotonic() + within_s
        self._tried: dict[int, Binding] = {}

    def bindings(self, wanted: Sequence[_Wanted]) -> tuple[Binding, ...]:
        """One for each worker. Raises Failed."""
        return tuple(
            dataclasses.replace(self._tried_out(one), local_rank=LocalRank(index)) for index, one in enumerate(wanted)
        )

    def _tried_out(self, wanted: _Wanted) -> Binding:
        if wanted.node not in self._tried:
            self._tried[wanted.node] = self._try(wanted)
        return self._tried[wanted.node]

    def _try(self, wanted: _Wanted) -> Binding:
        problem = node_problem(self._machine, wanted.node, self._memory)
        if problem is not None and problem.certain:
            raise _refused(wanted, problem)
        binding = bind(self._machine, LocalRank(0), wanted.node, self._memory)
        outcome = self._probe(binding, wanted)
        allowed = self._machine.allowed_cpus
        if _NO_POLICY in outcome.said and self._memory is MemoryMode.NONE and binding.cpus:
            binding = dataclasses.replace(binding, means=Means.TASKSET)
            outcome = self._probe(binding, wanted)
        elif binding.cpus and allowed is not None and not outcome.cpus <= allowed:
            # A cpuset would have held it back; CPUs that were only given by affinity (taskset, Slurm) numactl exceeds.
            binding = dataclasses.replace(binding, means=Means.CPUS)
            outcome = self._probe(binding, wanted)
        if outcome.failed:
            raise _refused(wanted, self._why(outcome, binding, problem))
        return binding

    def _probe(self, binding: Binding, wanted: _Wanted) -> _Outcome:
        """Run something bound like this. Raises Failed where it cannot be run at all."""
        words = binding_words(binding)
        try:
            done = subprocess.run(
                [*words, *_PROBE],
                env=dict(self._env),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=max(0.1, self._deadline - time.monotonic()),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _refused(wanted, f"but {' '.join(words)} did not answer within {self._within_s:g} s") from error
        except OSError as error:
            raise _refused(wanted, f"but {words[0]} cannot be run: {error.strerror}") from error
        if done.returncode != 0:
            return _Outcome(failed=f"exit {done.returncode}", said=done.stderr)
        return _Outcome(cpus=frozenset(int(one) for one in done.stdout.split() if one.isdecimal()))

    def _why(self, outcome: _Outcome, binding: Binding, problem: NodeProblem | None) -> NodeProblem:
        """The cause of a failed probe: what the system calls said, else the kernel's description, else numactl."""
        said = next((line.strip() for line in outcome.said.splitlines() if line.strip()), "nothing said")
        words = " ".join(binding_words(binding))
        hidden = _NO_POLICY in outcome.said and self._machine.nodes is not None
        if hidden or any(one in outcome.said for one in _FORBIDDEN):
            return _forbidden(words, said, self._memory)
        return problem or NodeProblem(f"but {words} fails ({outcome.failed}: {said})", "")


def _forbidden(words: str, said: str, memory: MemoryMode) -> NodeProblem:
    what = f"but {words} is forbidden here ({said})"
    if memory is MemoryMode.NONE:
        return NodeProblem(what, "")
    return NodeProblem(
        what,
        "a container needs CAP_SYS_NICE or a seccomp profile that allows set_mempolicy; or give --numa-memory none, "
        "which binds to CPUs only",
    )


def _refused(wanted: _Wanted, problem: NodeProblem | str) -> Failed:
    what, advice = (problem, "") if isinstance(problem, str) else (problem.what, problem.advice)
    return Failed(
        f"{wanted.because} on NUMA node {wanted.node}, {what}; {advice}{', or ' if advice else ''}{wanted.remedy}",
        EXIT_USAGE,
    )
