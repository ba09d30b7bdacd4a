"""Machines as their kernels describe them: small trees of /sys and /proc, with the layouts of real machines.

And stand-ins for programs that need such a machine: numactl (more nodes than this host has), nvidia-smi (GPUs).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from nvrx.core.numa import number_list, parse_number_list


@dataclass(frozen=True)
class Layout:
    """`nodes`: by number the CPUs and the MiB of memory. `gpu_nodes`: of each GPU; None: the kernel says -1."""

    nodes: Mapping[int, tuple[str, int]]
    gpu_nodes: Sequence[int | None] = field(default=())


def _empty(*numbers: int) -> dict[int, tuple[str, int]]:
    return dict.fromkeys(numbers, ("", 0))


DGX_A100 = Layout(
    {node: (f"{16 * node}-{16 * node + 15},{16 * node + 128}-{16 * node + 143}", 64500) for node in range(8)},
    (3, 3, 1, 1, 7, 7, 5, 5),
)
TWO_SOCKETS = Layout({0: ("0-55,112-167", 1031000), 1: ("56-111,168-223", 1032000)}, (0, 0, 0, 0, 1, 1, 1, 1))
GH200 = Layout({0: ("0-71", 490037), 1: ("", 97280), **_empty(*range(2, 9))}, (1,))
GB200 = Layout(
    {
        **_empty(*range(2, 34)),
        0: ("0-71", 489935),
        1: ("72-143", 489795),
        **dict.fromkeys((2, 10, 18, 26), ("", 188416)),
    },
    (0, 0, 1, 1),
)
AC922 = Layout(
    {0: ("0-63", 257716), 8: ("64-127", 261728), **dict.fromkeys(range(252, 256), ("", 32256))}, (0, 0, 8, 8)
)
EPYC_7401 = Layout(
    {
        node: (",".join(str(2 * node % 8 + node // 4 + 8 * one) for one in range(12)), memory)
        for node, memory in enumerate((0, 31584, 0, 0, 0, 32214, 0, 0))
    }
)
SPARSE = Layout(
    {node: (f"{6 * place}-{6 * place + 5}", 8190) for place, node in enumerate((0, 1, 2, 33, 34, 45, 72, 73))}
)
NODE_0_OFFLINE = Layout({1: ("1,3,5,7,9,11,13,15,17,19,21,23", 65536)})
SAME_CPUS = Layout(dict.fromkeys(range(8), ("0-7", 2048)))
CPUS_ON_2_ONLY = Layout({0: ("", 8664), 1: ("", 5602), 2: ("0-7", 0), 3: ("", 1023)})
CLOUD_VM = Layout({0: ("0-93", 900000), 1: ("94-187", 900000)}, (None,) * 8)
SMALL_VM = Layout({0: ("0-1", 8922)}, (None,))


def gpu_address(index: int) -> str:
    """As sysfs names it."""
    return f"0000:{0x10 + index:02x}:00.0"


def write_machine(root: Path, layout: Layout, *, mems: str | None = None, cpus: str | None = None) -> Path:
    """The tree of a machine; `mems` and `cpus`: what the process may use there, else all there is. Returns `root`."""
    nodes = root / "sys/devices/system/node"
    write_nodes(nodes, layout)
    having = [number for number, (_, memory) in layout.nodes.items() if memory]
    everything = [one for number in layout.nodes for one in parse_number_list(layout.nodes[number][0])]
    status = f"Name:\tnvrx\nCpus_allowed_list:\t{number_list(set(everything)) if cpus is None else cpus}\n"
    status += f"Mems_allowed_list:\t{number_list(having) if mems is None else mems}\n"
    _write(root / "proc/self/status", status)
    for index, node in enumerate(layout.gpu_nodes):
        device = root / "sys/bus/pci/devices" / gpu_address(index)
        _write(device / "numa_node", f"{-1 if node is None else node}\n")
        # Beside memory without CPUs are those of the first node (GH200).
        near = layout.nodes[0 if node is not None and not layout.nodes[node][0] else node or 0][0]
        _write(device / "local_cpulist", f"{near}\n")
    return root


def write_nodes(folder: Path, layout: Layout) -> None:
    """What /sys/devices/system/node says, as far as numactl and we read it."""
    having = number_list(number for number, (_, memory) in layout.nodes.items() if memory)
    _write(folder / "online", f"{number_list(layout.nodes)}\n")
    _write(folder / "possible", f"0-{max(layout.nodes)}\n")
    _write(folder / "has_memory", f"{having}\n")
    _write(folder / "has_normal_memory", f"{having}\n")
    _write(folder / "has_cpu", f"{number_list(number for number, (cpus, _) in layout.nodes.items() if cpus)}\n")
    for number, (cpus, memory) in layout.nodes.items():
        mask = sum(1 << one for one in parse_number_list(cpus))
        _write(folder / f"node{number}/cpulist", f"{cpus}\n")
        _write(folder / f"node{number}/cpumap", f"{mask:x}\n" if mask < 1 << 32 else "0\n")
        kib = memory * 1024
        _write(folder / f"node{number}/meminfo", f"Node {number} MemTotal: {kib} kB\nNode {number} MemFree: {kib} kB\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def require_numactl() -> str:
    """The real program; where it is missing the test is skipped, and fails under CI=true."""
    found = shutil.which("numactl")
    if found is None:
        missing = "numactl is not installed; try: apt-get install numactl"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    return found


_NUMACTL = """\
#!/bin/sh
# A stand-in for numactl, for nodes that this host does not have: binds nothing, keeps what it was asked.
printf '%s\\n' "$*" >>'{log}'
while :; do
    case $1 in
        --cpunodebind=* | --membind=*)
            case ' {nodes} ' in
                *" ${{1#*=}} "*) ;;
                *) echo "libnuma: Warning: node argument ${{1#*=}} is out of range" >&2; exit 1 ;;
            esac ;;
        --*) ;;
        *) break ;;
    esac
    shift
done
exec "$@"
"""


class StandInNumactl:
    """A `numactl` in `directory` that accepts these nodes."""

    def __init__(self, directory: Path, nodes: Sequence[int] = range(256)) -> None:
        self._log = directory / "numactl.log"
        program = directory / "numactl"
        program.write_text(_NUMACTL.format(log=self._log, nodes=" ".join(map(str, nodes))))
        program.chmod(0o755)

    def asked(self) -> list[str]:
        """Its command lines so far."""
        return self._log.read_text().splitlines() if self._log.exists() else []


def stand_in_nvidia_smi(directory: Path, gpus: int) -> Path:
    """An `nvidia-smi` in `directory` for a host with this many GPUs; the file that it touches when it is asked."""
    asked = directory / "nvidia-smi.asked"
    rows = "\n".join(f"{one}, {gpu_uuid(one)}, 0000{gpu_address(one).upper()}" for one in range(gpus))
    program = directory / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\n"
        '[ "$*" = "--query-gpu=index,uuid,pci.bus_id --format=csv,noheader" ] || exit 6\n'
        f": >'{asked}'\ncat <<END\n{rows}\nEND\n"
    )
    program.chmod(0o755)
    return asked


def gpu_uuid(index: int) -> str:
    return f"GPU-{index:08x}-5a3b-8d1e-4c2f-9d007be1f0a2"
