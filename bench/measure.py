"""One measurement: start a job, kill or silence a part of it, time what comes back. No tables here."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nvrx.core.presence import DEFAULT_LEASE_TTL_S

from . import processes
from .asking import last_heard_s
from .marks import MarkBox, NotRecovered, World, kill_and_wait, monotonic_s
from .peers import RUN_ID, Layout, Nvrx, Peer

Kill = Literal["worker", "agent", "node", "coordinator"]
LAYOUTS: dict[Kill, Layout] = {
    "worker": Layout(4, 0, 2),
    "agent": Layout(3, 1, 2),
    "node": Layout(3, 1, 2),
    "coordinator": Layout(4, 0, 2),
}
# All ranks train; then this long nothing happens, so that launchers are done with starting.
QUIET_BEFORE_KILL_S = 1.0
_VICTIM_STRIDE = 3  # walks over all ranks, also rank 0, in an order that changes node each time
_DEATH_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Recovery:
    """One recovery; None where a peer has no such figure or never got there. Times in seconds."""

    peer: str
    rep: int
    victim: str
    load_before: float  # 1-minute load average when the job was started
    cold_start_s: float | None = None  # job started -> all ranks did an all_reduce
    map_s: float | None = None  # the killed process is dead -> all nodes of the new world hold its rank map
    boot_s: float | None = None  # SIGKILL, or SIGSTOP -> the last new worker's interpreter runs
    step_s: float | None = None  # SIGKILL, or SIGSTOP -> all ranks did an all_reduce
    lease_s: float | None = None  # the silent node's lease is over -> the last new worker's interpreter runs
    answer_s: float | None = None  # the coordinator is started again -> it answers GetRun
    disturbed: int = 0  # workers that had ended when it answered
    starts_in_vain: int = 0  # workers started on the way that never got into the new world
    failure: str | None = None


@dataclass(frozen=True)
class _Victim:
    name: str
    pids: list[int]  # the one whose death is watched comes first
    node: str | None  # its launcher or agent is killed too


def _choose_victim(kill: Kill, rep: int, world: World, peer: Peer) -> _Victim:
    """By the repetition's number alone, so that all peers lose the same rank, or a node of their active ones.

    Never n0 as a whole node: torchrun's rendezvous store lives there, and with it the whole job would end.
    """
    if kill in {"worker", "coordinator"}:
        rank = rep * _VICTIM_STRIDE % peer.layout.world_size
        return _Victim(f"rank {rank}", [world.steps[rank].pid], None)
    nodes = sorted(world.nodes - {"n0"})
    node = nodes[rep % len(nodes)]
    agent = [peer.node_pids[node]] if node in peer.node_pids else []
    workers = [mark.pid for mark in world.steps.values() if mark.node == node]
    return _Victim(f"node {node}", agent + workers, node)


def measure(
    peer_type: type[Peer], kill: Kill, rep: int, directory: Path, timeout_s: float, say: Callable[[str], None]
) -> Recovery:
    """A fresh job in `directory`; what goes wrong is part of the result. None of its processes is left."""
    directory.mkdir(parents=True)
    load = os.getloadavg()[0]
    with MarkBox(directory / "marks") as marks:
        peer = peer_type(LAYOUTS[kill], directory, marks.path)
        seen = _Seen(peer.name, rep, load)
        try:
            _run(peer, kill, marks, timeout_s, seen, say)
        except NotRecovered as error:
            seen.failure = str(error)
        finally:
            peer.stop()
    return seen.recovery()


class _Seen:
    """What is known of a measurement so far, so that a failed one still says how far it got."""

    def __init__(self, peer: str, rep: int, load_before: float) -> None:
        self.peer, self.rep, self.load_before = peer, rep, load_before
        self.victim = "none"
        self.failure: str | None = None
        self.cold_start_s: float | None = None
        self.map_s: float | None = None
        self.killed_s = 0.0
        self.lease_over_s: float | None = None
        self.answer_s: float | None = None
        self.disturbed = 0
        self.world: World | None = None

    def recovery(self) -> Recovery:
        world = self.world
        return Recovery(
            peer=self.peer,
            rep=self.rep,
            victim=self.victim,
            load_before=self.load_before,
            cold_start_s=self.cold_start_s,
            map_s=self.map_s,
            boot_s=world.last_boot_s - self.killed_s if world else None,
            step_s=world.last_step_s - self.killed_s if world else None,
            lease_s=world.last_boot_s - self.lease_over_s if world and self.lease_over_s is not None else None,
            answer_s=self.answer_s,
            disturbed=self.disturbed,
            starts_in_vain=world.starts_seen - len(world.boots) if world else 0,
            failure=self.failure,
        )


def _run(peer: Peer, kill: Kill, marks: MarkBox, timeout_s: float, seen: _Seen, say: Callable[[str], None]) -> None:
    world_size = peer.layout.world_size
    started_s = monotonic_s()
    peer.start()
    world = marks.wait_for_world(world_size, started_s, started_s + timeout_s, peer.living())
    seen.cold_start_s = world.last_step_s - started_s
    peer.await_readiness(started_s + timeout_s)
    time.sleep(QUIET_BEFORE_KILL_S)

    if kill == "coordinator":
        assert isinstance(peer, Nvrx)
        _restart_coordinator(peer, world, seen, say)
    victim = _choose_victim(kill, seen.rep, world, peer)
    seen.victim = victim.name
    strike = "SIGSTOP" if kill == "node" else "SIGKILL"
    say(f"{peer.name} {seen.rep + 1}: trains after {seen.cold_start_s:.1f} s; {strike} to {victim.name}")
    if kill == "node":
        assert isinstance(peer, Nvrx)
        assert victim.node is not None
        seen.killed_s = monotonic_s()
        processes.suspend(peer.node_pids[victim.node])
        seen.lease_over_s = last_heard_s(peer.address, RUN_ID, victim.node) + DEFAULT_LEASE_TTL_S
    else:
        seen.killed_s = kill_and_wait(victim.pids, _DEATH_TIMEOUT_S)
    death_stamp_ns = _stamp_ns(peer.directory / "death")
    deadline_s = seen.killed_s + timeout_s
    seen.world = marks.wait_for_world(world_size, seen.killed_s, deadline_s, peer.living(victim.node))
    seen.map_s = _map_s(peer, seen.world, death_stamp_ns)


def _restart_coordinator(peer: Nvrx, world: World, seen: _Seen, say: Callable[[str], None]) -> None:
    """Kill it and start it again; which workers have ended when it answers, by their pidfds."""
    handles = [os.pidfd_open(mark.pid) for mark in world.steps.values()]
    try:
        say(f"{peer.name} {seen.rep + 1}: SIGKILL to the coordinator")
        seen.answer_s = peer.restart_coordinator()
        seen.disturbed = len(select.select(handles, [], [], 0.0)[0])
    finally:
        for handle in handles:
            os.close(handle)


def _stamp_ns(path: Path) -> int:
    """Now, as the file system writes it: by the same clock, of the same coarseness, as the rank map files."""
    path.write_text("the victim is dead, or suspended\n")
    return path.stat().st_mtime_ns


def _map_s(peer: Peer, world: World, death_stamp_ns: int) -> float | None:
    """Seconds from the death to the last node's rank map file, by file times; None: this peer writes none."""
    files = [peer.rank_map_file(mark.node, mark.cycle) for mark in world.steps.values()]
    written = [file for file in files if file is not None]
    if not written:
        return None
    missing = [str(file) for file in written if not file.exists()]
    if missing:
        raise NotRecovered(f"all ranks trained, but these rank maps were never written: {missing}")
    return (max(file.stat().st_mtime_ns for file in written) - death_stamp_ns) / 1e9
