"""The GPUs of this host, and those of them that workers see: through NVML, else nvidia-smi (see gpu.py).

Must not know what the answer is for. Asks nothing on a host without any sign of a GPU.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvrx.core.topology import variable

from .gpu import ANSWERS_WITHIN_S, Hangs, answer
from .numa_sysfs import pci_name

VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY = ("--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader")
_SIGNS = ("proc/driver/nvidia", "dev/nvidia0")
_FIELDS = 3
_INDEX = re.compile(r"[0-9]{1,4}")

log = logging.getLogger("nvrx.node")


@dataclass(frozen=True)
class Gpu:
    """One GPU. `pci_bus_id` is as in sysfs, `0000:18:00.0`; empty where it is not known."""

    uuid: str
    pci_bus_id: str = ""

    def __str__(self) -> str:
        return self.pci_bus_id or self.uuid


def has_gpu(env: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Whether there is any sign of a GPU here: a driver, a device file or nvidia-smi. Takes no time."""
    return any((root / one).exists() for one in _SIGNS) or _nvidia_smi(env) is not None


def host_gpus(env: Mapping[str, str], answers_within_s: float = ANSWERS_WITHIN_S) -> tuple[Gpu, ...] | None:
    """All GPUs in order of PCI address; none where there are none, None where nobody could tell."""
    try:
        told = None
        if importlib.util.find_spec("pynvml") is not None:
            # The path that finds our modules and pynvml here finds them there.
            there = {**env, "PYTHONPATH": os.pathsep.join(sys.path)}
            told = answer([sys.executable, "-m", "nvrx.client.nvml_devices"], there, "NVML", answers_within_s)
        program = _nvidia_smi(env)
        if told is None and program is not None:
            told = answer([program, *_QUERY], env, "nvidia-smi", answers_within_s)
    except Hangs as error:
        log.warning(
            "%s did not answer within %g s: this node's GPUs are not known; look at the GPU driver",
            *(error, answers_within_s),
        )
        return None
    return None if told is None else tuple(_gpus(told))


def _nvidia_smi(env: Mapping[str, str]) -> str | None:
    return shutil.which("nvidia-smi", path=env.get("PATH", os.defpath))


def _gpus(text: str) -> list[Gpu]:
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines()]
    return [Gpu(uuid, pci_name(bus_id)) for _, uuid, bus_id in (row for row in rows if len(row) == _FIELDS)]


def visible_gpus(gpus: Sequence[Gpu], env: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Those that CUDA shows to workers, in the order that they get: by number, or by the beginning of a UUID.

    As CUDA does it, the list ends before the first word that names no GPU. A slice of a GPU (MIG) keeps its place
    under its own name; where it lies is known only where that names its GPU.
    """
    if VISIBLE not in env:
        return tuple(gpus)
    found: list[Gpu] = []
    for word in env[VISIBLE].split(","):
        gpu = _named(word.strip(), gpus)
        if gpu is None:
            break
        found.append(gpu)
    return tuple(found)


def _named(word: str, gpus: Sequence[Gpu]) -> Gpu | None:
    if _INDEX.fullmatch(word):
        return gpus[int(word)] if int(word) < len(gpus) else None
    if word.startswith("MIG-"):
        # MIG-GPU-<uuid>/<instance>/<instance>, as older drivers name them; newer names say nothing of the GPU.
        parent = _named(word.removeprefix("MIG-").partition("/")[0], gpus)
        return Gpu(word, parent.pci_bus_id if parent is not None else "")
    fitting = [one for one in gpus if word.startswith("GPU-") and one.uuid.startswith(word)]
    return fitting[0] if len(fitting) == 1 else None


class NodeGpus:
    """The GPUs that workers of this node see. Asked once, since that takes seconds where the driver has to be woken."""

    def __init__(self, env: Mapping[str, str], root: Path = Path("/")) -> None:
        self._env = env
        self._root = root
        self._visible: tuple[Gpu, ...] | None = None

    def visible(self, *, surely: bool = False) -> tuple[Gpu, ...]:
        """In order of local rank; none where nobody could tell. `surely`: ask though there is no sign of a GPU."""
        if self._visible is None:
            if _sees_none(self._env) or not (surely or has_gpu(self._env, self._root)):
                return ()
            self._visible = visible_gpus(host_gpus(self._env) or (), self._env)
        return self._visible


def _sees_none(env: Mapping[str, str]) -> bool:
    """Whether the environment hides all GPUs from workers."""
    return VISIBLE in env and variable(env, VISIBLE) in {"", "-1", "none", "NoDevFiles"}
