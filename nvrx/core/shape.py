"""What all nodes of a run must agree on (rules A2, A5), and what decides for the run as a whole.

Knows no node and no cycle.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from .fingerprint import differing
from .parallel import ParallelSizes

MAX_NODES = 100_000
MAX_WORKERS_PER_NODE = 1024
MAX_PATH_LENGTH = 4096
MAX_FINGERPRINT_ENTRIES = 1000
MAX_FINGERPRINT_TEXT = 8192
DEFAULT_MAX_RESTARTS = 3
DEFAULT_JOIN_TIMEOUT_S = 600.0
DEFAULT_LAST_CALL_S = 1.0
DEFAULT_SETTLE_S = 0.5
DEFAULT_RESTART_BACKOFF_S = 1.0
DEFAULT_MAX_NO_PROGRESS_CYCLES = 3
DEFAULT_MAX_NODE_FAILURES = 3


@dataclass(frozen=True)
class NodeCounts:
    """MIN nodes train, always; up to MAX - MIN more stand by."""

    min_nodes: int
    max_nodes: int


def parse_nnodes(text: str) -> NodeCounts:
    """Read `MIN:MAX`, or `N` for `N:N` (rule A5). Raises ValueError with one line that shows the value."""
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text, re.ASCII)
    if found is None:
        raise ValueError(f"{text!r} is not MIN:MAX or N; give whole numbers with 1 <= MIN <= MAX, such as 6:8")
    counts = NodeCounts(int(found[1]), int(found[2] or found[1]))
    if not 1 <= counts.min_nodes <= counts.max_nodes <= MAX_NODES:
        raise ValueError(f"{text!r} breaks 1 <= MIN <= MAX <= {MAX_NODES}; an example is 6:8")
    return counts


class RankPolicy(enum.Enum):
    """Who gets which group rank in the next cycle (rule C6)."""

    INFRA = "INFRA"
    """Nodes are numbered anew, in infra order."""
    STICKY = "STICKY"
    """Nodes that go on training keep their group rank where they can."""


@dataclass(frozen=True)
class Shape:
    """The fixed form of a run's world, the same on all its nodes."""

    min_nodes: int
    max_nodes: int
    workers_per_node: int
    checkpoint_path: str = ""
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    parallel: ParallelSizes = ParallelSizes()
    segment_size: int | None = None
    """Nodes that are taken together from one domain; None where domains do not matter."""
    replacement_group_size: int = 1
    rank_policy: RankPolicy = RankPolicy.INFRA

    @property
    def world_size(self) -> int:
        return self.min_nodes * self.workers_per_node

    def problem(self) -> str | None:
        """Why no run can have this shape, in one line; None if one can."""
        if not 1 <= self.min_nodes <= self.max_nodes <= MAX_NODES:
            return f"nnodes {self.min_nodes}:{self.max_nodes} breaks 1 <= MIN <= MAX <= {MAX_NODES}"
        if not 1 <= self.workers_per_node <= MAX_WORKERS_PER_NODE:
            return f"{self.workers_per_node} workers per node; 1 to {MAX_WORKERS_PER_NODE} are possible"
        for what, size in (
            ("segment size", self.segment_size),
            ("replacement group size", self.replacement_group_size),
        ):
            if size is not None and size < 1:
                return f"the {what} is {size}; a whole number from 1 up is possible"
            if size is not None and self.min_nodes % size:
                return f"MIN {self.min_nodes} is no multiple of the {what} {size}"
        if len(self.checkpoint_path) > MAX_PATH_LENGTH:
            return f"the checkpoint path has {len(self.checkpoint_path)} characters; at most {MAX_PATH_LENGTH}"
        if len(self.fingerprint) > MAX_FINGERPRINT_ENTRIES:
            return f"the fingerprint has {len(self.fingerprint)} entries; at most {MAX_FINGERPRINT_ENTRIES}"
        for name, text in self.fingerprint.items():
            if len(name) + len(text) > MAX_FINGERPRINT_TEXT:
                return f"the fingerprint of {name[:64]!a} is longer than {MAX_FINGERPRINT_TEXT} characters"
        return self.parallel.problem(self.min_nodes, self.workers_per_node)


class RestartBudget(enum.Enum):
    """What `max_restarts` counts (rule D6)."""

    FIXED = "FIXED"
    """Every restart of the run."""
    PER_PROGRESS = "PER_PROGRESS"
    """Restarts since training last came further."""


@dataclass(frozen=True)
class Settings:
    """What decides for the run as a whole: the first node to join sets it. Durations in seconds."""

    max_restarts: int = DEFAULT_MAX_RESTARTS
    max_replacements: int | None = None
    join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S
    last_call_s: float = DEFAULT_LAST_CALL_S
    settle_s: float = DEFAULT_SETTLE_S
    """Losses this soon after a failure belong to it (rule D3)."""
    restart_backoff_s: float = DEFAULT_RESTART_BACKOFF_S
    """First wait of a crash loop, doubled each time; 0 turns it off (rule D11)."""
    max_no_progress_cycles: int = DEFAULT_MAX_NO_PROGRESS_CYCLES
    """Cycles in a row without progress that end the run, where progress is reported; 0 turns it off (rule D6)."""
    restart_budget: RestartBudget = RestartBudget.FIXED
    max_node_failures: int = DEFAULT_MAX_NODE_FAILURES
    """Cycles in a row that one node's workers may fail first; 0 turns quarantine off (rule D7)."""
    quarantine_s: float | None = None
    """How long such a node is chosen last; None: for the rest of the run."""

    def problem(self) -> str | None:
        """Why no run can have these settings, in one line; None if one can."""
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            if isinstance(value, int | float) and not value >= 0:
                return f"{one.name} is {value}; a number from 0 up is possible"
        return None


@dataclass(frozen=True)
class SettingsWish:
    """The settings that one node asks for; None where it takes whatever the run has."""

    max_restarts: int | None = None
    max_replacements: int | None = None
    join_timeout_s: float | None = None
    last_call_s: float | None = None
    settle_s: float | None = None
    restart_backoff_s: float | None = None
    max_no_progress_cycles: int | None = None
    restart_budget: RestartBudget | None = None
    max_node_failures: int | None = None
    quarantine_s: float | None = None

    def over_defaults(self) -> Settings:
        """The settings of a run that this node opens."""
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return Settings(**{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True)
class Difference:
    """A field in which a node does not agree with its run."""

    field: str
    run_has: str
    node_gives: str


def _told(value: object) -> str:
    if value is None:
        return "(none)"
    return value.value.lower() if isinstance(value, enum.Enum) else str(value)


def differences(shape: Shape, settings: Settings, node_shape: Shape, node_wish: SettingsWish) -> tuple[Difference, ...]:
    """Every field in which a node's shape or wishes differ from the run's (rule A2)."""
    found = [
        Difference(name, str(getattr(shape, name)), str(getattr(node_shape, name)))
        for name in ("min_nodes", "max_nodes", "workers_per_node", "checkpoint_path")
        if getattr(shape, name) != getattr(node_shape, name)
    ]
    found += [
        Difference(name, _told(getattr(shape, name)), _told(getattr(node_shape, name)))
        for name in ("segment_size", "replacement_group_size", "rank_policy")
        if getattr(shape, name) != getattr(node_shape, name)
    ]
    found += [
        Difference(one.name, str(getattr(shape.parallel, one.name)), str(getattr(node_shape.parallel, one.name)))
        for one in dataclasses.fields(ParallelSizes)
        if getattr(shape.parallel, one.name) != getattr(node_shape.parallel, one.name)
    ]
    found += [Difference(one.name, one.one, one.other) for one in differing(shape.fingerprint, node_shape.fingerprint)]
    for one in dataclasses.fields(node_wish):
        wished = getattr(node_wish, one.name)
        if wished is not None and wished != getattr(settings, one.name):
            found.append(Difference(one.name, _told(getattr(settings, one.name)), _told(wished)))
    return tuple(found)
