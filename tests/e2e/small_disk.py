"""A real disk that can be full: a tmpfs of one MiB, for those processes that enter its mount namespace."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from .cluster import Cluster

DISK_BYTES = 1024 * 1024


class SmallDisk:
    """A file system of its own, in a mount namespace of its own, which a process holds."""

    def __init__(self, cluster: Cluster, where: Path) -> None:
        where.mkdir(mode=0o700)
        unshare = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount"]
        script = f"mount -t tmpfs -o size={DISK_BYTES} tmpfs {where} && echo mounted && exec sleep infinity"
        tried = subprocess.run([*unshare, "sh", "-c", script.partition(" && echo")[0]], capture_output=True, text=True)
        if tried.returncode != 0:
            why = f"no file system of its own can be had here: {tried.stderr.strip()}"
            if os.environ.get("CI") == "true":
                pytest.fail(why)
            pytest.skip(why)
        holder = cluster.start("disk", [*unshare, "sh", "-c", script])
        holder.said("^mounted$")
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        self.enter = ["nsenter", "--target", str(holder.pid), *user, "--mount", "--"]
        self.path = Path(f"/proc/{holder.pid}/root{where}")

    def fill(self, but: int) -> None:
        """Take all room but some."""
        free = os.statvfs(self.path)
        (self.path / "filler").write_bytes(bytes(max(0, free.f_bavail * free.f_bsize - but)))

    def empty(self) -> None:
        (self.path / "filler").unlink()
