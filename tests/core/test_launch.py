"""One agent per node, or a refusal that says how to start them (A0, A1)."""

from __future__ import annotations

import pytest

from nvrx.core.launch import launch_problem, srun_step
from nvrx.core.shape import NodeCounts, parse_nnodes

ONE = NodeCounts(1, 1)
PAIR = NodeCounts(2, 2)
STEP = {
    "SLURM_JOB_ID": "9001",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NNODES": "4",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "1(x4)",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_JOB_NODELIST": "node[31-34]",
    "SLURM_STEP_NODELIST": "node[31-34]",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_GTIDS": "2",
    "SLURMD_NODENAME": "node33",
}
BATCH = {
    "SLURM_JOB_ID": "5",
    "SLURM_NNODES": "2",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_NODELIST": "n[1-2]",
}


def refused(env: dict[str, str], nnodes: NodeCounts, *parts: str) -> None:
    problem = launch_problem(env, nnodes)
    assert problem is not None
    assert problem.isprintable()
    for part in (*parts, "--ntasks-per-node=1"):
        assert part in problem


@pytest.mark.rule("A1")
@pytest.mark.parametrize("name", ["SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"])
@pytest.mark.parametrize("value", ["1", "1(x2)", "1(x3),1", "1,1", "", " 1(x2) "])
def test_every_form_of_one_task_per_node_is_accepted(name: str, value: str) -> None:
    """C030."""
    assert launch_problem({"SLURM_JOB_ID": "5", name: value}, PAIR) is None


@pytest.mark.rule("A1")
@pytest.mark.parametrize("name", ["SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"])
@pytest.mark.parametrize("value", ["8", "8(x4)", "2(x3),1", "1(x3),2", "34,26,2(x2)", "02"])
def test_several_tasks_on_a_node_are_refused(name: str, value: str) -> None:
    """C031: the value is shown, wherever in the list the larger count stands."""
    refused({"SLURM_JOB_ID": "5", name: value}, ONE, f"{name}={value}")


@pytest.mark.rule("A1")
@pytest.mark.parametrize("value", ["1(x3", "two", "1;2", "1(x2),", "-1", "1\x1b[0m"])
def test_a_list_that_is_none_is_refused_and_not_guessed_at(value: str) -> None:
    refused({"SLURM_JOB_ID": "5", "SLURM_STEP_TASKS_PER_NODE": value}, ONE, "SLURM_STEP_TASKS_PER_NODE=", "1(x3),2")


@pytest.mark.rule("A1")
@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"SLURM_STEP_NUM_TASKS": "32"}, "SLURM_STEP_NUM_TASKS=32 but SLURM_STEP_NUM_NODES=4"),
        ({"SLURM_STEP_NUM_NODES": "1"}, "SLURM_STEP_NUM_TASKS=4 but SLURM_STEP_NUM_NODES=1"),
        ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID=1"),
        ({"SLURM_GTIDS": "0,1,2,3"}, "SLURM_GTIDS=0,1,2,3"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x4)"}, "SLURM_STEP_TASKS_PER_NODE=2(x4)"),
    ],
)
def test_each_sign_of_a_second_agent_on_a_node_is_enough(change: dict[str, str], shown: str) -> None:
    assert launch_problem(STEP, NodeCounts(4, 4)) is None
    refused(STEP | change, NodeCounts(4, 4), shown)


@pytest.mark.rule("A1")
@pytest.mark.parametrize("local", range(4))
def test_all_copies_on_one_host_are_refused(local: int) -> None:
    """C033: `srun -c 8` without -n; the first copy looks right but for the task count."""
    env = {"SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_LOCALID": str(local), "SLURM_PROCID": str(local)}
    refused({"SLURM_JOB_ID": "5", "SLURM_STEP_ID": "1", **env}, ONE, "SLURM_STEP_TASKS_PER_NODE=4")


@pytest.mark.rule("A1")
@pytest.mark.parametrize("name", ["SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS", "SLURM_NPROCS"])
def test_what_the_job_asked_for_proves_nothing_in_a_step(name: str) -> None:
    """A batch script with 8 tasks per node starts a step with one: the job's variables are stale there."""
    assert launch_problem(STEP | {name: "8"}, NodeCounts(4, 4)) is None
    assert launch_problem({"SLURM_JOB_ID": "5", "SLURM_NTASKS_PER_NODE": "8"}, ONE) is None


@pytest.mark.rule("A1")
@pytest.mark.parametrize("procid", ["", "0"])
@pytest.mark.parametrize(
    ("name", "step"),
    [("batch script", ""), ("interactive step", "4294967290"), ("batch step", "4294967291"), ("old", "4294967294")],
)
def test_a_shell_on_one_of_many_nodes_is_no_step(procid: str, name: str, step: str) -> None:
    """C034: it would join as node 0 of a job whose other nodes nobody starts. The interactive step counts one task."""
    env = BATCH | {"SLURM_PROCID": procid, "SLURM_STEP_ID": step}
    if step:
        env |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}
    refused(env, PAIR, "SLURM_JOB_NUM_NODES=2", "srun --ntasks=2 ", "no srun step")
    refused(env | {"SLURM_JOB_NUM_NODES": ""}, NodeCounts(2, 3), "SLURM_NNODES=2")
    assert launch_problem(env, NodeCounts(1, 3)) is None, "one node is trained on here"
    assert launch_problem(env | {"SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1"}, PAIR) is None, "an array task's"
    assert launch_problem(env | {"SLURM_STEP_ID": "7"}, PAIR) is None
    assert srun_step(env) is None


@pytest.mark.rule("A1", "B4")
def test_agents_started_by_ssh_are_refused_before_they_tie() -> None:
    """C018: SLURM_PROCID is 0 in every process that srun did not start."""
    env = {"SLURM_JOB_ID": "9", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "3"}
    refused(env, NodeCounts(3, 3), "SLURM_NNODES=3", "ssh", "srun --ntasks=3 ")


@pytest.mark.rule("A0", "A1")
def test_without_a_job_nothing_is_checked() -> None:
    """Variables that a container or a shim left behind, or set to nothing, are no Slurm."""
    stale = STEP | {"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_LOCALID": "3"}
    for job in ("", " "):
        assert launch_problem(stale | {"SLURM_JOB_ID": job}, PAIR) is None
    shim = {
        "SLURM_JOB_NODELIST": "job-x-0.job-x,job-x-1.job-x",
        "SLURM_TASKS_PER_NODE": "",
        "SLURM_ARRAY_TASK_COUNT": "3",
    }
    assert launch_problem({"SLURM_JOB_ID": "1", **shim}, PAIR) is None
    empty = dict.fromkeys(STEP, "") | {"SLURM_JOB_ID": "9001"}
    assert launch_problem(empty, PAIR) is None


@pytest.mark.rule("A1")
@pytest.mark.parametrize(
    ("env", "nodes"),
    [
        ({}, "<nodes>"),
        ({"SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "4"}, "2"),
        ({"SLURM_JOB_NUM_NODES": "4"}, "4"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "3", "SLURM_NNODES": "4"}, "3"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "x", "SLURM_NNODES": "0"}, "<nodes>"),
    ],
)
def test_the_line_to_use_has_the_number_of_nodes_where_it_is_known(env: dict[str, str], nodes: str) -> None:
    """C035: a step of 2 of the job's 4 nodes stays one of 2."""
    refused({"SLURM_JOB_ID": "5", "SLURM_LOCALID": "1", **env}, ONE, f"srun --ntasks={nodes} --ntasks-per-node=1")


@pytest.mark.rule("A5")
def test_node_counts() -> None:
    assert [parse_nnodes("4"), parse_nnodes("2:3")] == [NodeCounts(4, 4), NodeCounts(2, 3)]


@pytest.mark.rule("A1")
def test_a_batch_script_of_one_node_where_nobody_asked_for_tasks() -> None:
    """There SLURM_TASKS_PER_NODE counts processors: an agent for that one node is right."""
    env = {"SLURM_JOB_ID": "5", "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_TASKS_PER_NODE": "64"}
    env |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0", "SLURM_NODEID": "0"}
    assert launch_problem(env, ONE) is None
    for name in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"):
        refused(env | {name: "64"}, ONE, "SLURM_TASKS_PER_NODE=64")
    refused(env | {"SLURM_JOB_NUM_NODES": "2"}, ONE, "SLURM_TASKS_PER_NODE=64")
    refused(env, NodeCounts(1, 2), "SLURM_TASKS_PER_NODE=64")
