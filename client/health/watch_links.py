"""A program: says whether this host's InfiniBand ports are up that have been. `watch_links ROOT SECONDS`.

ROOT is /sys/class/infiniband, or a tree like it. A port counts from when it was first ACTIVE: one that never was, as
an unused one, speaks against nothing. A process of its own: reading a port asks its firmware, which may hang.
"""

from __future__ import annotations

import sys
from pathlib import Path

from . import rounds

ACTIVE = "ACTIVE"
LOOKS = 2
"""A port is down that was not ACTIVE so often in a row: networks bear a link that is gone for a moment."""


def port_states(root: Path) -> dict[str, str]:
    """The state of each port, as `ACTIVE` or `DOWN (physically Polling)`, by `DEVICE port N`."""
    return {
        f"{port.parent.parent.name} port {port.name}": _state(port)
        for port in sorted(root.glob("*/ports/*"))
        if port.is_dir()
    }


def _state(port: Path) -> str:
    state, physical = (_word(port / name) for name in ("state", "phys_state"))
    return state if state == ACTIVE or not physical else f"{state or 'unknown'} (physically {physical})"


def _word(file: Path) -> str:
    """`ACTIVE` of a file that holds `4: ACTIVE`; empty where it cannot be read."""
    try:
        return file.read_text().partition(":")[2].strip()
    except OSError:
        return ""


class Links:
    """The ports that have been ACTIVE, and how often each was not since."""

    def __init__(self) -> None:
        self._missed: dict[str, int] = {}

    def look(self, states: dict[str, str]) -> tuple[str, str]:
        """Health and why, by what the ports are now."""
        for port, state in states.items():
            if state == ACTIVE:
                self._missed[port] = 0
        for port in self._missed:
            if states.get(port) != ACTIVE:
                self._missed[port] += 1
        down = [port for port, missed in self._missed.items() if missed >= LOOKS]
        if not down:
            return "HEALTHY", ""
        told = ", ".join(f"{port} is {states.get(port, 'gone')}" for port in down)
        up = len(self._missed) - len(down)
        if not up:
            return "UNHEALTHY", f"no InfiniBand port is up any more: {told}"
        return "DEGRADED", f"{len(down)} of {len(self._missed)} InfiniBand ports that were up are not: {told}"


def main(root: Path, every_s: float) -> int:
    if not port_states(root):
        return rounds.NOTHING_TO_WATCH
    links = Links()
    while True:
        rounds.report(*links.look(port_states(root)))
        rounds.asked_within(every_s)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))
