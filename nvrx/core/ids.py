"""The names and numbers of nvrx, each with a type of its own so that none is taken for another.

Knows nothing of the rest.
"""

from __future__ import annotations

from typing import NewType

RunId = NewType("RunId", str)
"""One training job across all its restarts."""
NodeId = NewType("NodeId", str)
Incarnation = NewType("Incarnation", str)
"""One life of an agent process on a node."""
JournalId = NewType("JournalId", str)
GroupId = NewType("GroupId", str)
"""A replacement group: nodes that the scheduler allocates together."""
DomainId = NewType("DomainId", str)
"""NVLink locality."""

CycleNumber = NewType("CycleNumber", int)
"""One attempt to train, numbered from 0."""
Revision = NewType("Revision", int)
"""A place in a run's journal, numbered from 1; 0 is before the first fact."""
InfraRank = NewType("InfraRank", int)
"""Stable physical order of a node."""
ArrayRank = NewType("ArrayRank", int)
"""Order by array task and process id alone."""
GroupRank = NewType("GroupRank", int)
"""A node's place in a cycle's world (torch's GROUP_RANK)."""
LocalRank = NewType("LocalRank", int)
"""A worker's place on its node."""
GlobalRank = NewType("GlobalRank", int)
"""A worker's place in the world (torch's RANK)."""

MAX_ID_LENGTH = 128


def first_rank(group_rank: GroupRank, workers_per_node: int) -> GlobalRank:
    """Global rank of a node's first worker."""
    return GlobalRank(group_rank * workers_per_node)


def global_rank(group_rank: GroupRank, local_rank: LocalRank, workers_per_node: int) -> GlobalRank:
    """Global rank of a worker (rule C6)."""
    return GlobalRank(group_rank * workers_per_node + local_rank)


def name_problem(what: str, text: str) -> str | None:
    """Why `text` cannot name a run, node, group or domain (rule B1), in one line; None if it can."""
    if not text:
        return f"{what} is empty"
    if len(text) > MAX_ID_LENGTH:
        return f"{what} has {len(text)} characters, at most {MAX_ID_LENGTH} are allowed: {text[:32]!a}..."
    if not all("!" <= character <= "~" or character == " " for character in text):
        return f"{what} {text!a} has characters that are not printable ASCII"
    if text != text.strip():
        return f"{what} {text!a} begins or ends with a blank"
    if "/" in text:
        return f"{what} {text!a} has a '/'"
    if text in {".", ".."}:
        return f"{what} {text!a} would name a directory"
    return None
