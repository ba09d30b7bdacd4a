"""How an agent may be started under Slurm (rule A1), tried on a real cluster: what it refuses, and what it must not."""

from __future__ import annotations

import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.programs import ROOT

from .slurm_cluster import SlurmCluster

CHECK = f"{sys.executable} -m nvrx.client.cli check --coordinator 127.0.0.1:1 --log-dir /tmp"
"""Makes the checks of `join`, and finds no coordinator: exit code 4 where the launch is right."""
LAUNCH_IS_RIGHT, REFUSED = 4, 2


@dataclass(frozen=True)
class Said:
    """What one task ended with."""

    exit_code: int
    text: str


def _tasks(slurm: SlurmCluster, *options: str, launcher: str, nnodes: str = "2") -> list[Said]:
    """Run a batch script with `launcher` before the check; what each task said, of all that it started."""
    folder = slurm.directory / uuid.uuid4().hex
    folder.mkdir()
    folder.chmod(0o777)
    one = folder / "one"
    one.write_text(
        f"#!/bin/bash\ncd {ROOT}\nexport PYTHONPATH={ROOT}\n"
        f"name={folder}/$SLURM_JOB_ID.$SLURMD_NODENAME.$SLURM_PROCID.$$\n"
        f"{CHECK} --nnodes {nnodes} -- true > $name.text 2>&1\necho $? > $name.new; mv $name.new $name.code\n"
    )
    one.chmod(0o755)
    slurm.submit(*options, script=f"#!/bin/bash\n{launcher} {one}\n")
    slurm.until(lambda: not slurm.jobs(), "the job to end")
    return [
        Said(int(path.read_text()), path.with_suffix(".text").read_text())
        for path in sorted(Path(folder).glob("*.code"))
    ]


@pytest.mark.rule("A1")
@pytest.mark.parametrize(
    ("options", "launcher", "tasks"),
    [
        (["-N2", "--ntasks-per-node=1"], "srun", 2),
        (["-N2"], "srun --ntasks=2 --ntasks-per-node=1", 2),
        (["-N2", "-n2"], "srun", 2),
        # The script's variables are stale inside the step: they prove nothing.
        (["-N2", "--ntasks-per-node=2"], "srun -n2 -N2", 2),
        (["-N2", "--ntasks-per-node=1"], "srun --ntasks-per-node=2", 2),
        (["-N4", "--ntasks-per-node=1"], "srun -N2 -n2", 2),
        (["-N2", "--ntasks-per-node=1", "--array=0-1"], "srun", 4),
    ],
)
def test_one_agent_on_each_node_is_let_pass(slurm: SlurmCluster, options: list[str], launcher: str, tasks: int) -> None:
    """C030: every form of one task per node."""
    said = _tasks(slurm, *options, launcher=launcher)
    assert [one.exit_code for one in said] == [LAUNCH_IS_RIGHT] * tasks, said


@pytest.mark.rule("A1")
@pytest.mark.parametrize(
    ("options", "launcher", "tasks", "seen"),
    [
        (["-N2", "--ntasks-per-node=2"], "srun", 4, "2(x2)"),
        (["-N2"], "srun -n4", 4, "2(x2)"),
        (["-N2"], "srun -n3", 3, "2,1"),
        (["-N2", "--ntasks-per-node=1"], "srun -n4", 4, "2(x2)"),
    ],
)
def test_a_task_per_gpu_is_refused(
    slurm: SlurmCluster, options: list[str], launcher: str, tasks: int, seen: str
) -> None:
    """C031, C033: by every task, with the value seen and the line to use."""
    said = _tasks(slurm, *options, launcher=launcher)
    assert [one.exit_code for one in said] == [REFUSED] * tasks, said
    for one in said:
        assert f"SLURM_STEP_TASKS_PER_NODE={seen}:" in one.text
        assert "srun --ntasks=2 --ntasks-per-node=1" in one.text
        assert len(one.text.splitlines()) == 1


@pytest.mark.rule("A1")
def test_a_batch_script_is_no_step(slurm: SlurmCluster) -> None:
    """C034: with several nodes it would start one agent for all of them."""
    (said,) = _tasks(slurm, "-N2", "--ntasks-per-node=1", launcher="")
    assert said.exit_code == REFUSED
    assert "srun --ntasks=2 --ntasks-per-node=1" in said.text
    (alone,) = _tasks(slurm, "-N1", launcher="", nnodes="1")
    assert alone.exit_code == LAUNCH_IS_RIGHT, alone.text
