"""Many nodes that join one after another, at once: refuses what `decide_join` would refuse, in time that does not grow
with the square of their number. Chooses no world and knows no file.

Most nodes are seen to be no trouble by a few counts that only ever err to the safe side; from the first one on that
may be, each is decided by `decide_join` itself.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import NamedTuple

from .commands import Join
from .facts import NodeInfo, NodeJoined, NodeLost
from .ids import GroupId, NodeId
from .join import MAX_MEMBERS_PER_NODE, check_join, decide_join
from .member import Member
from .presence import Presence
from .run import Run, evolve
from .shape import SettingsWish
from .topology import OrderSource, order_key, settle_source

_NO_WISH = SettingsWish()


class _Unit(NamedTuple):
    """What the members of a group have in common, unless Slurm started it again."""

    array_job_id: str
    restart_count: int


class Muster:
    """Joins to an open run that has not chosen a world yet. `presence` hears of each node at once."""

    def __init__(self, run: Run, presence: Presence, now: float) -> None:
        self._run = run
        self._presence = presence
        self._now = now
        self._waiting: list[NodeInfo] = []
        self._all_plain = True
        self._names: set[NodeId] = set(run.members)
        self._there: list[NodeInfo] = []
        self._source: OrderSource | None = None
        self._taken: set[object] = set()
        self._in_group: Counter[GroupId] = Counter()
        self._counted = 0
        self._unit_of: dict[GroupId, _Unit] = {}
        for member in run.live_members():
            self._all_plain = self._all_plain and self._take(member.info)

    def join(self, command: Join) -> None:
        """One more node. Raises Refused, and then it is not there."""
        node = command.node
        self._all_plain = self._all_plain and self._is_plain(command)
        if self._all_plain:
            self._waiting.append(node)
            self._names.add(node.node_id)
        else:
            run = self.run()
            for fact in decide_join(run, self._presence, command, self._now):
                run = evolve(run, fact)
                if isinstance(fact, NodeLost):
                    self._presence.forget(fact.node_id)
            self._run = run
        self._presence.joined(node.node_id, node.incarnation, self._now)
        self._presence.connected(node.node_id, self._now)

    def run(self) -> Run:
        """The run with all that have joined."""
        if self._waiting:
            *others, last = self._waiting
            members = {**self._run.members, **{one.node_id: Member(one, self._now) for one in others}}
            restarts = max(self._run.restart_count, *(one.restart_count for one in self._waiting))
            before = dataclasses.replace(self._run, members=members, restart_count=restarts)
            self._run = evolve(before, NodeJoined(self._now, last))
            self._waiting = []
        return self._run

    def _is_plain(self, command: Join) -> bool:
        """Whether `decide_join` can have nothing against it. False where that is not seen at once."""
        check_join(command)
        run, node = self._run, command.node
        agrees = run.is_open and command.shape == run.shape and command.wish == _NO_WISH
        is_new = node.node_id not in self._names and node.last_cycle is None
        return agrees and is_new and not run.stopping and not run.cycles and self._take(node)

    def _take(self, node: NodeInfo) -> bool:
        """Count a node; False where it may be one too many of something."""
        shape = self._run.shape
        self._there.append(node)
        if len(self._there) > MAX_MEMBERS_PER_NODE * shape.max_nodes:
            return False
        group = node.replacement_group_id
        if shape.replacement_group_size == 1:
            self._counted += 1
        elif group is not None:
            if group not in self._in_group:
                self._counted += shape.replacement_group_size  # its others have their places kept
            self._in_group[group] += 1
            unit = _Unit(node.group_array_job_id, node.restart_count)
            if self._unit_of.setdefault(group, unit) != unit or self._in_group[group] > shape.replacement_group_size:
                return False
        return self._counted <= shape.max_nodes and self._has_own_place(node)

    def _has_own_place(self, node: NodeInfo) -> bool:
        """B4. The source only ever falls back to a lesser one, so all keys are made anew a few times at most."""
        source = self._source
        if source is None or source not in node.order_sources:
            source = settle_source([one.order_sources for one in self._there])
        newcomers = [node] if source is self._source else self._there
        if source is not self._source:
            self._source, self._taken = source, set()
        for one in newcomers:
            text = one.order_sources.get(source)
            if text is None or source is OrderSource.NODE_ID:
                continue
            key = order_key(source, text, one.node_id)
            if key in self._taken:
                return False
            self._taken.add(key)
        return True
