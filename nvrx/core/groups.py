"""Replacement groups among the members of a run (rules A5, B6): who belongs together, who is one too many.

Reads a Run and decides nothing; Join asks it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .facts import NodeInfo
from .member import Member
from .refused import Reason, Refused
from .run import Run


def sisters(run: Run, node: NodeInfo) -> list[Member]:
    """The other live members of a node's group, in order of their ids; none where there are no groups."""
    if node.replacement_group_id is None or run.shape.replacement_group_size == 1:
        return []
    found = (
        one
        for one in run.live_members()
        if one.info.replacement_group_id == node.replacement_group_id and one.info.node_id != node.node_id
    )
    return sorted(found, key=lambda one: one.info.node_id)


def replaced_by(run: Run, newcomer: NodeInfo) -> list[Member]:
    """B6: the members of a unit that Slurm started again, of which the newcomer is the first or a later part."""
    return [one for one in sisters(run, newcomer) if _is_older(one.info, newcomer)]


def _is_older(one: NodeInfo, newcomer: NodeInfo) -> bool:
    return one.group_array_job_id == newcomer.group_array_job_id and one.restart_count < newcomer.restart_count


def require_own_group(run: Run, newcomer: NodeInfo) -> None:
    """B6: a unit is of one array, and has no more members than the size of a group. Raises Refused."""
    others = [one for one in sisters(run, newcomer) if not _is_older(one.info, newcomer)]
    group, size = newcomer.replacement_group_id, run.shape.replacement_group_size
    for one in others:
        if one.info.group_array_job_id != newcomer.group_array_job_id:
            raise _conflict(
                newcomer,
                one,
                f"replacement group {group} is {_array(one.info)} with node {one.info.node_id}; node "
                f"{newcomer.node_id} is {_array(newcomer)}; give one array per run, or each unit a name of its own "
                "(NVRX_REPLACEMENT_GROUP_ID)",
            )
        if one.info.restart_count > newcomer.restart_count:
            raise _conflict(
                newcomer,
                one,
                f"replacement group {group} was started again (restart {one.info.restart_count} on node "
                f"{one.info.node_id}); node {newcomer.node_id} is of restart {newcomer.restart_count}",
            )
    if len(others) >= size:
        names = ", ".join(one.info.node_id for one in others)
        raise _conflict(
            newcomer,
            others[0],
            f"replacement group {group} has its {size} nodes ({names}); {newcomer.node_id} would be one more; "
            "correct --replacement-group-size or the group's id",
        )


def _array(node: NodeInfo) -> str:
    return f"of array job {node.group_array_job_id}" if node.group_array_job_id else "given by name"


def _conflict(newcomer: NodeInfo, other: Member, message: str) -> Refused:
    return Refused(
        Reason.GROUP_CONFLICT,
        message,
        {
            "node_id": newcomer.node_id,
            "other_node_id": other.info.node_id,
            "replacement_group_id": str(newcomer.replacement_group_id),
        },
    )


def counted(run: Run) -> Iterator[Member]:
    """A5: the live members that count against MAX: those of whole groups, and of groups that are still filling.

    Who is not to be chosen never keeps a replacement out: what is left of a broken unit, who has no group where there
    are groups, who was drained, who is in quarantine, and who is unhealthy.
    """
    excluded = run.drained | run.quarantined.keys() | run.unhealthy.keys()
    if run.shape.replacement_group_size == 1:
        yield from (one for one in run.live_members() if one.info.node_id not in excluded)
        return
    size_of: dict[str, int] = {}
    broken: set[str] = set()
    for member in run.members.values():
        group = member.info.replacement_group_id
        if group is None:
            continue
        # One in quarantine may yet be chosen, and its sisters with it.
        if member.is_live and member.info.node_id not in run.unhealthy and member.info.node_id not in run.drained:
            size_of[group] = size_of.get(group, 0) + 1
        else:
            broken.add(group)
    for member in run.live_members():
        group = member.info.replacement_group_id
        if member.info.node_id in excluded or group is None:
            continue
        if group not in broken or size_of[group] >= run.shape.replacement_group_size:
            yield member


def places_taken(run: Run) -> int:
    """How many of MAX are taken, with those that groups which still fill will need.

    Else of more units than there is room for, which all start at once, each could get its first node in and wait for
    ever for the others, who find the run full.
    """
    there = list(counted(run))
    size = run.shape.replacement_group_size
    if size == 1:
        return len(there)
    members = Counter(one.info.replacement_group_id for one in run.live_members())
    groups = {one.info.replacement_group_id for one in there}
    return len(there) + sum(max(0, size - members[one]) for one in groups)
