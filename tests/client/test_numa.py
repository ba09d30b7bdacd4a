"""Bindings settled before joining (G7), on the layouts of real machines: fake trees of /sys and /proc.

numactl and nvidia-smi are stand-ins here, since this host has neither such nodes nor GPUs; the real numactl is in
tests/e2e/test_numa.py.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from nvrx.client.gpu_devices import NodeGpus
from nvrx.client.numa import NumaPlan, NumaWish, plan_numa
from nvrx.client.numa_sysfs import pci_local_cpus, pci_name, pci_numa_node, read_machine
from nvrx.client.numa_table import numa_lines
from nvrx.commandline import EXIT_USAGE, Failed
from nvrx.core.facts import Device
from nvrx.core.ids import LocalRank
from nvrx.core.numa import MemoryMode, NumaSource, binding_words
from tests.numa_machines import (
    AC922,
    CLOUD_VM,
    CPUS_ON_2_ONLY,
    DGX_A100,
    EPYC_7401,
    GB200,
    GH200,
    NODE_0_OFFLINE,
    SAME_CPUS,
    SMALL_VM,
    SPARSE,
    TWO_SOCKETS,
    Layout,
    StandInNumactl,
    gpu_address,
    gpu_uuid,
    stand_in_nvidia_smi,
    write_machine,
)

DEFAULT, BY_GPU = NumaWish(), NumaWish(NumaSource.GPU)


class Host:
    """A machine of ours: its tree, and the programs on its PATH."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        self.programs = directory / "bin"
        self.programs.mkdir()
        self.numactl = StandInNumactl(self.programs)
        self.asked: Path | None = None

    def of(self, layout: Layout, *, mems: str | None = None, cpus: str | None = None) -> Host:
        write_machine(self.root, layout, mems=mems, cpus=cpus)
        if layout.gpu_nodes:
            self.asked = stand_in_nvidia_smi(self.programs, len(layout.gpu_nodes))
        return self

    def plan(self, workers: int, wish: NumaWish = DEFAULT, /, **env: str) -> NumaPlan:
        env = {"PATH": f"{self.programs}:/usr/bin:/bin", **env}
        return plan_numa(wish, workers, env, NodeGpus(env, self.root), self.root)

    def formula(self, workers: int, per_numa: int, memory: str = "membind", **env: str) -> NumaPlan:
        return self.plan(workers, NumaWish(memory=MemoryMode(memory)), NVRX_GPUS_PER_NUMA=str(per_numa), **env)

    def refuses(self, workers: int, wish: NumaWish = DEFAULT, /, **env: str) -> str:
        with pytest.raises(Failed) as caught:
            self.plan(workers, wish, **env)
        assert caught.value.exit_code == EXIT_USAGE
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def refuses_formula(self, workers: int, per_numa: int, **env: str) -> str:
        told = self.refuses(workers, NVRX_GPUS_PER_NUMA=str(per_numa), **env)
        assert told.startswith(f"NVRX_GPUS_PER_NUMA={per_numa} puts local rank")
        return told


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def nodes(plan: NumaPlan) -> list[int]:
    assert [one.local_rank for one in plan.bindings] == [*range(len(plan.bindings))]
    return [one.node for one in plan.bindings]


# ---- the formula ----------------------------------------------------------------------------------------------


@pytest.mark.rule("G7")
@pytest.mark.parametrize(
    ("layout", "workers", "per_numa", "expected"),
    [
        (TWO_SOCKETS, 8, 4, [0, 0, 0, 0, 1, 1, 1, 1]),
        (TWO_SOCKETS, 6, 4, [0, 0, 0, 0, 1, 1]),
        (TWO_SOCKETS, 8, 8, [0] * 8),
        (DGX_A100, 8, 1, [*range(8)]),
        (DGX_A100, 8, 2, [0, 0, 1, 1, 2, 2, 3, 3]),
        (GB200, 4, 2, [0, 0, 1, 1]),
        (SPARSE, 3, 1, [0, 1, 2]),
        (SAME_CPUS, 2, 1, [0, 1]),
    ],
)
def test_the_formula_on_machines(host: Host, layout: Layout, workers: int, per_numa: int, expected: list[int]) -> None:
    """C077, C084, C086: what the variable promises, whatever the order of GPUs."""
    plan = host.of(layout).formula(workers, per_numa)
    assert nodes(plan) == expected
    assert [binding_words(one) for one in plan.bindings] == [
        ("numactl", f"--cpunodebind={n}", f"--membind={n}") for n in expected
    ]
    # Each node was tried once.
    assert [line.split(" /")[0] for line in host.numactl.asked()] == [
        f"--cpunodebind={n} --membind={n}" for n in dict.fromkeys(expected)
    ]


@pytest.mark.rule("G7")
@pytest.mark.parametrize(
    ("layout", "per_numa", "words"),
    [
        (
            GB200,
            1,
            "local rank 2 on NUMA node 2, which has no CPUs (only memory); nodes with CPUs: 0-1; nodes here: 0-33",
        ),
        (GH200, 1, "local rank 1 on NUMA node 1, which has no CPUs (only memory); nodes with CPUs: 0; nodes here: 0-8"),
        (EPYC_7401, 1, "local rank 0 on NUMA node 0, which has no memory; nodes with memory: 1,5; nodes here: 0-7"),
        (CPUS_ON_2_ONLY, 1, "local rank 0 on NUMA node 0, which has no CPUs (only memory); nodes with CPUs: 2"),
    ],
)
def test_nodes_without_cpus_or_memory(host: Host, layout: Layout, per_numa: int, words: str) -> None:
    """C083, C084: though the stand-in for numactl would take them all."""
    assert words in host.of(layout).refuses_formula(4, per_numa)


@pytest.mark.rule("G7")
@pytest.mark.parametrize(
    ("layout", "per_numa", "words"),
    [
        (AC922, 2, "local ranks 2-3 on NUMA node 1, which this machine does not have; nodes here: 0,8,252-255"),
        (NODE_0_OFFLINE, 4, "local ranks 0-3 on NUMA node 0, which this machine does not have; nodes here: 1;"),
        (SMALL_VM, 2, "local ranks 2-3 on NUMA node 1, which this machine does not have; nodes here: 0;"),
    ],
)
def test_nodes_that_are_not_there(host: Host, layout: Layout, per_numa: int, words: str) -> None:
    """C085: never counted as the n-th node, never bound to what has only memory."""
    StandInNumactl(host.programs, [*layout.nodes])
    assert words in host.of(layout).refuses_formula(4, per_numa)


@pytest.mark.rule("G7")
def test_a_node_that_the_kernel_hides_is_left_to_numactl(host: Host) -> None:
    """In a container without /sys/devices/system/node numactl may still know it; else the answer says that."""
    assert nodes(host.formula(4, 2)) == [0, 0, 1, 1]
    assert [one.cpus for one in host.formula(4, 2).bindings] == [()] * 4
    StandInNumactl(host.programs, [])
    told = host.refuses_formula(4, 2)
    assert "this kernel shows no NUMA nodes (/sys/devices/system/node is missing)" in told
    assert "--numa-binding" in told


@pytest.mark.rule("G7")
def test_a_node_that_is_not_allowed_is_not_said_to_be_missing(host: Host) -> None:
    """C081."""
    told = host.of(TWO_SOCKETS, mems="0").refuses_formula(8, 4)
    assert "local ranks 4-7 on NUMA node 1, whose memory is not allowed to this process" in told
    assert "Mems_allowed_list 0" in told
    assert "does not have" not in told
    assert nodes(host.formula(4, 4)) == [0] * 4


@pytest.mark.rule("G7")
def test_cpus_that_are_not_allowed(host: Host) -> None:
    told = host.of(TWO_SOCKETS, cpus="0-55").refuses_formula(8, 4)
    assert (
        "NUMA node 1, none of whose CPUs (56-111,168-223) is allowed to this process (Cpus_allowed_list: 0-55)" in told
    )


@pytest.mark.rule("G7")
def test_what_numactl_says_is_told_where_the_kernel_sees_nothing_wrong(host: Host) -> None:
    StandInNumactl(host.programs, [0])
    told = host.of(TWO_SOCKETS).refuses_formula(8, 4)
    assert (
        "numactl --cpunodebind=1 --membind=1 fails (exit 1: libnuma: Warning: node argument 1 is out of range)" in told
    )


@pytest.mark.rule("G7")
def test_a_numactl_that_cannot_be_run_is_an_error(host: Host) -> None:
    (host.programs / "numactl").write_bytes(b"\x7fELF")
    told = host.of(SMALL_VM).refuses_formula(1, 4, PATH=str(host.programs))
    assert "but numactl cannot be run: Exec format error" in told


@pytest.mark.rule("G7")
def test_a_numactl_that_hangs_is_given_up(host: Host) -> None:
    (host.programs / "numactl").write_text(f"#!/bin/sh\necho $$ >{host.programs}/pid\nexec sleep 1000\n")
    env = {"PATH": f"{host.programs}:/usr/bin:/bin", "NVRX_GPUS_PER_NUMA": "1"}
    host.of(SMALL_VM)
    with pytest.raises(Failed, match="numactl --cpunodebind=0 --membind=0 did not answer within 1 s"):
        plan_numa(DEFAULT, 1, env, NodeGpus(env, host.root), host.root, probes_within_s=1.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int((host.programs / "pid").read_text()), 0)


@pytest.mark.rule("G7")
def test_numactl_is_missing(host: Host) -> None:
    """C078: the same PATH does for unbound workers."""
    (host.programs / "numactl").unlink()
    host.of(SMALL_VM)
    told = host.refuses(4, PATH=str(host.programs), NVRX_GPUS_PER_NUMA="4")
    assert told.startswith("NVRX_GPUS_PER_NUMA=4 binds workers with numactl, which is not found in PATH")
    assert "apt-get install numactl" in told
    assert "dnf install numactl" in told
    assert host.plan(4, PATH=str(host.programs)).bindings == ()
    assert "--numa-binding gpu binds workers with numactl" in host.refuses(1, BY_GPU, PATH=str(host.programs))


@pytest.mark.rule("G7")
@pytest.mark.parametrize("text", ["0", "-1", "abc", "4.0", "٤"])
def test_bad_values(host: Host, text: str) -> None:
    """C079."""
    assert f"NVRX_GPUS_PER_NUMA={text!a} " in host.of(SMALL_VM).refuses(4, NVRX_GPUS_PER_NUMA=text)
    assert host.numactl.asked() == []


@pytest.mark.rule("G7")
def test_without_the_variable_nothing_is_bound(host: Host) -> None:
    host.of(TWO_SOCKETS)
    assert host.plan(8).bindings == ()
    assert host.plan(8, NVRX_GPUS_PER_NUMA="").bindings == ()
    assert host.plan(8).binding(LocalRank(3)) is None
    assert "needs NVRX_GPUS_PER_NUMA" in host.refuses(8, NumaWish(NumaSource.FORMULA))
    assert host.plan(8, NumaWish(NumaSource.OFF), NVRX_GPUS_PER_NUMA="nonsense").bindings == ()
    assert host.numactl.asked() == []


@pytest.mark.rule("G7")
def test_memory_modes(host: Host) -> None:
    """Without membind a node whose memory cannot be had is bound by its CPUs."""
    host.of(EPYC_7401)
    for memory, more in (("local", ("--localalloc",)), ("none", ())):
        first, second = host.formula(2, 1, memory).bindings
        assert binding_words(first) == ("numactl", "--physcpubind=0,8,16,24,32,40,48,56,64,72,80,88", *more)
        assert binding_words(second) == ("numactl", "--cpunodebind=1", *more)
    host.of(TWO_SOCKETS, mems="0")
    assert binding_words(host.formula(8, 4, "none").bindings[7]) == (
        "numactl",
        "--physcpubind=56-111,168-223",
    )


@pytest.mark.rule("G7")
def test_cpus_beyond_those_given_are_not_asked_for(host: Host) -> None:
    """The stand-in binds nothing, so that what it runs has the CPUs of this test: not among those given here."""
    beyond = max(os.sched_getaffinity(0)) + 1
    layout = Layout({0: (f"0-{beyond + 7}", 1000)})
    (binding,) = host.of(layout, cpus=f"{beyond}-{beyond + 3}").formula(1, 1).bindings
    assert binding.cpus == tuple(range(beyond, beyond + 4))
    assert binding_words(binding) == ("numactl", f"--physcpubind={beyond}-{beyond + 3}", "--membind=0")
    assert f"--physcpubind={beyond}-{beyond + 3} --membind=0 " in host.numactl.asked()[-1]


# ---- beside the GPU -------------------------------------------------------------------------------------------


@pytest.mark.rule("G7")
@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (DGX_A100, [3, 3, 1, 1, 7, 7, 5, 5]),
        (TWO_SOCKETS, [0, 0, 0, 0, 1, 1, 1, 1]),
        (AC922, [0, 0, 8, 8]),
        (GB200, [0, 0, 1, 1]),
        (GH200, [0]),
    ],
)
def test_each_worker_beside_its_gpu(host: Host, layout: Layout, expected: list[int]) -> None:
    """C086, C085; on a GH200 whose GPU sits on a node without CPUs (1), the node of the CPUs next to it."""
    plan = host.of(layout).plan(len(expected), BY_GPU)
    assert nodes(plan) == expected
    assert plan.notes == ()
    assert [(one.uuid, one.pci_bus_id) for one in plan.devices] == [
        (gpu_uuid(one), gpu_address(one)) for one in range(len(expected))
    ]


@pytest.mark.rule("G7")
@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("4,5,6,7", [7, 7, 5, 5]),
        ("7,0", [5, 3]),
        (f"{gpu_uuid(6)}, {gpu_uuid(2)}", [5, 1]),
        (f"{gpu_uuid(4)[:12]},1", [7, 3]),
        ("0,1,-1,2", [3, 3]),
        (f"MIG-{gpu_uuid(4)}/7/0,MIG-{gpu_uuid(2)}/1/0", [7, 1]),
    ],
)
def test_the_gpus_that_workers_see(host: Host, visible: str, expected: list[int]) -> None:
    """C087: in the order given, by number or UUID, and none after a word that names none."""
    host.of(DGX_A100)
    assert nodes(host.plan(len(expected), BY_GPU, CUDA_VISIBLE_DEVICES=visible)) == expected
    told = host.refuses(len(expected) + 1, BY_GPU, CUDA_VISIBLE_DEVICES=visible)
    assert f"there are {len(expected) + 1} workers and {len(expected)} GPUs that they see" in told
    assert "CUDA_VISIBLE_DEVICES" in told


@pytest.mark.rule("G7")
@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles", "GPU-ffff", "9", gpu_uuid(0)[:9]])
def test_no_gpus_to_sit_beside(host: Host, visible: str) -> None:
    """The last is the beginning of several UUIDs."""
    assert "1 workers and 0 GPUs" in host.of(DGX_A100).refuses(1, BY_GPU, CUDA_VISIBLE_DEVICES=visible)


@pytest.mark.rule("G7")
def test_a_host_without_gpus_has_none_to_sit_beside(host: Host) -> None:
    assert "2 workers and 0 GPUs" in host.of(EPYC_7401).refuses(2, BY_GPU)


@pytest.mark.rule("G7")
def test_a_gpu_of_which_the_kernel_tells_no_node(host: Host, tmp_path: Path) -> None:
    """Where one node has CPUs it is taken, and said; where several have, nobody guesses."""
    told = host.of(CLOUD_VM).refuses(8, BY_GPU)
    assert f"the kernel tells no NUMA node of GPU {gpu_address(0)} of local rank 0" in told
    assert "nodes with CPUs: 0-1" in told
    (tmp_path / "other").mkdir()
    plan = Host(tmp_path / "other").of(SMALL_VM).plan(1, BY_GPU)
    assert nodes(plan) == [0]
    assert "taking node 0, the only one with CPUs" in plan.notes[0]


@pytest.mark.rule("G7")
def test_gpu_nodes_are_checked_like_others(host: Host) -> None:
    told = host.of(TWO_SOCKETS, mems="0").refuses(8, BY_GPU)
    assert told.startswith(
        f"--numa-binding gpu puts local rank 4 (GPU {gpu_address(4)}) on NUMA node 1, whose memory is"
    )


# ---- what people are told -------------------------------------------------------------------------------------


@pytest.mark.rule("G7")
def test_gpus_in_another_order_than_nodes_are_told(host: Host) -> None:
    """C086: the DGX A100."""
    (note,) = host.of(DGX_A100).formula(8, 2).notes
    assert "binds 6 of 8 workers to another NUMA node than their GPU's" in note
    assert f"local rank 0: node 0, GPU {gpu_address(0)} on node 3" in note
    assert "--numa-binding gpu" in note


@pytest.mark.rule("G7")
def test_other_gpus_than_the_first_are_told(host: Host) -> None:
    """C087: exactly, where the GPUs can be asked; else by the variable alone."""
    (note,) = host.of(TWO_SOCKETS).formula(4, 4, CUDA_VISIBLE_DEVICES="4,5,6,7").notes
    assert "binds 4 of 4 workers to another NUMA node" in note
    assert host.formula(4, 2, CUDA_VISIBLE_DEVICES="0,1,4,5").notes == ()
    (host.programs / "nvidia-smi").unlink()
    (note,) = host.formula(4, 4, CUDA_VISIBLE_DEVICES="4,5,6,7").notes
    assert note.startswith("CUDA_VISIBLE_DEVICES=4,5,6,7 does not show GPUs 0, 1, 2, ... in order")
    assert host.formula(4, 4, CUDA_VISIBLE_DEVICES="0,1,2,3").notes == ()


@pytest.mark.rule("G7")
def test_the_table_of_check(host: Host) -> None:
    plan = host.of(DGX_A100).formula(2, 1)
    lines = [*numa_lines(plan)]
    assert lines[:4] == [
        "numa      workers bound by formula",
        "          local rank  GPU           its node  bound to  CPUs           by",
        "          0           0000:10:00.0  3         node 0    0-15,128-143   numactl --cpunodebind=0 --membind=0",
        "          1           0000:11:00.0  3         node 1    16-31,144-159  numactl --cpunodebind=1 --membind=1",
    ]
    assert lines[4].startswith("warning   NVRX_GPUS_PER_NUMA binds 2 of 2 workers to another NUMA node")
    assert [*numa_lines(host.plan(1))] == [
        "numa      (workers not bound)",
        "          local rank  GPU           its node  bound to  CPUs  by",
        "          0           0000:10:00.0  3         -         -     -",
    ]
    assert [*numa_lines(NumaPlan())] == ["numa      (workers not bound)"]


# ---- what rank maps are told ----------------------------------------------------------------------------------


@pytest.mark.rule("H1")
def test_devices_are_told_with_or_without_a_binding(host: Host) -> None:
    expected = [Device(LocalRank(one), gpu_uuid(one), gpu_address(one), (0, 0, 1)[one // 2]) for one in range(2)]
    host.of(dataclasses.replace(TWO_SOCKETS, gpu_nodes=(0, 0, None)))
    assert [*host.plan(2).devices] == expected
    assert [*host.formula(2, 1).devices] == expected  # the GPU's own node, not that of the binding
    assert host.formula(3, 2).devices[2].numa_node == 1  # of the binding, since nothing else is known
    assert host.plan(3).devices[2].numa_node is None
    assert [one.local_rank for one in host.formula(4, 2).devices] == [0, 1, 2, 3]


@pytest.mark.rule("H1")
def test_hosts_without_a_sign_of_a_gpu_ask_none(host: Host) -> None:
    plan = host.of(EPYC_7401).plan(4)
    assert plan.devices == ()
    host.of(TWO_SOCKETS)
    assert host.asked is not None
    assert host.plan(4, CUDA_VISIBLE_DEVICES="").devices == ()
    assert not host.asked.exists()
    assert len(host.plan(4).devices) == 4
    assert host.asked.exists()


@pytest.mark.rule("H1")
def test_an_nvidia_smi_that_fails_holds_nobody_up(host: Host) -> None:
    host.of(TWO_SOCKETS)
    (host.programs / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed' >&2\nexit 9\n")
    assert host.plan(4).devices == ()
    assert nodes(host.formula(4, 2)) == [0, 0, 1, 1]
    assert "4 workers and 0 GPUs" in host.refuses(4, BY_GPU)


# ---- reading --------------------------------------------------------------------------------------------------


@pytest.mark.rule("G7")
@pytest.mark.parametrize(
    ("layout", "with_cpus", "with_memory"),
    [
        (GB200, [0, 1], [0, 1, 2, 10, 18, 26]),
        (AC922, [0, 8], [0, 8, 252, 253, 254, 255]),
        (SPARSE, [0, 1, 2, 33, 34, 45, 72, 73], [0, 1, 2, 33, 34, 45, 72, 73]),
        (CPUS_ON_2_ONLY, [2], [0, 1, 3]),
        (NODE_0_OFFLINE, [1], [1]),
    ],
)
@pytest.mark.parametrize("without", [(), ("has_memory",), ("has_memory", "has_normal_memory"), ("online",)])
def test_machines_are_read(
    tmp_path: Path, layout: Layout, with_cpus: list[int], with_memory: list[int], without: Sequence[str]
) -> None:
    """Also on kernels that list less."""
    write_machine(tmp_path, layout)
    for name in without:
        (tmp_path / "sys/devices/system/node" / name).unlink()
    described = read_machine(tmp_path)
    assert described.nodes is not None
    assert sorted(described.nodes) == sorted(layout.nodes)
    assert [one.number for one in described.nodes.values() if one.cpus] == with_cpus
    assert [one.number for one in described.nodes.values() if one.has_memory] == with_memory
    assert described.allowed_memory == frozenset(with_memory)


@pytest.mark.rule("G7")
def test_this_machine_is_read() -> None:
    described = read_machine()
    assert described.allowed_cpus == frozenset(os.sched_getaffinity(0))
    assert described.nodes is None or any(described.usable_cpus(one) for one in described.nodes)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("00000000:18:00.0", "0000:18:00.0"),
        ("0000000F:C1:00.0", "000f:c1:00.0"),
        ("00010000:01:00.0", "10000:01:00.0"),
        ("0000:18:1f.7", "0000:18:1f.7"),
        ("18:00.0", "0000:18:00.0"),
        ("[N/A]", ""),
        ("../../etc", ""),
        ("", ""),
    ],
)
def test_pci_addresses_as_sysfs_names_them(tmp_path: Path, address: str, name: str) -> None:
    assert pci_name(address) == name
    assert pci_numa_node(address, tmp_path) is None
    assert pci_local_cpus(address, tmp_path) == frozenset()
