"""What a seed stands for: a shape, nodes, and what befalls them when. Pure: the same seed, the same plan.

Knows nothing of how a fault is brought about.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from random import Random

from nvrx.core.presence import StoreMode, Timing
from nvrx.core.shape import RankPolicy, RestartBudget, SettingsWish, Shape

CHAOS_FROM_S = 1.0
CHAOS_S = (15.0, 70.0)
FAULTS = (1, 24)
TOGETHER = 0.4
"""How often a fault comes within a second of another: what fails together is what is hard."""
LONG_S = (0.5, 40.0)
SHORT_S = (0.1, 6.0)


class Kind(enum.Enum):
    """What may happen. `duration_s` of a fault says for how long where that means something."""

    WORKER_FAILS = "a worker fails"
    WORKER_FINISHES = "a worker exits 0"
    WORKER_HANGS = "a worker is silent for too long"
    SPAWN_FAILS = "its next workers cannot be started"
    SPAWN_SLOW = "its next workers start slowly"
    IGNORE_TERM = "its workers ignore SIGTERM from now on"
    AGENT_TERMINATED = "its agent receives SIGTERM"
    AGENT_KILLED = "its agent is killed"
    AGENT_STARTED = "somebody starts its agent"
    POWER_LOST = "it loses power"
    STREAM_BREAKS = "its connections break"
    UP_STALLS = "nothing of what it sends arrives"
    DOWN_STALLS = "nothing of what it is sent arrives"
    PARTITION = "it is cut off both ways"
    SLOW = "its network is slow"
    ANSWER_LOST = "the next answer that it waits for is lost"
    COORDINATOR_CRASHES = "the coordinator is killed; what it was writing is kept"
    COORDINATOR_CRASHES_UNSYNCED = "the coordinator is killed; what it was writing is lost"
    COORDINATOR_STOPS = "the coordinator receives SIGTERM"
    COORDINATOR_STALLS = "the coordinator is not run for a while"
    JOURNAL_FAILS = "the next write of the journal fails"
    DISK_SLOW = "the disk is slow"
    STATE_LOST = "the coordinator dies, and all that it had kept is lost"
    CLOCK_STEPS = "the time of day is set"
    PROMOTE = "an operator promotes it"
    DRAIN = "an operator drains it"
    UNDRAIN = "an operator returns it"
    STOP_RUN = "an operator stops the run"
    UNHEALTHY = "a check of it fails, for a while"
    DEGRADED = "it is degraded, for a while"
    ALL_UNHEALTHY = "a check fails on all nodes, for a while"


_WEIGHTS = {
    Kind.WORKER_FAILS: 10,
    Kind.WORKER_FINISHES: 3,
    Kind.WORKER_HANGS: 4,
    Kind.SPAWN_FAILS: 2,
    Kind.SPAWN_SLOW: 3,
    Kind.IGNORE_TERM: 3,
    Kind.AGENT_TERMINATED: 6,
    Kind.AGENT_KILLED: 8,
    Kind.AGENT_STARTED: 8,
    Kind.POWER_LOST: 6,
    Kind.STREAM_BREAKS: 5,
    Kind.UP_STALLS: 4,
    Kind.DOWN_STALLS: 4,
    Kind.PARTITION: 6,
    Kind.SLOW: 3,
    Kind.ANSWER_LOST: 4,
    Kind.COORDINATOR_CRASHES: 5,
    Kind.COORDINATOR_CRASHES_UNSYNCED: 4,
    Kind.COORDINATOR_STOPS: 3,
    Kind.COORDINATOR_STALLS: 2,
    Kind.JOURNAL_FAILS: 2,
    Kind.DISK_SLOW: 2,
    Kind.STATE_LOST: 0.7,
    Kind.CLOCK_STEPS: 1,
    Kind.PROMOTE: 6,
    Kind.DRAIN: 6,
    Kind.UNDRAIN: 4,
    Kind.STOP_RUN: 0.3,
    Kind.UNHEALTHY: 6,
    Kind.DEGRADED: 2,
    Kind.ALL_UNHEALTHY: 1,
}
_LONG = {Kind.PARTITION, Kind.UP_STALLS, Kind.DOWN_STALLS, Kind.POWER_LOST, Kind.COORDINATOR_STALLS, Kind.SLOW}
_LONG |= {Kind.UNHEALTHY, Kind.DEGRADED, Kind.ALL_UNHEALTHY}


@dataclass(frozen=True)
class Fault:
    """One thing that happens. `node`: index of the node that it concerns; `amount`: a number for what needs one."""

    at_s: float
    kind: Kind
    node: int
    duration_s: float
    amount: int

    def __str__(self) -> str:
        return f"{self.at_s:7.3f}  n{self.node}  {self.kind.value}  ({self.duration_s:.2f} s, {self.amount})"


@dataclass(frozen=True)
class Place:
    """Where a node stands; empty where that does not matter."""

    group_id: str
    domain_id: str


@dataclass(frozen=True)
class Plan:
    """All that a simulation is given."""

    seed: int
    shape: Shape
    wish: SettingsWish
    timing: Timing
    places: tuple[Place, ...]
    stop_grace_s: float
    coordinator_grace_s: float
    store: StoreMode
    stops_on_partition: bool
    leaves_when_excluded: bool
    tells_progress: bool
    faults: tuple[Fault, ...]

    @property
    def quiet_from_s(self) -> float:
        """From here on nothing new happens, and what lasted is over."""
        return max((one.at_s + one.duration_s for one in self.faults), default=CHAOS_FROM_S)


def make_plan(seed: int) -> Plan:
    """The plan of a seed."""
    random = Random(f"plan {seed}")
    shape, places = _shape(random)
    nodes = len(places)
    chaos_s = random.uniform(*CHAOS_S)
    kinds = random.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=random.randint(*FAULTS))
    moments = [CHAOS_FROM_S + random.uniform(0.0, chaos_s) for _ in kinds]
    faults = sorted((_fault(random, kind, nodes, moments) for kind in kinds), key=lambda one: one.at_s)
    return Plan(
        seed=seed,
        shape=shape,
        wish=SettingsWish(
            max_restarts=random.choice([50, 50, 3, 1, 0]),
            max_replacements=random.choice([None, None, None, 3, 1]),
            join_timeout_s=random.choice([600.0, 600.0, 45.0]),
            last_call_s=random.choice([0.5, 1.0, 3.0]),
            settle_s=random.choice([0.5, 0.5, 0.0, 3.0]),
            restart_backoff_s=random.choice([1.0, 1.0, 0.0]),
            max_no_progress_cycles=random.choice([0, 3, 2]),
            restart_budget=random.choice(list(RestartBudget)),
            max_node_failures=random.choice([3, 2, 0]),
            quarantine_s=random.choice([None, 5.0]),
        ),
        timing=random.choice([Timing(), Timing(), Timing(0.5, 4.0, 1.0)]),
        places=places,
        stop_grace_s=random.choice([1.0, 3.0, 6.0]),
        coordinator_grace_s=random.choice([600.0, 600.0, 600.0, 20.0]),
        store=random.choice([StoreMode.RANK0, StoreMode.RANK0, StoreMode.OFF]),
        stops_on_partition=random.random() < 0.2,
        leaves_when_excluded=random.random() < 0.2,
        tells_progress=random.random() < 0.5,
        faults=tuple(faults),
    )


def _fault(random: Random, kind: Kind, nodes: int, moments: list[float]) -> Fault:
    at_s = random.choice(moments[: len(moments) // 4 + 1]) if random.random() < TOGETHER else random.choice(moments)
    at_s += random.uniform(0.0, 1.0)
    span_s = LONG_S if kind in _LONG and random.random() < 0.6 else SHORT_S
    return Fault(at_s, kind, random.randrange(nodes), random.uniform(*span_s), random.randrange(1000))


def _shape(random: Random) -> tuple[Shape, tuple[Place, ...]]:
    workers = random.choice([1, 2])
    policy = random.choice([RankPolicy.INFRA, RankPolicy.STICKY])
    kind = random.choice(["plain", "plain", "groups", "segments"])
    if kind == "groups":
        shape = Shape(4, 6, workers, replacement_group_size=2, rank_policy=policy)
        return shape, tuple(Place(f"g{number // 2}", "") for number in range(6))
    if kind == "segments":
        shape = Shape(4, 6, workers, segment_size=2, rank_policy=policy)
        return shape, tuple(Place("", f"d{number // 3}") for number in range(6))
    min_nodes, more, beyond = random.choice([1, 2, 3, 4]), random.choice([0, 1, 2]), random.choice([0, 0, 1])
    shape = Shape(min_nodes, min_nodes + more, workers, rank_policy=policy)
    return shape, tuple(Place("", "") for _ in range(min_nodes + more + beyond))
