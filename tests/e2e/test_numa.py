"""Workers bound by the real numactl (G7): on this machine, and where the kernel describes one with two nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.numa_machines import (
    Layout,
    StandInNumactl,
    gpu_address,
    gpu_uuid,
    require_numactl,
    stand_in_nvidia_smi,
    write_nodes,
)

from .cluster import OBEY, Cluster, supervisor_of, worker_script
from .hall import Worker
from .programs import Program
from .test_command_line import NOWHERE, refused

CPUS = sorted(os.sched_getaffinity(0))
SAID_ONCE = re.compile(r"NUMA: local ranks? ")


@pytest.fixture(autouse=True)
def numactl() -> str:
    return require_numactl()


def status(pid: int, name: str) -> str:
    found = re.search(rf"^{name}:\s*(\S*)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def cmdline(pid: int) -> list[str]:
    return [os.fsdecode(one) for one in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]


def policies(pid: int) -> set[str]:
    """The memory policies of its mappings."""
    return {line.split()[1] for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines()}


def join_nowhere(cluster: Cluster, *options: str, program: str = "true", **env: str) -> Program:
    """An agent that is refused before it would find out that there is no coordinator; ended."""
    agent = cluster.join("n0", "--nproc-per-node", "2", *options, command=[program], env=env, address=NOWHERE[1])
    agent.ended()
    return agent


# ---- as this machine is -----------------------------------------------------------------------------------


@pytest.mark.rule("G7", "H1")
def test_a_bound_worker_is_the_command_itself(cluster: Cluster) -> None:
    """C088, C090: pid, arguments and exit code are the command's; said once, and kept in the rank map."""
    cluster.serve()
    given = ["a b", "", "--membind=9", "$HOME", "-h", "--"]
    command = worker_script("obey", *given)
    agent = cluster.join(
        "n0",
        "--nproc-per-node",
        "2",
        command=command,
        env={"NVRX_GPUS_PER_NUMA": " 2 ", "NVRX_NUMA_BINDING": "formula", "CUDA_VISIBLE_DEVICES": "2,3"},
    )
    first, second = cluster.workers(0, 2)
    for worker in (first, second):
        assert cmdline(worker.pid) == [*command]
        assert worker.argv == given
        assert "nvrx.client.supervisor" in " ".join(cmdline(supervisor_of(worker.pid)))
        assert policies(worker.pid) == {"bind:0"}
    assert not [pid for pid in cluster.alive() if "numactl" in cmdline(pid)[:1]]
    second.tell("_exit", code=37)
    third = cluster.workers(1, 2)[1]
    row = cluster.rank_map(0)
    assert (row.failure.local_rank, row.failure.exit_code) == (1, 37)
    assert [(one.local_rank, one.numa_node) for one in row.nodes[0].devices] == [(0, 0), (1, 0)]
    third.tell("kill", signal=signal.SIGSEGV)
    cluster.workers(2, 2)
    assert cluster.rank_map(1).failure.signal == "SIGSEGV"
    assert len([line for line in agent.err if SAID_ONCE.search(line)]) == 1
    assert len([line for line in agent.err if "warning" in line and "CUDA_VISIBLE_DEVICES=2,3" in line]) == 1


@pytest.mark.rule("G7")
def test_sigterm_reaches_the_command(cluster: Cluster) -> None:
    """C088: it answers SIGTERM in its own way."""
    cluster.serve()
    agent = cluster.join("n0", command=worker_script("polite"), env={"NVRX_GPUS_PER_NUMA": "8"})
    cluster.worker("n0").said("ready")
    agent.send(signal.SIGTERM)
    assert agent.ended() == 128 + signal.SIGTERM
    (one,) = cluster.rank_map(0).nodes[0].outcome.exits
    assert (one.exit_code, one.signal, one.stopped_by_agent) == (0, "", True)


@pytest.mark.rule("G7")
def test_what_cannot_be_bound_is_refused_before_joining(cluster: Cluster) -> None:
    """C078, C079, C085: exit code 2, one line, though no coordinator is there to be asked."""
    beyond = max(int(one) for one in re.findall(r"[0-9]+", Path("/sys/devices/system/node/online").read_text())) + 1
    node = join_nowhere(cluster, "--nproc-per-node", str(beyond + 1), NVRX_GPUS_PER_NUMA="1")
    refused(node, f"NVRX_GPUS_PER_NUMA=1 puts local rank {beyond} on NUMA node {beyond}, which", "nodes here: 0")
    for value in ("0", "-1", "abc", "4.0"):
        refused(join_nowhere(cluster, NVRX_GPUS_PER_NUMA=value), f"NVRX_GPUS_PER_NUMA={value!r}")
    true = cluster.directory / "true"
    true.symlink_to("/bin/true")
    there = {"PATH": str(cluster.directory)}
    refused(
        join_nowhere(cluster, NVRX_GPUS_PER_NUMA="4", **there),
        "NVRX_GPUS_PER_NUMA=4 binds workers with numactl, which is not found",
        "apt-get install numactl",
    )
    assert join_nowhere(cluster, "--coordinator", "localhost:0", NVRX_GPUS_PER_NUMA="", **there).exit_code == 0
    without_gpus = join_nowhere(cluster, "--numa-binding", "gpu", CUDA_VISIBLE_DEVICES="")
    refused(without_gpus, "--numa-binding gpu", "2 workers and 0 GPUs")


@pytest.mark.rule("G7", "G3")
def test_a_missing_program_is_told_alike_with_and_without_a_binding(cluster: Cluster) -> None:
    """C089."""
    bound = join_nowhere(cluster, program="/no/such/prog", NVRX_GPUS_PER_NUMA="4")
    unbound = join_nowhere(cluster, program="/no/such/prog")
    assert bound.err == unbound.err
    refused(bound, "/no/such/prog: not found")


@pytest.mark.rule("G7")
def test_a_program_that_goes_missing_later_is_told_alike(cluster: Cluster) -> None:
    """numactl would end with exit code 1."""
    cluster.serve()
    program = cluster.directory / "program"
    program.write_text('#!/bin/sh\nrm "$0"\nexit 3\n')
    program.chmod(0o755)
    agent = cluster.join("n0", "--max-restarts", "1", command=[str(program)], env={"NVRX_GPUS_PER_NUMA": "1"})
    agent.ended()
    assert cluster.rank_map(0).failure.exit_code == 3
    failure = cluster.rank_map(1).failure
    assert (failure.exit_code, failure.message) == (127, f"{program}: not found")


@pytest.mark.rule("G7")
def test_where_set_mempolicy_is_forbidden_the_options_that_help_are_named(cluster: Cluster) -> None:
    """C082: as in a container with the usual seccomp profile; bound by CPUs alone it works there."""
    cluster.serve()
    forbidding = (sys.executable, "-m", "tests.e2e.forbid", "set_mempolicy,get_mempolicy,mbind")
    bound = {"NVRX_GPUS_PER_NUMA": "4"}
    for memory, option in (("membind", "--membind=0"), ("local", "--localalloc")):
        agent = cluster.join("n0", "--numa-memory", memory, env=bound, wrapped=forbidding)
        agent.ended()
        refused(agent, f"numactl --cpunodebind=0 {option} is forbidden here", "CAP_SYS_NICE", "--numa-memory none")
    assert cluster.facts == []
    cluster.join("n0", "--numa-memory", "none", env=bound, wrapped=forbidding)
    assert cluster.worker("n0").env["NVRX_GPUS_PER_NUMA"] == "4"


@pytest.mark.rule("G7")
def test_where_numactl_does_not_work_at_all_cpus_are_bound_by_taskset(cluster: Cluster) -> None:
    """C082: numactl from 2.0.19 on takes EPERM from get_mempolicy for a kernel without NUMA, older ones ENOSYS."""
    cluster.serve()
    forbidding = (sys.executable, "-m", "tests.e2e.forbid", "set_mempolicy,get_mempolicy=ENOSYS,mbind")
    bound = {"NVRX_GPUS_PER_NUMA": "1"}
    agent = cluster.join("n0", env=bound, wrapped=forbidding)
    agent.ended()
    refused(agent, "does not support NUMA policy", "CAP_SYS_NICE", "--numa-memory none")
    given = CPUS[-1]
    inside = ("taskset", "-c", str(given), *forbidding)
    cluster.join("n0", "--numa-memory", "none", env=bound, wrapped=inside)
    worker = cluster.worker("n0")
    assert status(worker.pid, "Cpus_allowed_list") == str(given)
    assert cmdline(worker.pid) == [*OBEY]
    worker.tell("_exit", code=37)
    cluster.workers(1, 1)
    assert cluster.rank_map(0).failure.exit_code == 37


@pytest.mark.rule("G7")
@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
def test_cpus_that_were_not_given_are_not_taken(cluster: Cluster) -> None:
    """numactl alone exceeds what taskset, or Slurm without cgroups, gave."""
    cluster.serve()
    given = str(CPUS[1])
    cluster.join("n0", env={"NVRX_GPUS_PER_NUMA": "1"}, wrapped=("taskset", "-c", given))
    worker = cluster.worker("n0")
    assert status(worker.pid, "Cpus_allowed_list") == given
    assert policies(worker.pid) == {"bind:0"}


@pytest.mark.rule("G7")
def test_check_says_the_bindings(cluster: Cluster) -> None:
    cluster.serve()
    argv = [sys.executable, "-m", "nvrx.client.cli", "check", "--coordinator", cluster.address, "--nproc-per-node", "2"]
    checked = cluster.start("check", argv, {"NVRX_GPUS_PER_NUMA": "2", "CUDA_VISIBLE_DEVICES": "4,5"})
    assert checked.ended() == 0
    at = checked.out.index("numa      workers bound by formula")
    assert checked.out[at + 3].split()[:4] == ["1", "-", "-", "node"]
    assert checked.out[at + 3].endswith("--cpunodebind=0 --membind=0")
    assert checked.out[at + 4].startswith("warning   CUDA_VISIBLE_DEVICES=4,5 does not show GPUs 0, 1, 2")


@pytest.mark.rule("H1", "H2")
def test_the_gpu_of_a_worker_is_found_and_its_workers_by_the_gpu(cluster: Cluster) -> None:
    """With a stand-in for nvidia-smi; the kernel of this machine knows no such device, nor its node."""
    programs = cluster.directory / "programs"
    programs.mkdir()
    stand_in_nvidia_smi(programs, 4)
    cluster.serve()
    env = {"PATH": f"{programs}:{cluster.environment()['PATH']}", "CUDA_VISIBLE_DEVICES": "3,1"}
    cluster.join("n0", "--nproc-per-node", "gpu", env=env)
    cluster.workers(0, 2)
    (node,) = cluster.rank_map(0).nodes
    assert [(one.local_rank, one.uuid, one.pci_bus_id) for one in node.devices] == [
        (0, gpu_uuid(3), gpu_address(3)),
        (1, gpu_uuid(1), gpu_address(1)),
    ]
    found = cluster.view("lookup", "--gpu", gpu_uuid(1))
    assert found.out[1].split()[:4] == ["0", "1", "n0", "1"]
    assert gpu_address(1) in found.out[1]


# ---- as the kernel describes another ------------------------------------------------------------------------


class TwoNodes:
    """A view of this machine in which each of two CPUs is a NUMA node, by a mount over /sys/devices/system/node.

    numactl is the real one; the kernel has memory on node 0 only, as it says itself (Mems_allowed_list).
    """

    def __init__(self, folder: Path) -> None:
        if len(CPUS) < 2:
            pytest.skip("needs two CPUs")
        write_nodes(folder, Layout({0: (str(CPUS[0]), 4096), 1: (str(CPUS[1]), 4096)}))
        script = f'mount --bind {folder} /sys/devices/system/node && exec "$@"'
        self.inside = ("unshare", "--mount", "sh", "-c", script, "sh")
        tried = subprocess.run([*self.inside, "true"], capture_output=True, text=True, check=False)
        if tried.returncode != 0:
            missing = f"mounts cannot be made here: {tried.stderr.strip()}"
            if os.environ.get("CI") == "true":
                pytest.fail(missing)
            pytest.skip(missing)


@pytest.fixture
def two_nodes(cluster: Cluster) -> TwoNodes:
    return TwoNodes(cluster.directory / "two-nodes")


@pytest.mark.rule("G7")
def test_the_node_follows_from_the_local_rank_on_every_node(cluster: Cluster, two_nodes: TwoNodes) -> None:
    """C077: ranks 2 and 3 of the world are local ranks 0 and 1 of the second node."""
    cluster.serve()
    for name in "ab":
        cluster.join(
            name,
            *("--nnodes", "2", "--nproc-per-node", "2", "--numa-memory", "none"),
            env={"NVRX_GPUS_PER_NUMA": "1"},
            wrapped=two_nodes.inside,
        )
    workers: list[Worker] = cluster.workers(0, 4)
    assert [one.rank for one in workers] == [0, 1, 2, 3]
    assert [status(one.pid, "Cpus_allowed_list") for one in workers] == [str(CPUS[0]), str(CPUS[1])] * 2
    for row in cluster.rank_map(0).nodes:
        assert [(one.local_rank, one.numa_node) for one in row.devices] == [(0, 0), (1, 1)]


@pytest.mark.rule("G7")
def test_a_node_whose_memory_the_kernel_does_not_allow(cluster: Cluster, two_nodes: TwoNodes) -> None:
    """C081."""
    agent = cluster.join(
        "n0", "--nproc-per-node", "2", env={"NVRX_GPUS_PER_NUMA": "1"}, address=NOWHERE[1], wrapped=two_nodes.inside
    )
    agent.ended()
    refused(agent, "local rank 1 on NUMA node 1, whose memory is not allowed to this process", "Mems_allowed_list 0")


@pytest.mark.rule("G7")
def test_a_stand_in_for_numactl_is_asked_by_local_rank(cluster: Cluster) -> None:
    """C077, with more nodes than this machine has: the stand-in takes them, binds nothing, and keeps its arguments."""
    programs = cluster.directory / "programs"
    programs.mkdir()
    numactl = StandInNumactl(programs)
    cluster.serve()
    path = f"{programs}:{cluster.environment()['PATH']}"
    for name in "ab":
        options = ("--nnodes", "2", "--nproc-per-node", "6")
        cluster.join(name, *options, command=["true"], env={"NVRX_GPUS_PER_NUMA": "4", "PATH": path})
    cluster.wait_for("RunClosed")
    asked = sorted(line for line in numactl.asked() if line.endswith(" true"))
    assert asked == ["--cpunodebind=0 --membind=0 true"] * 8 + ["--cpunodebind=1 --membind=1 true"] * 4
