"""Replacement groups and NVLink domains as a node finds them (A0, B6, B7)."""

from __future__ import annotations

import pytest

from nvrx.core.allocation import Group, domain_id, replacement_group, replacement_group_size
from nvrx.core.ids import GroupId
from nvrx.core.topology import BadVariable

from .test_topology import BLOCK, TOPOLOGIES, block

ARRAY = {"SLURM_ARRAY_JOB_ID": "36", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "36", "SLURM_NNODES": "2"}


def group_and_size(env: dict[str, str], given: int | None = None) -> tuple[Group | None, int | None]:
    group = replacement_group(env)
    return group, replacement_group_size(env, given, group)


@pytest.mark.rule("B6")
@pytest.mark.parametrize(
    ("env", "given", "group", "size"),
    [
        pytest.param(ARRAY, None, Group(GroupId("3"), "36"), 2, id="an array task is a group (C071)"),
        pytest.param(
            ARRAY | {"SLURM_JOB_NUM_NODES": "4"}, None, Group(GroupId("3"), "36"), 2, id="the step first (C035)"
        ),
        pytest.param(
            ARRAY | {"SLURM_NNODES": "", "SLURM_JOB_NUM_NODES": "4"}, None, Group(GroupId("3"), "36"), 4, id="job"
        ),
        pytest.param(ARRAY, 4, Group(GroupId("3"), "36"), 4, id="the option wins"),
        pytest.param(ARRAY | {"SLURM_NNODES": "1"}, None, Group(GroupId("3"), "36"), 1, id="tasks of one node: off"),
        pytest.param(ARRAY | {"SLURM_ARRAY_TASK_ID": "0"}, None, Group(GroupId("0"), "36"), 2, id="task 0 is one too"),
        pytest.param(
            ARRAY | {"NVRX_REPLACEMENT_GROUP_ID": "rackA"}, 4, Group(GroupId("rackA")), 4, id="by name (C072)"
        ),
        pytest.param(ARRAY | {"NVRX_REPLACEMENT_GROUP_ID": ""}, None, Group(GroupId("3"), "36"), 2, id="empty: unset"),
        pytest.param({"NVRX_REPLACEMENT_GROUP_ID": "rackA"}, 2, Group(GroupId("rackA")), 2, id="outside arrays"),
        pytest.param({"SLURM_NNODES": "3", "SLURM_JOB_ID": "5"}, None, None, None, id="no array, no group (C076)"),
        pytest.param({"SLURM_ARRAY_TASK_ID": "", "SLURM_NNODES": "3"}, None, None, None, id="an empty task id"),
        pytest.param({}, 2, None, 2, id="a size without a group: admitted, never chosen"),
    ],
)
def test_groups(env: dict[str, str], given: int | None, group: Group | None, size: int | None) -> None:
    assert group_and_size(env, given) == (group, size)


@pytest.mark.rule("B6")
def test_two_arrays_have_equal_task_ids_and_different_groups() -> None:
    """The job id of a task does not tell arrays apart: each task of one array has its own."""
    sister = ARRAY | {"SLURM_JOB_ID": "37"}
    other = ARRAY | {"SLURM_ARRAY_JOB_ID": "99", "SLURM_JOB_ID": "101"}
    assert replacement_group(sister) == replacement_group(ARRAY)
    assert replacement_group(other) != replacement_group(ARRAY)


@pytest.mark.rule("B6")
@pytest.mark.parametrize(
    ("env", "part"),
    [
        ({"NVRX_REPLACEMENT_GROUP_ID": "rackA"}, "rackA.*--replacement-group-size"),
        ({"NVRX_REPLACEMENT_GROUP_ID": "rackA", "SLURM_NNODES": "3"}, "rackA.*--replacement-group-size"),
        ({"SLURM_ARRAY_TASK_ID": "2"}, "group 2.*SLURM_NNODES or SLURM_JOB_NUM_NODES"),
        ({"SLURM_ARRAY_TASK_ID": "2", "SLURM_NNODES": "0"}, "group 2"),
        ({"NVRX_REPLACEMENT_GROUP_ID": "a/b"}, "NVRX_REPLACEMENT_GROUP_ID.*'/'"),
        ({"NVRX_REPLACEMENT_GROUP_ID": "x" * 129}, "NVRX_REPLACEMENT_GROUP_ID has 129 characters"),
        ({"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_JOB_ID": "é"}, "SLURM_ARRAY_JOB_ID"),
    ],
)
def test_a_group_without_a_size_or_a_name_is_refused(env: dict[str, str], part: str) -> None:
    with pytest.raises(BadVariable, match=part):
        group_and_size(env)


@pytest.mark.rule("B7")
@pytest.mark.parametrize(
    ("env", "uuid", "domain"),
    [
        (block("block1.node3"), None, "block1"),
        (block("b2.node07", "Block.Node"), None, "b2"),
        (block("block001.srv1103.cluster.local"), None, "block001"),
        (block("block1.node3"), "1c51d4e9", "1c51d4e9"),
        (block("block1.node3", NVRX_DOMAIN_ID="D1"), "1c51d4e9", "D1"),
        (block("block1.node3", NVRX_DOMAIN_ID=" "), None, "block1"),
        ({"NVRX_DOMAIN_ID": "rack 7"}, None, "rack 7"),
    ],
)
def test_domains(env: dict[str, str], uuid: str | None, domain: str) -> None:
    assert domain_id(env, uuid) == domain


@pytest.mark.rule("B7")
@pytest.mark.parametrize(("address", "pattern"), [*TOPOLOGIES, (".n5", BLOCK)])
def test_where_there_is_no_block_there_is_no_domain(address: str, pattern: str) -> None:
    env = block(address, pattern)
    if pattern.lower() == BLOCK and address.partition(".")[0] and "." in address:
        assert domain_id(env, None) == address.partition(".")[0]
        return
    with pytest.raises(BadVariable, match=r"--segment-size.*NVRX_DOMAIN_ID"):
        domain_id(env, None)


@pytest.mark.rule("B7")
def test_a_domain_is_a_name() -> None:
    with pytest.raises(BadVariable, match="'/'"):
        domain_id({"NVRX_DOMAIN_ID": "a/b"}, None)
