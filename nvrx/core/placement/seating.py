"""Which group rank each chosen node gets (rule C6). Chooses no nodes.

Where segments count, the world is cut into slots: `segment_size` consecutive group ranks, aligned to multiples of it.
Each slot belongs to one domain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ids import DomainId, GroupRank, NodeId
from ..shape import RankPolicy, Shape
from .model import Candidate


@dataclass(frozen=True)
class _Slot:
    """One segment's group ranks, and how many survivors of one domain were seated in it before."""

    number: int
    domain: DomainId | None
    stay: int


@dataclass(frozen=True)
class _Kept:
    """Which slots each domain keeps, and those left, the lowest last."""

    owned: dict[DomainId | None, list[int]]
    free: list[int]


def seat(chosen: Sequence[Candidate], shape: Shape, previous: Mapping[NodeId, GroupRank]) -> tuple[NodeId, ...]:
    """The chosen nodes, which come in infra order, in group-rank order."""
    in_domains = chosen if shape.segment_size is None else _by_domain(chosen)
    if shape.rank_policy is RankPolicy.INFRA:
        return tuple(one.node_id for one in in_domains)
    survivors = _survivors(chosen, previous)
    if shape.segment_size is None:
        return _fill([*range(len(chosen))], chosen, survivors)
    return _seat_segments(in_domains, shape.segment_size, survivors)


def _by_domain(chosen: Sequence[Candidate]) -> list[Candidate]:
    """Domains by their first chosen node, unbroken, and in infra order within: segments are then unbroken too, because
    every domain gives a multiple of the segment size."""
    domains: dict[DomainId | None, list[Candidate]] = {}
    for one in chosen:
        domains.setdefault(one.domain, []).append(one)
    return [one for nodes in domains.values() for one in nodes]


def _survivors(chosen: Sequence[Candidate], previous: Mapping[NodeId, GroupRank]) -> dict[int, NodeId]:
    """Who had which group rank; the first in infra order if two claim one."""
    found: dict[int, NodeId] = {}
    for one in chosen:
        rank = previous.get(one.node_id)
        if rank is not None:
            found.setdefault(rank, one.node_id)
    return found


def _fill(ranks: Sequence[int], nodes: Sequence[Candidate], stays: Mapping[int, NodeId]) -> tuple[NodeId, ...]:
    """Nodes for ascending ranks: those that stay, and the others in infra order between them."""
    seated = {rank: stays[rank] for rank in ranks if rank in stays}
    if len(seated) == len(ranks):
        return tuple(seated.values())
    at_rest = set(seated.values())
    others = iter([one.node_id for one in nodes if one.node_id not in at_rest])
    return tuple(seated[rank] if rank in seated else next(others) for rank in ranks)


def _seat_segments(
    in_domains: Sequence[Candidate], segment_size: int, survivors: Mapping[int, NodeId]
) -> tuple[NodeId, ...]:
    """Give each slot to a domain so that as many survivors as possible keep their group rank.

    A slot's survivors may stay, all of them, if and only if the slot stays with their domain. The world before had
    whole segments, so all survivors of a slot are of one domain; then domains do not compete for slots, and each
    keeps those of its slots in which most survivors sit, as many as it still has segments: no other assignment moves
    fewer.
    """
    domains: dict[DomainId | None, list[Candidate]] = {}
    for one in in_domains:
        domains.setdefault(one.domain, []).append(one)
    domain_of = {one.node_id: one.domain for one in in_domains}
    stays: dict[DomainId | None, dict[int, NodeId]] = {domain: {} for domain in domains}
    for rank, node_id in survivors.items():
        stays[domain_of[node_id]][rank] = node_id
    kept = _keep_slots(domains, segment_size, stays)
    seated: dict[int, NodeId] = {}
    for domain, nodes in domains.items():
        slots = kept.owned[domain]
        slots += [kept.free.pop() for _ in range(len(nodes) // segment_size - len(slots))]
        ranks = [slot * segment_size + offset for slot in sorted(slots) for offset in range(segment_size)]
        seated.update(zip(ranks, _fill(ranks, nodes, stays[domain]), strict=True))
    return tuple(seated[rank] for rank in range(len(in_domains)))


def _keep_slots(
    domains: Mapping[DomainId | None, Sequence[Candidate]],
    segment_size: int,
    stays: Mapping[DomainId | None, Mapping[int, NodeId]],
) -> _Kept:
    found: list[_Slot] = []
    for domain, ranks in stays.items():
        counts = Counter([rank // segment_size for rank in ranks])
        found += [_Slot(number, domain, count) for number, count in counts.items()]
    free = dict.fromkeys(range(sum(map(len, domains.values())) // segment_size))
    owned: dict[DomainId | None, list[int]] = {domain: [] for domain in domains}
    for slot in sorted(found, key=lambda one: (-one.stay, one.number, str(one.domain))):
        mine = owned[slot.domain]
        if slot.number in free and len(mine) < len(domains[slot.domain]) // segment_size:
            mine.append(slot.number)
            del free[slot.number]
    return _Kept(owned, sorted(free, reverse=True))
