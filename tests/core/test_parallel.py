"""Parallel sizes: read from Megatron's flags, checked with the arithmetic written out (A6)."""

from __future__ import annotations

import shlex

import pytest

from nvrx.core.parallel import ParallelSizes, parallel_sizes, sizes_in_command
from nvrx.core.shape import Shape


@pytest.mark.rule("A6")
@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("python train.py", {}),
        ("python train.py --tensor-model-parallel-size 4", {"tensor_parallel": 4}),
        ("python train.py --tensor-model-parallel-size=4", {"tensor_parallel": 4}),
        ("python train.py --tensor_model_parallel_size=4", {"tensor_parallel": 4}),
        ("python train.py --tensor_model-parallel_size 4 --x", {"tensor_parallel": 4}),
        (
            "python p.py --pipeline-model-parallel-size 2 --context-parallel-size 3 --expert-model-parallel-size 4 "
            "--global-batch-size 256 --micro-batch-size=2",
            {
                "pipeline_parallel": 2,
                "context_parallel": 3,
                "expert_parallel": 4,
                "global_batch_size": 256,
                "micro_batch_size": 2,
            },
        ),
        ("python p.py --micro-batch-size 1 --micro-batch-size 2", {"micro_batch_size": 2}),
        ("python p.py --global-batch-size auto", {}),
        ("python p.py --global-batch-size", {}),
        ("python p.py --global-batch-size=", {}),
        ("python p.py --micro-batch-size --tensor-model-parallel-size 2", {"tensor_parallel": 2}),
        ("python p.py --tensor-parallel 2 -micro-batch-size 2 micro-batch-size 2 --xmicro-batch-size 2", {}),
        ("python p.py --name --micro-batch-size=٣", {}),
    ],
)
def test_flags_of_the_command(command: str, found: dict[str, int]) -> None:
    assert sizes_in_command(shlex.split(command)) == found


@pytest.mark.rule("A6")
def test_options_win() -> None:
    command = ["p.py", "--tensor-model-parallel-size", "4", "--micro-batch-size", "2"]
    given = {"tensor_parallel": 8, "pipeline_parallel": None, "global_batch_size": 64}
    assert parallel_sizes(given, command) == ParallelSizes(8, micro_batch_size=2, global_batch_size=64)
    assert parallel_sizes({}, ["p.py"]) == ParallelSizes()


@pytest.mark.rule("A6")
@pytest.mark.parametrize(
    ("sizes", "nodes", "workers"),
    [
        (ParallelSizes(), 3, 5),
        (ParallelSizes(4, 6), 6, 8),
        (ParallelSizes(2, 2, 2, 8), 2, 8),
        (ParallelSizes(4, 2, global_batch_size=64, micro_batch_size=2), 4, 8),
        (ParallelSizes(micro_batch_size=7), 1, 8),
        (ParallelSizes(global_batch_size=16), 2, 8),
        (ParallelSizes(8, 1, 1, 1), 1, 8),
    ],
)
def test_worlds_that_divide(sizes: ParallelSizes, nodes: int, workers: int) -> None:
    assert sizes.problem(nodes, workers) is None


@pytest.mark.rule("A5", "A6")
def test_the_world_is_min_nodes() -> None:
    assert Shape(2, 3, 8, parallel=ParallelSizes(16)).problem() is None
    assert "world size 16" in (Shape(2, 3, 8, parallel=ParallelSizes(24)).problem() or "")


@pytest.mark.rule("A6")
@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        (
            ParallelSizes(4, 6),
            ["world size 16 = 2 nodes x 8 workers is not a multiple of 24 = tensor 4 x pipeline 6 x context 1; "],
        ),
        (ParallelSizes(context_parallel=3), ["is not a multiple of 3 = tensor 1 x pipeline 1 x context 3"]),
        (ParallelSizes(32), ["world size 16", "32 = tensor 32"]),
        (ParallelSizes(2, 2, 1, 3), ["world size 16", "6 = expert 3 x pipeline 2"]),
        (
            ParallelSizes(2, 2, global_batch_size=20, micro_batch_size=3),
            [
                "global batch 20",
                "12 = micro batch 3 x data parallel 4",
                "data parallel 4 = 16 / 4",
                "2 nodes x 8 workers",
            ],
        ),
        (ParallelSizes(global_batch_size=24), ["global batch 24", "16 = micro batch 1 (not given) x data parallel 16"]),
        (ParallelSizes(0), ["tensor_parallel is 0"]),
        (ParallelSizes(micro_batch_size=-1), ["micro_batch_size is -1"]),
    ],
)
def test_worlds_that_do_not(sizes: ParallelSizes, parts: list[str]) -> None:
    problem = sizes.problem(2, 8)
    assert problem is not None
    for part in parts:
        assert part in problem
