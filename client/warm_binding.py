"""Bindings to processors and memory (rule G7) that a forked worker can take on by itself, read from their words.

Must not know: the zygote, cycles, the agent, or anything outside the standard library.
Only forms that the agent itself writes are known; whatever else stands there starts cold, behind the real program.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

_NODES = "/sys/devices/system/node"
_CPU_LIST = re.compile(rb"\d+(-\d+)?(,\d+(-\d+)?)*")
_NODE = re.compile(rb"\d{1,4}")


@dataclass(frozen=True, slots=True)
class WarmBinding:
    """`memory`: `bind NODE`, `local`, or empty: as inherited. `cpus` likewise."""

    cpus: tuple[int, ...] = ()
    memory: bytes = b""


@dataclass(frozen=True, slots=True)
class Unwrapped:
    binding: WarmBinding
    argv: tuple[bytes, ...]


def unwrap(argv: Sequence[bytes], nodes_folder: str = _NODES) -> Unwrapped | None:
    """The command, and how it is bound; None where the words before it are not understood."""
    words = list(argv)
    if words[:2] == [b"taskset", b"-c"] and len(words) > 3 and _CPU_LIST.fullmatch(words[2]):
        return Unwrapped(WarmBinding(_numbers(words[2])), tuple(words[3:]))
    if not words or words.pop(0) != b"numactl":
        return Unwrapped(WarmBinding(), tuple(argv))
    cpus: tuple[int, ...] = ()
    memory = b""
    while words and words[0].startswith(b"--"):
        name, _, value = words.pop(0).partition(b"=")
        if name == b"--physcpubind" and _CPU_LIST.fullmatch(value):
            cpus = _numbers(value)
        elif name == b"--cpunodebind" and _NODE.fullmatch(value):
            cpus = _cpus_of(int(value), nodes_folder)
            if not cpus:
                return None
        elif name == b"--membind" and _NODE.fullmatch(value):
            memory = b"bind " + value
        elif (name, value) == (b"--localalloc", b""):
            memory = b"local"
        else:
            return None
    return Unwrapped(WarmBinding(cpus, memory), tuple(words)) if words else None


def _cpus_of(node: int, nodes_folder: str) -> tuple[int, ...]:
    """Empty where there is no such node: the real program says so."""
    try:
        with open(os.path.join(nodes_folder, f"node{node}", "cpulist"), "rb") as file:
            text = file.read().strip()
    except OSError:
        return ()
    return _numbers(text) if _CPU_LIST.fullmatch(text) else ()


def _numbers(text: bytes) -> tuple[int, ...]:
    found: list[int] = []
    for part in text.split(b","):
        first, _, last = part.partition(b"-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)
