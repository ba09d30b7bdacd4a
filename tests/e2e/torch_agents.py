"""torchrun with our rendezvous backend, as real processes: its command line, and how it finds the backend.

torch finds it by the entry point of the installed package. Where the tests run beside an installation that is older
than they are, a folder on the path says the same; with CI set that is an error.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path

from .cluster import RUN_ID, Cluster
from .programs import ROOT, Program

GROUP, NAME, VALUE = "torchrun.handlers", "nvrx", "nvrx.client.torchrun:create_handler"


def is_installed() -> bool:
    return any(one.value == VALUE for one in entry_points(group=GROUP, name=NAME))


def python_path(directory: Path) -> str:
    """What makes the backend known to a torchrun that a test starts."""
    if is_installed():
        return str(ROOT)
    assert not os.environ.get("CI"), f"the installed nvrx has no entry point {NAME} in {GROUP}: install it anew"
    info = directory / "path" / "nvrx_not_installed_yet-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvrx-not-installed-yet\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{NAME} = {VALUE}\n")
    return f"{ROOT}:{info.parent}"


def torchrun(
    cluster: Cluster,
    node: str,
    *,
    nnodes: str,
    script: str = "obey",
    conf: str = "",
    options: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> Program:
    """Start torchrun on one node; returns at once."""
    settings = f"node_id={node},last_call=0.1,restart_backoff=0,log_dir={cluster.logs}{',' if conf else ''}{conf}"
    argv = [sys.executable, "-m", "tests.e2e.files_only", str(cluster.directory)]
    argv += [sys.executable, "-m", "torch.distributed.run"]
    argv += ["--rdzv-backend", "nvrx", "--rdzv-endpoint", cluster.address, "--rdzv-id", RUN_ID, "--nnodes", nnodes]
    argv += ["--rdzv-conf", settings, "--max-restarts", "100", *options, "-m", f"tests.e2e.workers.{script}"]
    around = {"PYTHONPATH": python_path(cluster.directory), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return cluster.start(node, argv, around | (env or {}))
