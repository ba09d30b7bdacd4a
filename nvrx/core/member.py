"""A node as a member of its run, and how many members could train. Knows no cycle and decides nothing."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from .facts import NodeInfo
from .shape import Shape


class Membership(enum.Enum):
    """Whether a node belongs to the run."""

    MEMBER = "MEMBER"
    LEFT = "LEFT"
    LOST = "LOST"


@dataclass(frozen=True)
class Member:
    """A node that joined, with what it said of itself; kept after it left or was lost."""

    info: NodeInfo
    joined_at: float
    membership: Membership = Membership.MEMBER
    gone_at: float | None = None
    gone_reason: str = ""

    @property
    def is_live(self) -> bool:
        return self.membership is Membership.MEMBER


def trainable(members: Iterable[Member], shape: Shape) -> int:
    """How many members could train together at most: those of whole groups, in whole segments of each domain."""
    live = [one.info for one in members if one.is_live]
    if shape.replacement_group_size > 1:
        sizes = Counter(one.replacement_group_id for one in live if one.replacement_group_id is not None)
        whole = {group for group, size in sizes.items() if size >= shape.replacement_group_size}
        live = [one for one in live if one.replacement_group_id in whole]
    if shape.segment_size is None:
        return len(live)
    domains = Counter(one.domain_id for one in live if one.domain_id is not None)
    return sum(size - size % shape.segment_size for size in domains.values())
