"""A real Slurm cluster of machines out of namespaces: Debian's slurmctld on the switch, a slurmd on each other machine.

Faults are those of machines (power, network) and of daemons. Times are short: a silent node is down after ten seconds.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .machines import SWITCH, Machines
from .machines import problem as machines_problem

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo", "squeue", "scancel")
PATIENCE_S = 60.0
_LOOK_AGAIN_S = 0.1
_CLIENT_TIMEOUT_S = 30.0
"""Of one client command: some hang for minutes when the controller does not answer."""

_CONFIGURATION = """
ClusterName={cluster}
SlurmctldHost={controller}({controller_address})
AuthType=auth/munge
# How long a requeued job is held back; 120 s unless it is said.
AuthInfo=socket={directory}/munge/socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/run/slurmctld.pid
SlurmdPidFile={directory}/run/slurmd.%n.pid
SlurmctldLogFile={directory}/log/slurmctld.log
SlurmdLogFile={directory}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
PropagateResourceLimits=NONE
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,bf_continue
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PriorityType=priority/basic
TopologyPlugin=topology/tree
# A node that was set down stays so; one that lost its power is back when its slurmd is.
ReturnToService=1
SlurmdTimeout=10
SlurmctldTimeout=10
KillWait=3
KillOnBadExit={kill_on_bad_exit}
UnkillableStepTimeout=20
CompleteWait=0
JobRequeue=1
JobFileAppend=1
InactiveLimit=0
MinJobAge=600
MessageTimeout=5
TCPTimeout=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=EXCLUSIVE State=UP PriorityTier=1 GraceTime=5
PartitionName=hi Nodes=ALL Default=NO MaxTime=INFINITE OverSubscribe=EXCLUSIVE State=UP PriorityTier=10 PreemptMode=OFF
"""


def problem() -> str | None:
    """Why no cluster can be had here."""
    missing = [one for one in PROGRAMS if shutil.which(one) is None]
    if missing:
        return f"{', '.join(missing)} not found (Debian: slurmctld slurmd slurm-client munge)"
    return machines_problem()


class SlurmCluster:
    """Nodes n1, n2, ... in partition `main`; `hi` preempts it."""

    def __init__(self, nodes: int, *, cpus: int = 2, per_leaf: int = 2, kill_on_bad_exit: bool = False) -> None:
        # Not pytest's folder: the path of a UNIX socket has 107 characters at most.
        self.directory = Path(tempfile.mkdtemp(prefix="nvrx-slurm-"))
        self.nodes = [f"n{number}" for number in range(1, nodes + 1)]
        for name in ("munge", "state", "spool", "run", "log", *(f"spool/{node}" for node in self.nodes)):
            (self.directory / name).mkdir()
        self.machines = Machines(self.nodes, self.directory)
        self._munged: subprocess.Popen[bytes] | None = None
        try:
            self._configure(cpus, per_leaf, kill_on_bad_exit)
            self._start_munged()
            self.start_controller()
            for node in self.nodes:
                self.start_slurmd(node)
            self.until(self.is_idle, "all nodes to be idle")
        except BaseException:
            self.close()
            raise

    # ---- what it is made of -------------------------------------------------------------------------------

    def _configure(self, cpus: int, per_leaf: int, kill_on_bad_exit: bool) -> None:
        addresses = self.machines.addresses
        lines = [
            f"NodeName={node} NodeHostname={node} NodeAddr={addresses[node]} CPUs={cpus} RealMemory=1000 State=UNKNOWN"
            for node in self.nodes
        ]
        self.configuration.write_text(
            _CONFIGURATION.format(
                cluster=f"nvrx{secrets.token_hex(4)}",
                controller=SWITCH,
                controller_address=addresses[SWITCH],
                directory=self.directory,
                kill_on_bad_exit=int(kill_on_bad_exit),
                nodes="\n".join(lines),
            )
        )
        leaves = [self.nodes[at : at + per_leaf] for at in range(0, len(self.nodes), per_leaf)]
        switches = [f"SwitchName=s{number} Nodes={','.join(leaf)}" for number, leaf in enumerate(leaves, start=1)]
        top = f"SwitchName=top Switches={','.join(f's{number}' for number in range(1, len(leaves) + 1))}"
        self.configuration.with_name("topology.conf").write_text("\n".join([*switches, top, ""]))
        # Without it slurmd looks at the host's cgroups whatever else is said, and may not start.
        self.configuration.with_name("cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")

    @property
    def configuration(self) -> Path:
        return self.directory / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """Of daemons and clients: nothing of the tests' own."""
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "HOME": str(self.directory),
            "SLURM_CONF": str(self.configuration),
        }

    def _start_munged(self) -> None:
        own = self.directory / "munge"
        key = own / "key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = [f"--key-file={key}", f"--socket={own}/socket", f"--pid-file={own}/pid", f"--log-file={own}/log"]
        argv = ["munged", "--foreground", "--force", "--num-threads=4", *files, f"--seed-file={own}/seed"]
        with (self.directory / "log/munged").open("wb") as log:
            self._munged = subprocess.Popen(
                argv, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.until((own / "socket").exists, "munged to listen")

    # ---- daemons ------------------------------------------------------------------------------------------

    def start_controller(self) -> None:
        """Returns when it answers."""
        self._daemon(SWITCH, "slurmctld")
        self.until(lambda: "is UP" in self.ask("scontrol", "ping"), "slurmctld to answer")

    def start_slurmd(self, node: str) -> None:
        self._daemon(node, "slurmd", "-N", node)

    def _daemon(self, name: str, *command: str) -> None:
        with (self.directory / "log" / f"{command[0]}.{name}.out").open("ab") as out:
            subprocess.run(
                [*self.machines.inside(name), *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                check=True,
                timeout=_CLIENT_TIMEOUT_S,
            )

    # ---- clients ------------------------------------------------------------------------------------------

    def ask(self, *command: str, env: Mapping[str, str] | None = None, timeout_s: float = _CLIENT_TIMEOUT_S) -> str:
        """Run one of Slurm's clients to its end; what it printed. Raises CalledProcessError."""
        return self.machines.run(SWITCH, *command, env={**self.environment, **(env or {})}, timeout_s=timeout_s)

    def submit(self, *options: str, script: str = "", env: Mapping[str, str] | None = None) -> str:
        """sbatch; the job's id. `script`: the batch script's text, where no file is named in the options."""
        named: tuple[str, ...] = ()
        if script:
            path = self.directory / f"script-{secrets.token_hex(4)}"
            path.write_text(script)
            named = (str(path),)
        return self.ask("sbatch", "--parsable", *options, *named, env=env).strip().partition(";")[0]

    def states(self) -> dict[str, str]:
        """Of nodes, as sinfo words them; without the mark of one that does not answer."""
        lines = self.ask("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T").splitlines()
        return {name: state.rstrip("*") for name, state in (line.split() for line in lines)}

    def is_idle(self) -> bool:
        return list(self.states().values()) == ["idle"] * len(self.nodes)

    def jobs(self) -> list[str]:
        """What runs or waits, one line each."""
        return self.ask("squeue", "--noheader", "--format=%i %T %R").splitlines()

    # ---- faults -------------------------------------------------------------------------------------------

    def power_off(self, node: str) -> None:
        self.machines.off(node)

    def power_on(self, node: str) -> None:
        self.machines.on(node)
        self.start_slurmd(node)

    # ---- waiting and ending -------------------------------------------------------------------------------

    def until(self, holds: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
        """Look again until it holds: Slurm has no events for a client to wait on."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(subprocess.CalledProcessError):  # the controller is not there yet
                if holds():
                    return
            if time.monotonic() > deadline_s:
                raise AssertionError(f"waited {timeout_s:g} s for {what}\n{self.describe()}")
            time.sleep(_LOOK_AGAIN_S)

    def describe(self) -> str:
        """Nodes, jobs and the last lines of the daemons' logs."""
        found = []
        for command in (("sinfo", "--Node", "--long"), ("squeue", "--long")):
            with contextlib.suppress(subprocess.SubprocessError):
                found.append(self.ask(*command, timeout_s=5.0))
        for path in sorted((self.directory / "log").iterdir()):
            lines = path.read_text(errors="replace").splitlines()[-10:]
            found.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(found)

    def is_clean(self) -> bool:
        """No job, every machine on and idle: as good as new."""
        return all(map(self.machines.is_on, self.nodes)) and self.is_idle() and not self.jobs()

    def close(self) -> None:
        """End everything that was started; nothing is left behind."""
        self.machines.close()
        if self._munged is not None:
            self._munged.kill()
            self._munged.wait(PATIENCE_S)
        shutil.rmtree(self.directory, ignore_errors=True)


def required() -> bool:
    """Whether a missing part is a failure."""
    return os.environ.get("CI") == "true"
