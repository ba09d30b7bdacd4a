"""What this host's GPUs say of themselves: through NVML, else `nvidia-smi -q`. Without a GPU, or a way to ask: None.

Both are asked by processes of their own, which may hang without the agent. Must not know what the answer is for.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence

from nvrx.commandline import EXIT_USAGE, Failed
from nvrx.core.allocation import DOMAIN_VARIABLE

from .nvml_fabric import NO_CLUSTER

ANSWERS_WITHIN_S = 10.0
ENDS_WITHIN_S = 1.0
SECTION_INDENT, FIELD_INDENT = 4, 8
"""How far `nvidia-smi -q` indents the name of a section within a GPU, and a field within a section."""

log = logging.getLogger("nvrx.node")


class Hangs(Exception):
    """A program gave no answer in time; the message is its name."""


def cluster_uuid(env: Mapping[str, str], answers_within_s: float = ANSWERS_WITHIN_S) -> str | None:
    """The UUID of the NVLink cluster that this host's GPUs belong to; None where they name none (rule B7).

    Raises Failed where they differ: a node is in one domain.
    """
    try:
        clusters = _through_nvml(env, answers_within_s)
        if clusters is None:
            clusters = _through_nvidia_smi(env, answers_within_s)
    except Hangs as error:
        log.warning(
            "%s did not answer within %g s: this node's NVLink cluster is not known; set %s, or look at the GPU driver",
            *(error, answers_within_s, DOMAIN_VARIABLE),
        )
        return None
    return _common(clusters or {})


def _common(clusters: Mapping[str, str | None]) -> str | None:
    """What all GPUs agree on. `clusters`: by GPU."""
    found = set(clusters.values())
    if len(found) > 1:
        told = ", ".join(f"{gpu} {cluster or 'none'}" for gpu, cluster in clusters.items())
        raise Failed(
            f"the GPUs of this node name different NVLink clusters: {told}; see their fabric state (nvidia-smi -q), "
            f"or set {DOMAIN_VARIABLE}",
            EXIT_USAGE,
        )
    return found.pop() if found else None


def _through_nvml(env: Mapping[str, str], within_s: float) -> dict[str, str | None] | None:
    """The cluster of each GPU, by its PCI bus id; None where NVML cannot be asked."""
    if importlib.util.find_spec("pynvml") is None:
        return None
    # The path that finds our modules and pynvml here finds them there.
    there = {**env, "PYTHONPATH": os.pathsep.join(sys.path)}
    told = answer([sys.executable, "-m", "nvrx.client.nvml_fabric"], there, "NVML", within_s)
    return None if told is None else {gpu: _uuid(text) for gpu, text in map(str.split, told.splitlines())}


def _through_nvidia_smi(env: Mapping[str, str], within_s: float) -> dict[str, str | None] | None:
    """The same from `nvidia-smi -q`; None where there is none, or it fails."""
    program = shutil.which("nvidia-smi", path=env.get("PATH", os.defpath))
    told = answer([program, "-q"], env, "nvidia-smi -q", within_s) if program is not None else None
    return None if told is None else _parse_nvidia_smi(told)


def _parse_nvidia_smi(text: str) -> dict[str, str | None]:
    """The cluster of each GPU, by its PCI bus id, in what `nvidia-smi -q` prints."""
    fabrics: dict[str, dict[str, str]] = {}
    gpu = section = ""
    for line in text.splitlines():
        words = line.strip()
        indent = len(line) - len(line.lstrip())
        if not indent and words.startswith("GPU "):
            gpu = words.removeprefix("GPU ")
            fabrics[gpu] = {}
        elif indent == SECTION_INDENT:
            section = words
        elif indent == FIELD_INDENT and section == "Fabric":
            name, _, value = words.partition(":")
            fabrics[gpu][name.strip()] = value.strip()
    return {
        gpu: _uuid(fields.get("ClusterUUID", NO_CLUSTER)) if _is_there(fields) else None
        for gpu, fields in fabrics.items()
    }


def _is_there(fabric: Mapping[str, str]) -> bool:
    return fabric.get("State") == "Completed" and fabric.get("Status") == "Success"


def _uuid(text: str) -> str | None:
    """A cluster's UUID in its usual form; None for `-`, `N/A` and nothing but zeros."""
    try:
        found = uuid.UUID(text)
    except ValueError:
        return None
    return str(found) if found.int else None


def answer(argv: Sequence[str], env: Mapping[str, str], name: str, within_s: float) -> str | None:
    """What a program prints; None where it fails. Raises Hangs."""
    try:
        process = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        log.info("%s: %s", name, error.strerror)
        return None
    try:
        told, complaint = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        # Not for ever: what is stuck in the driver survives SIGKILL.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=ENDS_WITHIN_S)
        raise Hangs(name) from error
    if process.returncode != 0:
        said = (complaint or told).strip().splitlines()
        log.info("%s: exit code %d: %s", name, process.returncode, said[-1] if said else "(nothing said)")
        return None
    return told
