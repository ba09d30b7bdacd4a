"""Hosts on a network that can be cut: one network namespace for each, joined by a bridge in another. Needs root.

The namespaces live as long as the processes that hold them, which end with the test's process, however that ends.
Knows nothing of what runs there.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

SUBNET = "10.83.0"
_LASTS_S = 10.0


class NotAllowedError(Exception):
    """No namespaces can be made here; the message says why."""


class Namespaces:
    """Hosts by name. Whatever is cut is cut without a word: no connection is closed."""

    def __init__(self, names: Sequence[str]) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        if os.geteuid() != 0:
            raise NotAllowedError("network namespaces need root")
        try:
            self._bridge = self._hold()
            self._hosts = {name: self._hold() for name in names}
            self._numbers = {name: number for number, name in enumerate(names, start=1)}
            self._ip(self._bridge, "link add bridge type bridge", "link set bridge up")
            for name in names:
                self._plug_in(name)
        except (OSError, subprocess.CalledProcessError) as error:
            self.close()
            said = getattr(error, "stderr", None) or str(error)
            raise NotAllowedError(f"network namespaces cannot be made here: {said.strip()}") from error

    def _hold(self) -> int:
        """Make a namespace; the process that holds it."""
        script = "echo ready && exec cat >/dev/null"
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stderr is not None
        if not holder.stdout.readline():
            raise OSError(holder.stderr.read().decode())
        return holder.pid

    def _plug_in(self, name: str) -> None:
        host = self._hosts[name]
        cable = f"to-{name}"
        plugged = f"link add {cable} type veth peer name eth0 netns {host}"
        self._ip(self._bridge, plugged, f"link set {cable} master bridge", f"link set {cable} up")
        self._ip(host, "link set lo up", f"addr add {self.address(name)}/24 dev eth0", "link set eth0 up")

    def _ip(self, holder: int, *commands: str) -> None:
        subprocess.run(
            [*_enter(holder), "ip", "-batch", "-"],
            input="\n".join(commands),
            text=True,
            capture_output=True,
            check=True,
            timeout=_LASTS_S,
        )

    def address(self, name: str) -> str:
        return f"{SUBNET}.{self._numbers[name]}"

    def inside(self, name: str) -> tuple[str, ...]:
        """What to put before a command, so that it runs on this host."""
        return _enter(self._hosts[name])

    def cut(self, *names: str) -> None:
        """Take these hosts off the network, at one moment."""
        self._ip(self._bridge, *(f"link set to-{name} down" for name in names))

    def heal(self, *names: str) -> None:
        """Put them back."""
        self._ip(self._bridge, *(f"link set to-{name} up" for name in names))

    def silence(self, speaker: str, listener: str) -> None:
        """From now on nothing that `speaker` sends reaches `listener`; the other way all is well."""
        self._ip(self._hosts[speaker], f"route add blackhole {self.address(listener)}/32")

    def unsilence(self, speaker: str, listener: str) -> None:
        """Let it speak again."""
        self._ip(self._hosts[speaker], f"route del blackhole {self.address(listener)}/32")

    def close(self) -> None:
        """End the holders; a namespace goes with the last process in it."""
        for holder in self._holders:
            for pipe in (holder.stdin, holder.stdout, holder.stderr):
                if pipe is not None:
                    pipe.close()
            holder.wait(_LASTS_S)


def _enter(holder: int) -> tuple[str, ...]:
    return ("nsenter", f"--net=/proc/{holder}/ns/net")
