"""Bindings as values (G7): the formula, what keeps workers off a node, and how numactl is told."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx.core.ids import LocalRank
from nvrx.core.numa import (
    Binding,
    Means,
    MemoryMode,
    NumaMachine,
    NumaNode,
    bind,
    binding_words,
    describe_bindings,
    formula_nodes,
    gpus_per_numa,
    node_problem,
    number_list,
    parse_number_list,
    unlike_first_gpus,
    wrapped,
)
from nvrx.core.topology import BadVariable

TWO = NumaMachine(
    {0: NumaNode(0, frozenset({0, 1}), True), 1: NumaNode(1, frozenset({2, 3}), True)},
    frozenset({0, 1}),
    frozenset({0, 1, 2, 3}),
)


def machine(*, memory: str = "0-1", mems: str = "0-1", cpus: str = "0-3") -> NumaMachine:
    having = parse_number_list(memory)
    nodes = {one: NumaNode(one, frozenset({2 * one, 2 * one + 1}), one in having) for one in (0, 1)}
    nodes[2] = NumaNode(2, frozenset(), True)
    nodes[3] = NumaNode(3, frozenset(), False)
    return NumaMachine(nodes, parse_number_list(mems), parse_number_list(cpus))


@pytest.mark.rule("G7")
@pytest.mark.parametrize(
    ("workers", "per_numa", "nodes"),
    [
        (8, 4, (0, 0, 0, 0, 1, 1, 1, 1)),
        (6, 4, (0, 0, 0, 0, 1, 1)),
        (8, 8, (0,) * 8),
        (8, 1, tuple(range(8))),
    ],
)
def test_the_formula(workers: int, per_numa: int, nodes: tuple[int, ...]) -> None:
    """C077."""
    assert formula_nodes(workers, per_numa) == nodes


@pytest.mark.rule("G7")
@pytest.mark.parametrize(
    "text", ["0", "-1", "abc", "4.0", "+4", "0x4", "4 4", "٤", "４", "5000", "9" * 40, "4\x00", "1e1"]
)
def test_a_bad_number_is_refused_with_its_value(text: str) -> None:
    """C079."""
    with pytest.raises(BadVariable) as caught:
        gpus_per_numa({"NVRX_GPUS_PER_NUMA": text})
    told = str(caught.value)
    assert told.startswith(f"NVRX_GPUS_PER_NUMA={text!a} is not a whole number from 1")
    assert told.isprintable()


@pytest.mark.rule("G7")
@pytest.mark.parametrize(("text", "number"), [(" 4 ", 4), ("4", 4), ("04", 4), ("\t8\n", 8), ("", None), ("  ", None)])
def test_blanks_are_allowed_and_empty_is_unset(text: str, number: int | None) -> None:
    """C079."""
    assert gpus_per_numa({"NVRX_GPUS_PER_NUMA": text}) == number
    assert gpus_per_numa({}) is None


@pytest.mark.rule("G7")
@pytest.mark.parametrize(
    ("described", "node", "memory", "words"),
    [
        (machine(), 4, "membind", "does not have; nodes here: 0-3; allowed to this process (Mems_allowed_list): 0-1"),
        (machine(), 2, "membind", "has no CPUs (only memory); nodes with CPUs: 0-1; nodes here: 0-3"),
        (machine(), 2, "none", "has no CPUs (only memory)"),
        (machine(), 3, "membind", "has no CPUs; nodes with CPUs: 0-1"),
        (machine(memory="1-2"), 0, "membind", "has no memory; nodes with memory: 1-2; nodes here: 0-3"),
        (machine(mems="0"), 1, "membind", "is not allowed to this process (its cpuset: Mems_allowed_list 0)"),
        (
            machine(cpus="0-1"),
            1,
            "none",
            "none of whose CPUs (2-3) is allowed to this process (Cpus_allowed_list: 0-1)",
        ),
        (NumaMachine(None), 0, "membind", "this kernel shows no NUMA nodes (/sys/devices/system/node is missing)"),
    ],
)
def test_what_keeps_workers_off_a_node_is_told_with_the_nodes_there_are(
    described: NumaMachine, node: int, memory: str, words: str
) -> None:
    """C081, C083, C084."""
    problem = node_problem(described, node, MemoryMode(memory))
    assert problem is not None
    assert words in problem.what


@pytest.mark.rule("G7")
def test_a_node_that_is_there_but_not_allowed_is_not_said_to_be_missing() -> None:
    """C081."""
    problem = node_problem(machine(mems="0"), 1, MemoryMode.MEMBIND)
    assert problem is not None
    assert "does not have" not in problem.what
    assert problem.certain


@pytest.mark.rule("G7")
def test_only_what_the_kernel_shows_is_certain() -> None:
    for described, node, certain in ((machine(), 2, True), (machine(), 9, False), (NumaMachine(None), 0, False)):
        problem = node_problem(described, node, MemoryMode.MEMBIND)
        assert problem is not None
        assert problem.certain is certain


@pytest.mark.rule("G7")
@pytest.mark.parametrize("memory", [MemoryMode.LOCAL, MemoryMode.NONE])
@pytest.mark.parametrize("described", [machine(memory="1"), machine(mems="1")])
def test_without_its_memory_a_node_is_bound_by_its_cpus(described: NumaMachine, memory: MemoryMode) -> None:
    """numactl -N refuses a node without memory that the process may use."""
    assert node_problem(described, 0, memory) is None
    binding = bind(described, LocalRank(0), 0, memory)
    assert binding_words(binding)[1] == "--physcpubind=0-1"


@pytest.mark.rule("G7")
@pytest.mark.parametrize(
    ("memory", "options"),
    [
        (MemoryMode.MEMBIND, ("--cpunodebind=1", "--membind=1")),
        (MemoryMode.LOCAL, ("--cpunodebind=1", "--localalloc")),
        (MemoryMode.NONE, ("--cpunodebind=1",)),
    ],
)
def test_how_numactl_is_told(memory: MemoryMode, options: tuple[str, ...]) -> None:
    assert node_problem(TWO, 1, memory) is None
    binding = bind(TWO, LocalRank(3), 1, memory)
    assert binding == Binding(LocalRank(3), 1, (2, 3), memory)
    assert binding_words(binding) == ("numactl", *options)


@pytest.mark.rule("G7")
def test_the_command_stays_as_it_is_behind_numactl() -> None:
    """C090."""
    binding = bind(TWO, LocalRank(0), 0, MemoryMode.MEMBIND)
    command = ("python", "-c", "", "--membind=9", "--", "-h", "a b")
    assert wrapped(command, binding) == ("numactl", "--cpunodebind=0", "--membind=0", *command)
    held = dataclasses.replace(binding, memory=MemoryMode.NONE, means=Means.TASKSET)
    assert wrapped(("-x", "-h"), held) == ("taskset", "-c", "0-1", "-x", "-h")
    assert wrapped(("-x", "-h"), binding) == ("numactl", "--cpunodebind=0", "--membind=0", "--", "-x", "-h")


@pytest.mark.rule("G7")
def test_cpus_that_the_process_may_not_use_are_no_part_of_a_binding() -> None:
    assert bind(machine(cpus="1-2"), LocalRank(0), 0, MemoryMode.MEMBIND).cpus == (1,)


@pytest.mark.rule("G7")
@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1, 2"}, None),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1234"}, None),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "CUDA_VISIBLE_DEVICES=4,5,6,7"),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, "CUDA_VISIBLE_DEVICES=1,0"),
        ({"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, "HIP_VISIBLE_DEVICES=1"),
    ],
)
def test_the_formula_counts_from_gpu_0(env: dict[str, str], told: str | None) -> None:
    """C087."""
    assert unlike_first_gpus(env) == told


@pytest.mark.rule("G7")
def test_bindings_in_one_line() -> None:
    bindings = [bind(TWO, LocalRank(one), node, MemoryMode.MEMBIND) for one, node in enumerate((0, 0, 1, 0))]
    told = "local ranks 0-1,3 on node 0 (CPUs 0-1), 2 on node 1 (CPUs 2-3); memory of that node only"
    assert describe_bindings(bindings) == told
    alone = bind(NumaMachine(None), LocalRank(0), 0, MemoryMode.NONE)
    assert describe_bindings([alone]) == "local rank 0 on node 0; memory not bound"


@given(st.frozensets(st.integers(0, 300)))
def test_lists_of_numbers_read_as_they_are_written(numbers: frozenset[int]) -> None:
    assert (parse_number_list(number_list(numbers)) if numbers else frozenset()) == numbers


@pytest.mark.parametrize("text", ["a", "1-", "-1", "1,,2", "1;2", "0-99999999", "²"])
def test_what_is_no_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"list of numbers|number above"):
        parse_number_list(text)
    assert parse_number_list("\n") == frozenset()
