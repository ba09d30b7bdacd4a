"""nvrx on a Slurm cluster: the coordinator on the switch's machine, the agents in Slurm's steps, watched from outside.

What end-to-end tests have (facts, workers that obey, clean-up by mark) goes for these processes too: they share the
file system.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.cluster import OBEY, RUN_ID, Cluster
from tests.e2e.programs import NODE, ROOT, Program

from .machines import SWITCH
from .slurm_cluster import SlurmCluster

PORT = 7700


class Deployment(Cluster):
    """One test's coordinator on the cluster, and how its agents are started there."""

    def __init__(self, slurm: SlurmCluster) -> None:
        super().__init__()
        self.slurm = slurm
        self.directory.chmod(0o755)
        self.board.describe_with(slurm.describe)
        self.board.describe_with(self._describe_jobs)

    def coordinate(self, *options: str) -> Program:
        """Start the coordinator where all nodes reach it."""
        inside = self.slurm.machines.inside(SWITCH)
        listen = f"{self.slurm.machines.addresses[SWITCH]}:{PORT}"
        return self.serve("--insecure", *options, listen=listen, wrapped=inside, relayed=True)

    def agent(self, *options: str, command: Sequence[str] = OBEY, run_id: str | None = RUN_ID) -> str:
        """The command of an agent; its node id, order and group come from Slurm."""
        run = [] if run_id is None else ["--run-id", run_id]
        argv = [*NODE, "join", "--coordinator", self.address, *run, "--log-dir", str(self.logs)]
        argv += ["--last-call", "1", "--stop-grace", "5", "--restart-backoff", "0", *options, "--", *command]
        return shlex.join(argv)

    def script(self, launcher: str, agent: str) -> str:
        """A batch script that runs an agent on each node, and keeps what each ended with."""
        own = {name: value for name, value in self.environment().items() if name not in {"PATH", "HOME"}}
        exports = [f"export {name}={shlex.quote(value)}" for name, value in own.items()]
        keep = f"code=$?; echo $code > {self.directory}/ended.$SLURMD_NODENAME.$SLURM_JOB_ID; exit $code"
        each = self.directory / "agent.sh"
        each.write_text("\n".join(["#!/bin/bash", "trap : TERM", *exports, f"cd {ROOT}", agent, keep, ""]))
        each.chmod(0o755)
        return f"#!/bin/bash\n{launcher} {each}\n"

    def submit(self, *options: str, script: str) -> str:
        """sbatch; the job's id. What it prints is shown when a test fails."""
        return self.slurm.submit(f"--output={self.directory}/slurm-%A-%a.out", *options, script=script)

    def _describe_jobs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in self._outputs())

    def _outputs(self) -> list[Path]:
        return sorted(self.directory.glob("slurm-*.out"))

    def ended_on(self, node: str) -> int:
        """Wait for the end of the agent on a node; its exit code."""

        def code() -> int | None:
            found = [text for path in self.directory.glob(f"ended.{node}.*") if (text := path.read_text().strip())]
            return int(found[-1]) if found else None

        return self.board.until(code, f"the agent on {node} to end", timeout_s=60.0)
