"""What `nvrx-coord plan` reads: a shape, and nodes with what their agents would see. YAML or JSON, read as text.

Checks the form only; what a run would refuse is said by the rules. Raises Failed with one line and exit code 2.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nvrx.commandline import EXIT_USAGE, Failed
from nvrx.core.ids import GroupRank, NodeId
from nvrx.core.parallel import ParallelSizes
from nvrx.core.shape import MAX_NODES, NodeCounts, RankPolicy, parse_nnodes

MAX_FILE_BYTES = 64 * 1024 * 1024
_SIZES = [one.name for one in dataclasses.fields(ParallelSizes)]
_SHAPE_KEYS = ["nnodes", "nproc_per_node", "segment_size", "replacement_group_size", "rank_policy", *_SIZES]
_NODE_KEYS = ["node_id", "env", "domain_id", "replacement_group_id", "previous_group_rank", "state"]
_SHOWN = 64


class NodeState(enum.Enum):
    """How a node of the file is."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"
    LOST = "lost"
    DRAINING = "draining"


@dataclass(frozen=True)
class PlannedNode:
    """A node of the file. `env`: what its agent would see."""

    node_id: NodeId
    env: Mapping[str, str] = field(default_factory=dict)
    domain_id: str = ""
    replacement_group_id: str = ""
    previous_group_rank: GroupRank | None = None
    state: NodeState = NodeState.HEALTHY


@dataclass(frozen=True)
class PlannedShape:
    """The options that all agents would be given."""

    nnodes: NodeCounts
    nproc_per_node: int = 1
    segment_size: int | None = None
    replacement_group_size: int | None = None
    rank_policy: RankPolicy = RankPolicy.INFRA
    parallel: ParallelSizes = ParallelSizes()


@dataclass(frozen=True)
class PlanFile:
    """All that a file says."""

    shape: PlannedShape
    nodes: tuple[PlannedNode, ...]


def _texts(base: type[Any]) -> type[Any]:
    """A safe YAML loader that leaves every value as it is written.

    YAML takes 6:8 for 368, 010 for 8, 1.10 for 1.1 and `no` for false; to an agent they are texts.
    """

    class Texts(base):  # type: ignore[misc]
        yaml_implicit_resolvers = {  # noqa: RUF012
            "<": [("tag:yaml.org,2002:merge", re.compile(r"<<$"))],
            "~": [("tag:yaml.org,2002:null", re.compile(r"~$"))],
            "n": [("tag:yaml.org,2002:null", re.compile(r"null$"))],
            "": [("tag:yaml.org,2002:null", re.compile(r"$"))],
        }

    for kind in ("int", "float", "bool", "timestamp", "binary"):
        Texts.add_constructor(f"tag:yaml.org,2002:{kind}", Texts.construct_scalar)
    return Texts


# libyaml's parser is ten times as fast, where PyYAML was built with it.
_LOADER = _texts(getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def read_plan(path: Path, nnodes: NodeCounts | None, lose: tuple[str, ...]) -> PlanFile:
    """The file at `path`; `nnodes` goes before what it says, and the nodes in `lose` are lost."""
    with _Named(path):
        whole = _mapping(_parse(_read(path)), "the file", ["shape", "nodes"])
        shape = _shape(_mapping(whole.get("shape"), "shape", _SHAPE_KEYS), nnodes)
        listed = whole.get("nodes")
        if not isinstance(listed, list):
            raise _Wrong("nodes is missing, or no list; give '- node_id: n0' for each node")
        if len(listed) > MAX_NODES:
            raise _Wrong(f"{len(listed)} nodes; at most {MAX_NODES} are possible")
        nodes = tuple(_node(one, number) for number, one in enumerate(listed, 1))
        _require_own_ranks(nodes)
    unknown = [one for one in lose if one not in {node.node_id for node in nodes}]
    if unknown:
        raise Failed(f"--lose {unknown[0]}: {path} has no such node", EXIT_USAGE)
    lost = set(lose)
    return PlanFile(
        shape,
        tuple(dataclasses.replace(one, state=NodeState.LOST) if one.node_id in lost else one for one in nodes),
    )


class _Wrong(Exception):
    """What is wrong in the file, in one line."""


class _Named:
    """Puts the file's name before what is wrong in it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _Wrong):
            raise Failed(f"{self._path}: {error}", EXIT_USAGE) from error


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            found = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _Wrong(f"cannot be read: {error.strerror}") from error
    if len(found) > MAX_FILE_BYTES:
        raise _Wrong(f"is larger than {MAX_FILE_BYTES // 1024**2} MiB")
    try:
        return found.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _Wrong(f"is no UTF-8 text: {error.reason} at byte {error.start}") from error


def _parse(text: str) -> Any:
    try:
        return json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        pass  # not JSON; YAML says what is wrong with it
    try:
        return yaml.load(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise _Wrong(f"is neither YAML nor JSON: {error.problem or error.context}{where}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise _Wrong(f"is neither YAML nor JSON: {str(error) or type(error).__name__}") from error


def _mapping(value: Any, what: str, known: list[str]) -> dict[str, Any]:
    """A mapping with known keys; `-` in a key is as good as `_`."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _Wrong(f"{what} is no mapping; possible in it are {', '.join(known)}")
    found = {str(name).replace("-", "_"): one for name, one in value.items()}
    for name in found:
        if name not in known:
            raise _Wrong(f"{what} has an unknown key {name[:_SHOWN]!a}; possible are {', '.join(known)}")
    return found


def _text(value: Any, what: str) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list | bytes | set):
        raise _Wrong(f"{what} is no text")
    return str(value)


def _integer(value: Any, what: str) -> int | None:
    text = _text(value, what).strip()
    if not text:
        return None
    if re.fullmatch(r"-?[0-9]{1,9}", text) is None:
        raise _Wrong(f"{what} is {text[:_SHOWN]!a}, which is no whole number of at most nine digits")
    return int(text)


def _shape(given: Mapping[str, Any], nnodes: NodeCounts | None) -> PlannedShape:
    numbers = {
        name: number
        for name in ("nproc_per_node", "segment_size", "replacement_group_size")
        if (number := _integer(given.get(name), f"shape.{name}")) is not None
    }
    sizes = {name: number for name in _SIZES if (number := _integer(given.get(name), f"shape.{name}")) is not None}
    policy = _text(given.get("rank_policy"), "shape.rank_policy").strip() or RankPolicy.INFRA.value
    if policy.upper() not in RankPolicy.__members__:
        raise _Wrong(f"shape.rank_policy is {policy[:_SHOWN]!a}; infra or sticky is possible")
    return PlannedShape(
        nnodes=nnodes or _nnodes(_text(given.get("nnodes"), "shape.nnodes").strip()),
        rank_policy=RankPolicy[policy.upper()],
        parallel=ParallelSizes(**sizes),
        **numbers,
    )


def _nnodes(text: str) -> NodeCounts:
    if not text:
        raise _Wrong("shape.nnodes is missing; give MIN:MAX there or by --nnodes")
    try:
        return parse_nnodes(text)
    except ValueError as error:
        raise _Wrong(f"shape.nnodes {error}") from error


def _node(value: Any, number: int) -> PlannedNode:
    name = _text(value.get("node_id", value.get("node-id")), f"node_id of node {number}") if _is_map(value) else ""
    what = f"node {name[:_SHOWN]}" if name else f"node {number}"
    given = _mapping(value, what, _NODE_KEYS)
    if not name:
        raise _Wrong(f"{what} has no node_id")
    env = given.get("env")
    if env is not None and not _is_map(env):
        raise _Wrong(f"{what}: env is no mapping of variables to values")
    rank = _integer(given.get("previous_group_rank"), f"{what}: previous_group_rank")
    if rank is not None and rank < 0:
        raise _Wrong(f"{what}: previous_group_rank is {rank}; a whole number from 0 up is possible")
    state = _text(given.get("state"), f"{what}: state").strip() or NodeState.HEALTHY.value
    states = [one.value for one in NodeState]
    if state not in states:
        raise _Wrong(f"{what}: state is {state[:_SHOWN]!a}; possible are {', '.join(states)}")
    return PlannedNode(
        node_id=NodeId(name),
        env={str(key): _text(text, f"{what}: {str(key)[:_SHOWN]} in env") for key, text in (env or {}).items()},
        domain_id=_text(given.get("domain_id"), f"{what}: domain_id"),
        replacement_group_id=_text(given.get("replacement_group_id"), f"{what}: replacement_group_id"),
        previous_group_rank=GroupRank(rank) if rank is not None else None,
        state=NodeState(state),
    )


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def _require_own_ranks(nodes: tuple[PlannedNode, ...]) -> None:
    had: dict[GroupRank, NodeId] = {}
    for one in nodes:
        rank = one.previous_group_rank
        if rank is not None and had.setdefault(rank, one.node_id) != one.node_id:
            raise _Wrong(f"nodes {had[rank]} and {one.node_id} both have previous_group_rank {rank}")
