"""What an agent finds out before it joins: refusals with exit code 2, and what it is going to tell."""

from __future__ import annotations

import dataclasses
import platform
import sys
from importlib import metadata
from pathlib import Path

import pytest

from nvrx.client.config import JoinOptions, NodeConfig, Surroundings, resolve
from nvrx.client.machine import this_machine
from nvrx.commandline import EXIT_USAGE, Failed
from nvrx.core.allocation import Group
from nvrx.core.endpoint import HostPort
from nvrx.core.fingerprint import Wishes
from nvrx.core.ids import GroupId
from nvrx.core.parallel import ParallelSizes
from nvrx.core.shape import NodeCounts, RankPolicy, parse_nnodes

STEP = {"SLURM_JOB_ID": "36", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n1"}
ARRAY = {**STEP, "SLURM_ARRAY_JOB_ID": "36", "SLURM_ARRAY_TASK_ID": "3", "SLURM_NNODES": "2"}


@pytest.fixture
def options(tmp_path: Path) -> JoinOptions:
    return JoinOptions((HostPort("127.0.0.1", 9),), (sys.executable, "-c", "pass"), NodeCounts(1, 1), log_dir=tmp_path)


def resolved(options: JoinOptions, env: dict[str, str], /, **changes: object) -> NodeConfig:
    return resolve(dataclasses.replace(options, **changes), env)  # type: ignore[arg-type]


def refused(options: JoinOptions, env: dict[str, str], /, **changes: object) -> str:
    with pytest.raises(Failed) as caught:
        resolved(options, env, **changes)
    assert caught.value.exit_code == EXIT_USAGE
    return str(caught.value)


@pytest.mark.rule("A1")
def test_a_second_agent_on_a_node_is_refused(options: JoinOptions) -> None:
    assert "SLURM_LOCALID=1" in refused(options, STEP | {"SLURM_LOCALID": "1"})
    assert "no srun step" in refused(
        options, STEP | {"SLURM_STEP_ID": "", "SLURM_NNODES": "2"}, nnodes=parse_nnodes("2:3")
    )


@pytest.mark.rule("A6")
def test_sizes_come_from_options_and_from_the_command(options: JoinOptions) -> None:
    command = (sys.executable, "p.py", "--tensor-model-parallel-size", "2", "--micro_batch_size=4")
    config = resolved(options, {}, command=command, nproc_per_node="4", parallel_sizes={"micro_batch_size": 1})
    assert config.shape.parallel == ParallelSizes(2, micro_batch_size=1)
    problem = refused(options, {}, command=command, nproc_per_node="3")
    assert "world size 3 = 1 nodes x 3 workers is not a multiple of 2 = tensor 2 x pipeline 1 x context 1" in problem


@pytest.mark.rule("A2")
def test_the_fingerprint_has_command_versions_and_variables(options: JoinOptions) -> None:
    options = dataclasses.replace(options, nnodes=parse_nnodes("4"))
    # Small ids would be marked where the path of this Python happens to hold them.
    ids = {"SLURM_ARRAY_TASK_ID": "7777", "SLURM_PROCID": "8888"}
    env = {**ARRAY, **ids, "NCCL_DEBUG": "INFO", "HF_HOME": "/hf", "PATH": "/bin"}
    found = resolved(options, env, fingerprint=Wishes(same_env=("HF_HOME",))).shape.fingerprint
    assert found == {
        "command": f"{sys.executable} -c pass",
        "python": platform.python_version(),
        "NCCL_DEBUG": "INFO",
        "HF_HOME": "/hf",
        **({"torch": metadata.version("torch")} if "torch" in found else {}),
    }
    assert resolved(options, env, fingerprint=Wishes(is_off=True)).shape.fingerprint == {}
    assert "SLURM_PROCID" in refused(options, env, fingerprint=Wishes(same_env=("SLURM_PROCID",)))


@pytest.mark.rule("A2")
def test_torch_is_read_from_its_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not imported: a folder that only says what it is will do."""
    (tmp_path / "torch-9.8.7.dist-info").mkdir()
    (tmp_path / "torch-9.8.7.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.8.7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert this_machine(("train.py",), {}, "n0").torch_version == "9.8.7"


@pytest.mark.rule("A2")
def test_versions_of_another_python_are_left_alone(tmp_path: Path) -> None:
    """An environment of its own has packages of its own, though its interpreter is a link to ours."""
    (tmp_path / "python").symlink_to(Path(sys.executable).resolve())
    for command, env in (((str(tmp_path / "python"),), {}), (("python",), {"PATH": str(tmp_path)})):
        found = this_machine(command, env, "n0")
        assert (found.python_version, found.torch_version) == (None, None)
    ours = {"PATH": str(Path(sys.executable).parent)}
    for first_word in (sys.executable, "python", "train.py", "bash", "python-not-here"):
        assert this_machine((first_word, "x"), ours, "n0").python_version == platform.python_version()


@pytest.mark.rule("B6", "B7")
def test_groups_and_domains(options: JoinOptions) -> None:
    four = dataclasses.replace(options, nnodes=parse_nnodes("4"))
    config = resolved(four, ARRAY)
    assert config.surroundings == Surroundings(Group(GroupId("3"), "36"), 2, None, None, None)
    assert (config.shape.replacement_group_size, config.shape.segment_size) == (2, None)
    assert config.array_rank == 7
    assert config.run_id == "36"
    given = resolved(
        four,
        {**ARRAY, "NVRX_DOMAIN_ID": "D1", "NVRX_REPLACEMENT_GROUP_ID": "rackA"},
        segment_size=2,
        replacement_group_size=4,
        rank_policy="sticky",
    )
    assert given.surroundings == Surroundings(Group(GroupId("rackA")), 4, given.surroundings.domain_id, 2, "sticky")
    assert given.surroundings.domain_id == "D1"
    assert (given.shape.replacement_group_size, given.shape.segment_size) == (4, 2)
    assert given.shape.rank_policy is RankPolicy.STICKY
    assert "NVRX_DOMAIN_ID" in refused(four, ARRAY, segment_size=2)
    assert "MIN 1" in refused(options, ARRAY)
    assert "rackA" in refused(options, {"NVRX_REPLACEMENT_GROUP_ID": "rackA"})


@pytest.mark.rule("A3")
@pytest.mark.parametrize("task", [1, 2, 3])
def test_the_tasks_of_an_array_meet_under_one_run_id(options: JoinOptions, task: int) -> None:
    """C037: each has a job id of its own."""
    env = ARRAY | {"SLURM_JOB_ID": str(39 - task), "SLURM_ARRAY_TASK_ID": str(task)}
    options = dataclasses.replace(options, nnodes=parse_nnodes("4"))
    assert resolved(options, env).run_id == "36"
    assert resolved(options, env, run_id="given").run_id == "given"
    assert resolved(options, STEP | {"SLURM_ARRAY_JOB_ID": ""}).run_id == "36"


@pytest.mark.rule("B1")
@pytest.mark.parametrize(
    ("given", "env", "node_id"), [("mine", STEP, "mine"), (None, STEP, "n1"), (None, {}, platform.node())]
)
def test_the_node_id(options: JoinOptions, given: str | None, env: dict[str, str], node_id: str) -> None:
    assert resolved(options, env, node_id=given).node_id == node_id


@pytest.mark.rule("B1")
@pytest.mark.parametrize("name", ["a/b", "é", "x" * 129, "\x1b[0m", ".."])
def test_a_node_id_that_is_no_name(options: JoinOptions, name: str) -> None:
    assert "--node-id" in refused(options, {"SLURMD_NODENAME": name})
