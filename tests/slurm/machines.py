"""Machines out of namespaces: each has its own network, processes, mounts and name, on one switch without a way out.

`off` is a power loss, `unplug` a partition. They share the file system, the processors and the clock. Needs root and
iproute2. Knows nothing of Slurm.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SWITCH = "switch"
"""The machine that all others are plugged into; never off."""
_LASTS_S = 30.0
_NEEDS = ("unshare", "nsenter", "ip")
# Orphans in a pid namespace are its init's to reap; with SIGCHLD ignored (dash would not pass that on) the kernel does.
_INIT = """
hostname "$1" && mount --bind "$2" /etc/hosts && ip link set lo up && trap "" CHLD || exit 1
echo on
exec sleep infinity >/dev/null
"""


class NotAllowedError(Exception):
    """Namespaces cannot be made here; the text says why."""


def problem() -> str | None:
    """Why machines cannot be made here."""
    missing = [one for one in _NEEDS if shutil.which(one) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    if os.geteuid() != 0:
        return "namespaces need root"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True, timeout=_LASTS_S
    )
    return f"namespaces cannot be made here: {tried.stderr.decode().strip()}" if tried.returncode else None


class Machines:
    """A switch, and machines by name that are plugged into it."""

    def __init__(self, names: Sequence[str], directory: Path) -> None:
        why = problem()
        if why is not None:
            raise NotAllowedError(why)
        # Each set of machines is an island of its own: the same addresses anywhere do not meet.
        network = ipaddress.ip_network("10.231.0.0/22").hosts()
        self.addresses = {name: str(next(network)) for name in (SWITCH, *names)}
        self._hosts = directory / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self.addresses.items())]
        self._hosts.write_text("".join(f"{line}\n" for line in lines))
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._inits: dict[str, int] = {}
        try:
            self.on(SWITCH)
            for name in names:
                self.on(name)
        except BaseException:
            self.close()
            raise

    def on(self, name: str) -> None:
        """Power on."""
        assert name not in self._holders, f"{name} is on"
        own = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL"]
        holder = subprocess.Popen(
            ["unshare", *own, "bash", "-c", _INIT, "init", name, str(self._hosts)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._holders[name] = holder
        assert holder.stdout is not None
        assert holder.stderr is not None
        with holder.stdout, holder.stderr:
            if holder.stdout.readline() != b"on\n":
                raise NotAllowedError(f"{name} does not start: {holder.stderr.read().decode().strip()}")
        (init,) = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        self._inits[name] = int(init)
        address = f"{self.addresses[name]}/22"
        if name == SWITCH:
            self._ip(name, "link add br0 type bridge", "link set br0 up", f"addr add {address} dev br0")
            return
        cable = _cable(name)
        self._ip(SWITCH, f"link add {cable} type veth peer name eth0 netns {init}", f"link set {cable} master br0 up")
        self._ip(name, f"addr add {address} dev eth0", "link set eth0 up")

    def off(self, name: str) -> None:
        """Power off, in the middle of whatever it does: all its processes are gone when this returns."""
        holder = self._holders.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._inits.pop(name), signal.SIGKILL)
        holder.wait(_LASTS_S)

    def is_on(self, name: str) -> bool:
        return name in self._holders

    def unplug(self, *names: str) -> None:
        """Take machines off the network; everything on them runs on."""
        self._ip(SWITCH, *(f"link set {_cable(name)} down" for name in names))

    def plug_in(self, *names: str) -> None:
        """Put them back."""
        self._ip(SWITCH, *(f"link set {_cable(name)} up" for name in names))

    def inside(self, name: str) -> tuple[str, ...]:
        """What to put before a command, so that it runs on this machine."""
        return ("nsenter", "--target", str(self._inits[name]), "--net", "--uts", "--mount", "--pid", "--")

    def run(self, name: str, *command: str, env: Mapping[str, str], timeout_s: float = _LASTS_S) -> str:
        """Run a command on a machine to its end; what it printed. Raises CalledProcessError."""
        argv = [*self.inside(name), *command]
        done = subprocess.run(argv, env=dict(env), capture_output=True, text=True, check=False, timeout=timeout_s)
        if done.returncode != 0:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done.stdout

    def _ip(self, name: str, *commands: str) -> None:
        subprocess.run(
            ["nsenter", "--target", str(self._inits[name]), "--net", "--", "ip", "-batch", "-"],
            input="\n".join(commands),
            text=True,
            capture_output=True,
            check=True,
            timeout=_LASTS_S,
        )

    def close(self) -> None:
        """Power all off; networks go with their last process."""
        for name in reversed(list(self._holders)):
            self.off(name)


def _cable(name: str) -> str:
    return f"to-{name}"
