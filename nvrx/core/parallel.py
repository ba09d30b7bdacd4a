"""How a world is divided for training (rule A6): parallel sizes, batch sizes, and the arithmetic that they must obey.

Knows Megatron's names for them, which are those of the options of ours; knows no node and no run.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_SIZE = 2**31 - 1

MEGATRON_FLAGS = {
    "tensor-model-parallel-size": "tensor_parallel",
    "pipeline-model-parallel-size": "pipeline_parallel",
    "context-parallel-size": "context_parallel",
    "expert-model-parallel-size": "expert_parallel",
    "global-batch-size": "global_batch_size",
    "micro-batch-size": "micro_batch_size",
}
"""Megatron's flags for the fields of ParallelSizes."""


@dataclass(frozen=True)
class ParallelSizes:
    """The sizes that a training divides its world by; 1 is as good as not given. Batch sizes: None where not given."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    global_batch_size: int | None = None
    micro_batch_size: int | None = None

    def problem(self, nodes: int, workers_per_node: int) -> str | None:
        """Why a world of these nodes and workers cannot be divided so, with the arithmetic; None if it can."""
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if value is not None and not 1 <= value <= MAX_SIZE:
                return f"{one.name} is {value}; 1 to {MAX_SIZE} are possible"
        world_size = nodes * workers_per_node
        world = f"world size {world_size} = {nodes} nodes x {workers_per_node} workers"
        divisor = self.tensor_parallel * self.pipeline_parallel * self.context_parallel
        product = (
            f"{divisor} = tensor {self.tensor_parallel} x pipeline {self.pipeline_parallel} "
            f"x context {self.context_parallel}"
        )
        advice = "correct --nnodes, --nproc-per-node or the sizes"
        if world_size % divisor:
            return f"{world} is not a multiple of {product}; {advice}"
        # Whatever tensor size the experts have, no Megatron forms their groups without this.
        experts = self.expert_parallel * self.pipeline_parallel
        if world_size % experts:
            return (
                f"{world} is not a multiple of {experts} = expert {self.expert_parallel} x pipeline "
                f"{self.pipeline_parallel}; {advice}"
            )
        replicas = world_size // divisor
        micro = 1 if self.micro_batch_size is None else self.micro_batch_size
        if self.global_batch_size is not None and self.global_batch_size % (micro * replicas):
            given = "" if self.micro_batch_size is not None else " (not given)"
            return (
                f"global batch {self.global_batch_size} is not a multiple of {micro * replicas} = micro batch "
                f"{micro}{given} x data parallel {replicas}; data parallel {replicas} = {world_size} / {divisor}: "
                f"{world}, {product}; correct the batch sizes, --nnodes or --nproc-per-node"
            )
        return None


def sizes_in_command(command: Sequence[str]) -> dict[str, int]:
    """What Megatron's flags in a worker command say, by field; the last of several counts, as there.

    `--flag value` and `--flag=value`, with `-` or `_`. A value that is no whole number belongs to another program.
    """
    found: dict[str, int] = {}
    for index, word in enumerate(command):
        flag, has_value, value = word.partition("=")
        field = MEGATRON_FLAGS.get(flag[2:].replace("_", "-")) if flag.startswith("--") else None
        if field is None:
            continue
        text = value if has_value else command[index + 1] if index + 1 < len(command) else ""
        if re.fullmatch(r"[0-9]{1,18}", text) is not None:
            found[field] = int(text)
    return found


def parallel_sizes(given: Mapping[str, int | None], command: Sequence[str]) -> ParallelSizes:
    """The sizes given by options, by field, over those in the worker command."""
    chosen = {name: value for name, value in given.items() if value is not None}
    return ParallelSizes(**{**sizes_in_command(command), **chosen})
