"""What the kernel says of this machine's NUMA nodes, of this process's share in them, and of where a GPU sits.

Reads below the root that it is given. Must not know what the answers are for.
"""

from __future__ import annotations

import re
from pathlib import Path

from nvrx.core.numa import NumaMachine, NumaNode, parse_number_list

_NODES = "sys/devices/system/node"
_PCI_DEVICES = "sys/bus/pci/devices"
_STATUS = "proc/self/status"
_PCI_ADDRESS = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)


def read_machine(root: Path = Path("/")) -> NumaMachine:
    """The NUMA nodes that are online, and what this process may use of them. What cannot be read counts as unknown."""
    folder = root / _NODES
    online = _numbers(folder / "online")
    if online is None and folder.is_dir():
        online = frozenset(
            int(one.name.removeprefix("node")) for one in folder.glob("node[0-9]*") if one.name[4:].isdecimal()
        )
    having = _numbers(folder / "has_memory") or _numbers(folder / "has_normal_memory")
    nodes = {one: _node(folder, one, having) for one in sorted(online or ())}
    status = _text(root / _STATUS) or ""
    return NumaMachine(nodes or None, _allowed(status, "Mems_allowed_list"), _allowed(status, "Cpus_allowed_list"))


def _node(folder: Path, number: int, having_memory: frozenset[int] | None) -> NumaNode:
    described = folder / f"node{number}"
    cpus = _numbers(described / "cpulist") or frozenset()
    # Old kernels list memory nodes nowhere; without a word on it a node is taken to have some.
    total = re.search(r"MemTotal:\s*([0-9]+)", _text(described / "meminfo") or "")
    has_memory = number in having_memory if having_memory is not None else total is None or int(total[1]) > 0
    return NumaNode(number, cpus, has_memory)


def _allowed(status: str, name: str) -> frozenset[int] | None:
    found = re.search(rf"^{name}:\s*(\S*)$", status, re.MULTILINE)
    try:
        return parse_number_list(found[1]) if found is not None else None
    except ValueError:
        return None


def pci_name(address: str) -> str:
    """A PCI address as sysfs names it, `0000:18:00.0`, from one with a longer domain (NVML), or none; else empty."""
    found = _PCI_ADDRESS.fullmatch(address.strip())
    if found is None:
        return ""
    domain, bus, device, function = found.groups()
    return f"{int(domain or '0', 16):04x}:{bus}:{device}.{function}".lower()


def pci_numa_node(address: str, root: Path = Path("/")) -> int | None:
    """The NUMA node of a PCI device; None where the kernel tells none (-1: the firmware does not say)."""
    text = _text(root / _PCI_DEVICES / pci_name(address) / "numa_node") if pci_name(address) else None
    return int(text) if text is not None and text.strip().isdecimal() else None


def pci_local_cpus(address: str, root: Path = Path("/")) -> frozenset[int]:
    """The CPUs next to a PCI device; empty where the kernel does not say."""
    return (pci_name(address) and _numbers(root / _PCI_DEVICES / pci_name(address) / "local_cpulist")) or frozenset()


def _numbers(path: Path) -> frozenset[int] | None:
    text = _text(path)
    try:
        return parse_number_list(text) if text is not None else None
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
