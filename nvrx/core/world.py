"""The step between two cycles: close the run, choose the next world, or say what is waited for.

`next_world` is one function for deciding and for explaining: status shows the reason of the Wait it returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from .budgets import backoff_s, spent
from .facts import (
    Cause,
    Endpoint,
    Placed,
    RunClosed,
    RunState,
    Seat,
    Standby,
    WorldChosen,
)
from .health import may_train, why_absent, why_last
from .ids import GroupRank, InfraRank, NodeId
from .member import Member
from .narrate import MAX_NAMED, describe_failure, list_names
from .placement import Absent, Candidate, Placement, Shortage, Unplaced, Wanted, place
from .presence import Presence, StoreMode
from .run import Run
from .shape import RankPolicy, Shape
from .stores import may_have_workers, ports_in_use
from .topology import NUMERIC, OrderKey, OrderSource, order_key, settle_source

STOPPING_MARGIN_S = 2.0
"""How long beyond its stop grace a node that leaves is waited for (rule D2)."""
MAX_STOP_GRACE_S = 3600.0
MAX_INFRA_RANK = 2**31 - 1
"""Ranks are 32-bit on the wire; a larger number orders its node all the same, and shows as its position."""
_KILLED = {"SIGKILL", "SIGTERM"}
"""How workers end whose whole node is being emptied, by a scheduler or by want of memory."""
_REMEMBERED = 4
RECENT_CYCLES = 4
"""A store's port serves no second cycle within these; a node offers more ports than these can use up."""


@dataclass(frozen=True)
class Wait:
    """No world yet: why, until when at most, and when the run gives up. Run's clock, seconds."""

    reason: str
    until: float | None = None
    gives_up_at: float | None = None
    allows_world: bool | None = None
    """Whether there is a world that could be chosen; None where that is not asked yet."""


NextWorld: TypeAlias = WorldChosen | RunClosed | Wait


def next_world(run: Run, presence: Presence, now: float) -> NextWorld:
    """What to do while no cycle is live."""
    wait = _wait_for_nodes(run, presence, now)
    if wait is not None:
        return wait
    over = spent(run)
    if over is not None:
        return _wait_for_cause(run, presence, now) or RunClosed(now, RunState.FAILED, over.reason, over.exit_code)
    wait = _backoff(run, now)
    if wait is not None:
        return wait
    found = place_world(run, presence, now)
    if isinstance(found, Shortage):
        return _short(run, presence, found, now)
    wait = _last_call(run, presence, now) or _wait_for_leaving(run, presence, found, now)
    if wait is not None:
        return dataclasses.replace(wait, allows_world=True)
    master = _master(run, presence, found)
    if isinstance(master, Wait):
        return dataclasses.replace(master, allows_world=True)
    return world_chosen(run, presence, found, master, now)


def place_world(run: Run, presence: Presence, now: float) -> Placement | Shortage:
    """The world that would be chosen now, of those that are heard (rules C1, F1).

    A wish that can no longer be met is passed over: training goes on without it.
    """
    found = wished_world(run, presence, now)
    if isinstance(found, Shortage) and (run.promoted or run.replaced):
        found = wished_world(dataclasses.replace(run, promoted=frozenset(), replaced=frozenset()), presence, now)
    return found


def wished_world(run: Run, presence: Presence, now: float) -> Placement | Shortage:
    """The world that would be chosen now, just as operators wish it."""
    fresh = _fresh(run, presence, now)
    # While thousands join, who is missing is said by their number alone.
    is_plain = run.shape.replacement_group_size == 1 and run.shape.segment_size is None
    is_far = run.shape.min_nodes - len(fresh) > MAX_NAMED
    gone = () if is_plain and is_far else absent(run, presence, now)
    return _place(run, presence, fresh, gone)


def _place(run: Run, presence: Presence, candidates: list[Member], gone: Sequence[Absent] = ()) -> Placement | Shortage:
    source = run.order_source or settle_source([one.info.order_sources for one in candidates])
    shape = run.shape
    asked = _Question(
        candidates=tuple(
            Candidate(
                one.info.node_id,
                _key(one, source),
                one.info.replacement_group_id,
                one.info.domain_id,
                last_resort=bool(last := why_last(run, presence, one.info.node_id)),
                why_last=last,
            )
            for one in candidates
        ),
        form=(shape.min_nodes, shape.replacement_group_size, shape.segment_size, shape.rank_policy),
        previous=tuple(_previous(run).items()),
        wanted=Wanted(include=_promoted(run), exclude=run.drained | run.replaced, replaced=run.replaced - run.drained),
        gone=tuple(gone),
        shape=shape,
    )
    return _answer(asked)


@dataclass(frozen=True)
class _Question:
    """What `place` is asked. While no cycle is live the same is asked to decide, to explain and to set the timer."""

    candidates: tuple[Candidate, ...]
    form: tuple[int, int, int | None, RankPolicy]
    previous: tuple[tuple[NodeId, GroupRank], ...]
    wanted: Wanted
    gone: tuple[Absent, ...]
    shape: Shape = field(compare=False)
    """Only what stands in `form` is asked of it."""


@lru_cache(maxsize=_REMEMBERED)
def _answer(asked: _Question) -> Placement | Shortage:
    return place(asked.candidates, asked.shape, dict(asked.previous), asked.wanted, asked.gone)


def _promoted(run: Run) -> frozenset[NodeId]:
    """Nodes promoted by hand, without those that are gone, which no world can have, and their groups."""
    gone = {one for one in run.promoted if run.live(one) is None}
    if not gone:
        return run.promoted
    groups: set[str] = set()
    if run.shape.replacement_group_size > 1:
        groups = {group for one in gone if (group := run.members[one].info.replacement_group_id) is not None}
    return frozenset(one for one in run.promoted - gone if run.members[one].info.replacement_group_id not in groups)


def absent(run: Run, presence: Presence, now: float) -> list[Absent]:
    """Nodes that reasons may name: members that cannot be chosen now, and of those that are gone the ones that were
    there when the latest world was chosen, or have sisters left."""
    recent = set(run.members)
    if run.cycle is not None:
        recent = {*run.cycle.seat_of, *(one.node.node_id for one in run.cycle.standbys)}
    groups = {one.info.replacement_group_id for one in run.live_members()} - {None}
    ready = {one.info.node_id for one in _fresh(run, presence, now)}
    found: list[Absent] = []
    for node_id, member in run.members.items():
        group = member.info.replacement_group_id
        if node_id in ready or not (member.is_live or node_id in recent or group in groups):
            continue
        if not member.is_live:
            why = member.membership.value.lower()
        else:
            why = why_absent(run, presence, node_id)
        if not why:
            why = "suspect: it did not take up its place" if is_suspect(run, presence, node_id) else "silent"
        found.append(Absent(node_id, group, member.info.domain_id, why))
    return found


def _fresh(run: Run, presence: Presence, now: float) -> list[Member]:
    """C1: the members that may be chosen."""
    return [
        one
        for one in run.live_members()
        if presence.is_fresh(one.info.node_id, now)
        # One that has just taken the place of another was not heard yet: what is known is of the other.
        and presence.nodes[one.info.node_id].incarnation == one.info.incarnation
        and may_train(run, presence, one.info.node_id)
        and not is_suspect(run, presence, one.info.node_id)
    ]


def is_suspect(run: Run, presence: Presence, node_id: NodeId) -> bool:
    """D12: the node did not take up its place in a cycle, and has not said since that it knows of it."""
    found = run.suspected.get(node_id)
    if found is None:
        return False
    member, cycle = run.live(node_id), run.find_cycle(found.cycle)
    if member is None or cycle is None or member.info.incarnation != found.incarnation:
        return False
    return not presence.has_taken_up(node_id, found.cycle, cycle.ended_at or 0.0)


def _source(run: Run, presence: Presence, now: float) -> OrderSource:
    """The run's order source, or the one that it would have if its first world were chosen now (rule B4)."""
    return run.order_source or settle_source([one.info.order_sources for one in _fresh(run, presence, now)])


def _previous(run: Run) -> Mapping[NodeId, GroupRank]:
    """The world before, if it was in this life of the run."""
    if run.cycle is None or run.cycle.number < run.life_began_with:
        return {}
    return {seat.node.node_id: seat.group_rank for seat in run.cycle.seats}


def stopping_within(stop_grace_s: float) -> float:
    """How long workers of a node with this stop grace may still be there."""
    grace_s = stop_grace_s if 0 <= stop_grace_s <= MAX_STOP_GRACE_S else MAX_STOP_GRACE_S
    return grace_s + STOPPING_MARGIN_S


def describe_silence(run: Run, presence: Presence, now: float) -> str:
    """Why nobody is judged though leases are over; empty where that is not so."""
    until = withheld_until(run, presence, now)
    over = [one for one in presence.nodes.values() if now >= one.lease_until]
    if until is None or not over:
        return ""
    return (
        f"none of {len(presence.nodes)} nodes is heard, so the coordinator may be cut off itself: nobody is declared "
        f"lost before one is heard again, or {run.settings.join_timeout_s:g} s are over (join_timeout)"
    )


def describe_recovery(presence: Presence) -> str:
    """Who may still come back after a restart of the coordinator, unjudged (rule E5)."""
    return f"the coordinator restarted; {list_names(sorted(map(str, presence.returning)))} may still come back"


def withheld_until(run: Run, presence: Presence, now: float) -> float | None:
    """E1: until when nobody is judged, because the coordinator hears nobody at all; None where it judges.

    It is as likely cut off itself: of several nodes that fall silent together none may be gone. Where each of them has
    hung up there is nothing to be in doubt about. At the longest until the run gives up (D9).
    """
    if not presence.hears_nobody(now):
        return None
    members = [
        node
        for one in run.live_members()
        if (node := presence.nodes.get(one.info.node_id)) is not None and node.incarnation == one.info.incarnation
    ]
    if len(members) < 2 or all(node.hung_up for node in members):
        return None
    until = max(node.lease_until for node in members) + run.settings.join_timeout_s
    return until if now < until else None


def _wait_for_nodes(run: Run, presence: Presence, now: float) -> Wait | None:
    """E5, C7, D2: nodes that may be back in a moment, or that may still be writing a checkpoint."""
    if presence.is_recovering(now):
        return Wait(describe_recovery(presence), presence.recovering_until)
    broken = {
        str(member.info.node_id): node.lease_until
        for seat in (run.cycle.seats if run.cycle is not None else ())
        if (member := run.live(seat.node.node_id)) is not None
        and (node := presence.nodes.get(seat.node.node_id)) is not None
        and node.incarnation == member.info.incarnation == seat.node.incarnation
        and not node.connected
        and now < node.lease_until
    }
    if broken:
        return Wait(f"{list_names(sorted(broken))} may come back: the stream just broke", min(broken.values()))
    stopping = {name: until for name, until in run.stopping.items() if now < until}
    if stopping:
        return Wait(
            f"the workers of {list_names(sorted(stopping))}, which left, are still stopping", min(stopping.values())
        )
    return None


def _wait_for_cause(run: Run, presence: Presence, now: float) -> Wait | None:
    """D4, D5: before the last failure of a worker ends the run: a node that is killed whole may lose its workers first.

    Its stream breaks within the reconnect grace; then its loss is the cause, and charged to another budget. Where no
    second cycle is allowed whatever the cause there is nothing to wait for.
    """
    cycle = run.cycle
    if run.settings.max_restarts == 0 or cycle is None or cycle.failure is None or cycle.ended_at is None:
        return None
    until = cycle.ended_at + presence.timing.reconnect_grace_s
    if cycle.failure.cause is not Cause.WORKER_FAILED or cycle.failure.signal not in _KILLED or now >= until:
        return None
    return Wait(f"{describe_failure(cycle.failure)}; its node may be about to be lost", until)


def _backoff(run: Run, now: float) -> Wait | None:
    """D11: workers that die as soon as they run are started ever more slowly."""
    cycle, pause_s = run.cycle, backoff_s(run)
    if cycle is None or cycle.ended_at is None or now >= cycle.ended_at + pause_s:
        return None
    return Wait(f"workers fail soon after every start: the next waits {pause_s:g} s", cycle.ended_at + pause_s)


def _key(member: Member, source: OrderSource) -> OrderKey:
    return order_key(source, member.info.order_sources.get(source), member.info.node_id)


def _short(run: Run, presence: Presence, shortage: Shortage, now: float) -> NextWorld:
    """D9: wait for nodes, and in the end fail with the count and the names."""
    there = sorted((one for one in run.live_members()), key=lambda one: one.joined_at)
    source = run.order_source or settle_source([one.info.order_sources for one in there])
    names = [_name_with_order(one, source) for one in there[:MAX_NAMED]]
    joined = f"{len(there)} of {run.shape.min_nodes} joined{': ' if names else ''}{list_names(names, len(there))}"
    gone = list_names([f"{one.info.node_id} ({one.gone_reason})" for one in _recently_gone(run)])
    reason = f"{joined}; gone: {gone}" if gone else joined
    if len(there) >= run.shape.min_nodes:
        reason = f"{shortage.reason} ({reason})"
    # members may be enough, and yet allow no world: drained, suspect, unhealthy, or in the wrong domains
    short_since = run.short_since if run.short_since is not None else presence.short_since
    if short_since is None:
        return Wait(reason, allows_world=False)
    ended_at = run.cycle.ended_at if run.cycle is not None else None
    # a cycle may outlive its members, once they had finished: nobody has waited for nodes while it ran
    since = max(short_since, ended_at or 0.0)
    if presence.nodes and presence.hears_nobody(now):
        # of a world in which nobody is heard nobody knows whether it still works: it counts as gone
        since = min(since, presence.last_lease_until)
    gives_up_at = since + run.settings.join_timeout_s
    if now < gives_up_at:
        return Wait(reason, None, gives_up_at, allows_world=False)
    waited = f"after waiting {run.settings.join_timeout_s:g} s (join_timeout)"
    return RunClosed(now, RunState.FAILED, f"{reason}; {waited}", 1)


def _name_with_order(member: Member, source: OrderSource) -> str:
    text = member.info.order_sources.get(source)
    return f"{member.info.node_id}({text})" if source in NUMERIC and text else str(member.info.node_id)


def _recently_gone(run: Run) -> Iterator[Member]:
    if run.cycle is None or run.cycle.number < run.life_began_with:
        return
    for seat in run.cycle.seats:
        member = run.members.get(seat.node.node_id)
        if member is not None and not member.is_live:
            yield member


def _last_call(run: Run, presence: Presence, now: float) -> Wait | None:
    """C7: the first cycle of a life waits a little for MAX nodes; later ones start at once."""
    fresh = _fresh(run, presence, now)
    is_first = run.cycle is None or run.cycle.number < run.life_began_with
    if not is_first or len(fresh) >= run.shape.max_nodes:
        return None
    until = _possible_since(run, presence, fresh) + run.settings.last_call_s
    if now >= until:
        return None
    return Wait(f"last call: {len(fresh)} of at most {run.shape.max_nodes} nodes joined", until)


def _possible_since(run: Run, presence: Presence, fresh: list[Member]) -> float:
    """When the members first allowed a world. More of them never allow less, so the moment can be searched for."""
    by_time = sorted(fresh, key=lambda one: (one.joined_at, one.info.node_id))
    least, most = run.shape.min_nodes, len(by_time)
    if run.shape.replacement_group_size > 1 or run.shape.segment_size is not None:
        while least < most:
            middle = (least + most) // 2
            possible = not isinstance(_place(run, presence, by_time[:middle]), Shortage)
            least, most = (least, middle) if possible else (middle + 1, most)
    return by_time[least - 1].joined_at


def _wait_for_leaving(run: Run, presence: Presence, found: Placement, now: float) -> Wait | None:
    """D2: who leaves the world and still answers may be writing a checkpoint; nothing new starts before it has."""
    cycle = run.cycle
    if cycle is None or cycle.ended_at is None or cycle.number < run.life_began_with:
        return None
    staying = set(found.chosen)
    until = {
        str(seat.node.node_id): cycle.ended_at + stopping_within(member.info.stop_grace_s)
        for seat in cycle.seats
        if seat.node.node_id not in staying
        and (member := run.live(seat.node.node_id)) is not None
        and member.info.incarnation == seat.node.incarnation
        and presence.is_fresh(seat.node.node_id, now)
        and not is_suspect(run, presence, seat.node.node_id)
        and may_have_workers(run, cycle, seat.node.node_id, presence)
    }
    leaving = {name: at for name, at in until.items() if now < at}
    if not leaving:
        return None
    return Wait(
        f"{list_names(sorted(leaving))} leaves the world and its workers are still stopping", min(leaving.values())
    )


def _master(run: Run, presence: Presence, found: Placement) -> Endpoint | Wait | None:
    """Where the workers of the next cycle meet (rules I1, I2)."""
    if presence.store is StoreMode.OFF:
        return None
    if presence.store.is_hosted:
        return _hosted_master(run, presence)
    first = found.chosen[0]
    recent = run.cycles[-RECENT_CYCLES:]
    used = {(one.master.address, one.master.port) for one in recent if one.master is not None}
    address = run.members[first].info.address
    for port in presence.nodes[first].store_ports:
        if (address, port) not in used:
            return Endpoint(address, port)
    return Wait(f"{first} has yet to offer a port for the store of the next cycle")


def _hosted_master(run: Run, presence: Presence) -> Endpoint | Wait:
    """A fresh store of the coordinator's store process."""
    stores = presence.stores
    last = run.cycle.master.port if run.cycle is not None and run.cycle.master is not None else None
    taken = ports_in_use(run, presence) | {last}
    for port in stores.ports:
        if port not in taken:
            return Endpoint(stores.address, port, stores.lasting_port)
    return Wait(stores.problem or "the store process has yet to open a port for the next cycle")


def world_chosen(run: Run, presence: Presence, found: Placement, master: Endpoint | None, now: float) -> WorldChosen:
    """The fact that a placement leads to."""
    source = _source(run, presence, now)
    # Who is unhealthy was no candidate; the map says all the same why it is not in the world.
    sick = [one.info.node_id for one in run.live_members() if not may_train(run, presence, one.info.node_id)]
    left_out = [*found.left_out, *(Unplaced(one, why_absent(run, presence, one)) for one in sick)]
    everyone = [*found.chosen, *(one.node_id for one in left_out)]
    in_order = sorted((run.members[one] for one in everyone), key=lambda one: (_key(one, source), one.info.node_id))
    position = {one.info.node_id: index for index, one in enumerate(in_order)}

    def placed(node_id: NodeId) -> Placed:
        info = run.members[node_id].info
        text = info.order_sources.get(source, info.node_id)
        is_number = source in NUMERIC and source in info.order_sources
        number = int(text) if is_number and int(text) <= MAX_INFRA_RANK else position[node_id]
        return Placed(
            node_id=node_id,
            incarnation=info.incarnation,
            address=info.address,
            infra_rank=InfraRank(number),
            order_key=text,
            replacement_group_id=info.replacement_group_id,
            domain_id=info.domain_id,
            devices=info.devices,
        )

    return WorldChosen(
        at=now,
        cycle=run.next_cycle,
        order_source=source,
        seats=tuple(Seat(placed(one), GroupRank(rank)) for rank, one in enumerate(found.chosen)),
        standbys=tuple(Standby(placed(one.node_id), one.reason) for one in left_out),
        master=master,
        remark=found.remark,
    )
