"""What people and schedulers write: ids, nnodes, endpoints, order variables (A5, B1, B3, B5; C127, C128)."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx.core.endpoint import HostPort, is_loopback, parse_endpoint
from nvrx.core.ids import MAX_ID_LENGTH, NodeId, name_problem
from nvrx.core.shape import MAX_NODES, NodeCounts, parse_nnodes
from nvrx.core.topology import (
    BadVariable,
    OrderSource,
    array_rank,
    natural_key,
    order_key,
    order_sources,
    settle_source,
    switch,
)

HUGE = "9" * 200


@pytest.mark.rule("B1")
@pytest.mark.parametrize("text", ["n", "node-17.rack_3", "a b", "~!", "x" * MAX_ID_LENGTH, "...", "%2F"])
def test_names(text: str) -> None:
    assert name_problem("node id", text) is None


@pytest.mark.rule("B1")
@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "is empty"),
        ("x" * (MAX_ID_LENGTH + 1), "129 characters, at most 128"),
        ("a/b", "has a '/'"),
        ("/", "has a '/'"),
        ("ä", r"'\xe4'"),
        ("a\tb", "printable ASCII"),
        ("a\n", "printable ASCII"),
        ("\x7f", "printable ASCII"),
        ("\ud800", "printable ASCII"),
        (".", "would name a directory"),
        ("..", "would name a directory"),
    ],
)
def test_what_cannot_be_a_name(text: str, part: str) -> None:
    problem = name_problem("node id", text)
    assert problem is not None
    assert problem.startswith("node id ")
    assert part in problem
    assert problem.isascii()
    assert problem.isprintable()


@pytest.mark.rule("A5")
@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("4", NodeCounts(4, 4)),
        ("2:2", NodeCounts(2, 2)),
        ("6:8", NodeCounts(6, 8)),
        ("1:100000", NodeCounts(1, MAX_NODES)),
        ("06:08", NodeCounts(6, 8)),
    ],
)
def test_nnodes(text: str, counts: NodeCounts) -> None:
    assert parse_nnodes(text) == counts


@pytest.mark.rule("A5")
@pytest.mark.parametrize(
    "text",
    ["8:6", "0:2", "-1:2", "a:b", "1:2:3", ":4", "4:", "", "0", "4:0", "1:100001", " 4", "4\n", "+4", "1.5", "²", "٣"],
)
def test_nnodes_that_are_none(text: str) -> None:
    """Field case C127: the message shows the value."""
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_nnodes(text)


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("[::1]:5000", HostPort("::1", 5000)),
        ("host:0", HostPort("host", 0)),
        ("host.example:65535", HostPort("host.example", 65535)),
        ("10.0.0.1:80", HostPort("10.0.0.1", 80)),
        ("[fe80::1%eth0]:7700", HostPort("fe80::1%eth0", 7700)),
    ],
)
def test_endpoints(text: str, endpoint: HostPort) -> None:
    assert parse_endpoint(text) == endpoint
    assert str(endpoint) == text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("host", "has no port"),
        ("host:", "has no port"),
        (":5000", "no usable host"),
        ("host:99999", "'99999'"),
        ("host:65536", "'65536'"),
        ("host:abc", "'abc'"),
        ("host:-1", "'-1'"),
        ("host:5 ", "'5 '"),
        ("host:\u0663", "port"),
        ("http://host:5000", "is a URL"),
        ("::1:5000", "[::1]:5000"),
        ("[::1]", "has no port"),
        ("[::1]:", "has no port"),
        ("[zz]:5", "no usable host"),
        ("", "no usable host"),
        ("ho st:5", "no usable host"),
        ("host:5\n", "port"),
    ],
)
def test_endpoints_that_are_none(text: str, part: str) -> None:
    """Field case C128."""
    with pytest.raises(ValueError, match=r"^.+$") as caught:
        parse_endpoint(text)
    assert ascii(text) in str(caught.value)
    assert part in str(caught.value)


@pytest.mark.rule("A4")
def test_loopback_by_spelling() -> None:
    assert all(map(is_loopback, ["localhost", "LocalHost", "127.0.0.1", "127.1.2.3", "::1"]))
    assert not any(map(is_loopback, ["127.0.0.1.example", "128.0.0.1", "host", "0.0.0.0", "::"]))


ALL = {
    "NVRX_INFRA_RANK_FROM_NODENAME": "1",
    "SLURMD_NODENAME": "node7",
    "CROSS_SLURM_PROCID": "3",
    "SLURM_TOPOLOGY_ADDR": "block1.node7",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "block.node",
    "SLURM_PROCID": "5",
    "GROUP_RANK": "6",
    "SLURM_JOB_ID": "1",
}
PRECEDENCE = [
    (OrderSource.NODENAME, "node7", "NVRX_INFRA_RANK_FROM_NODENAME"),
    (OrderSource.CROSS, "3", "CROSS_SLURM_PROCID"),
    (OrderSource.TOPOLOGY, "block1.node7", "SLURM_TOPOLOGY_ADDR"),
    (OrderSource.PROCID, "5", "SLURM_PROCID"),
    (OrderSource.GROUP_RANK, "6", "GROUP_RANK"),
    (OrderSource.NODE_ID, "me", "nothing"),
]


def sources(env: dict[str, str]) -> dict[OrderSource, str]:
    return order_sources(env, "host", NodeId("me"))


@pytest.mark.rule("B3")
@pytest.mark.parametrize("taken_away", range(6))
def test_precedence(taken_away: int) -> None:
    env = {name: text for name, text in ALL.items() if name != "SLURM_JOB_ID" or taken_away < 4}
    for _, _, name in PRECEDENCE[:taken_away]:
        del env[name]
    found = sources(env)
    source, text, _ = PRECEDENCE[taken_away]
    assert settle_source([found]) is source
    assert found[source] == text
    assert found == {one: value for one, value, _ in PRECEDENCE[taken_away:]}, "every source that it has is sent"


@pytest.mark.rule("B3")
def test_the_source_is_one_that_all_have() -> None:
    both = {OrderSource.CROSS: "1", OrderSource.PROCID: "1", OrderSource.NODE_ID: "a"}
    one = {OrderSource.PROCID: "0", OrderSource.NODE_ID: "b"}
    assert settle_source([both, both]) is OrderSource.CROSS
    assert settle_source([both, one]) is OrderSource.PROCID
    assert settle_source([both, {OrderSource.NODE_ID: "c"}]) is OrderSource.NODE_ID


@pytest.mark.rule("B3")
def test_the_node_name_is_slurms_or_the_hosts_never_the_node_id() -> None:
    assert sources({"NVRX_INFRA_RANK_FROM_NODENAME": "yes"})[OrderSource.NODENAME] == "host"
    assert OrderSource.NODENAME not in sources({"SLURMD_NODENAME": "node7"})


@pytest.mark.rule("B3")
@pytest.mark.parametrize("text", ["1", "true", "YES", "On", " 1 "])
def test_switched_on(text: str) -> None:
    assert switch({"X": text}, "X")


@pytest.mark.rule("B3")
@pytest.mark.parametrize("text", ["", "0", "False", "no", "OFF"])
def test_switched_off(text: str) -> None:
    assert not switch({"X": text}, "X")
    assert not switch({}, "X")


@pytest.mark.rule("B3")
@pytest.mark.parametrize("pattern", ["block.node", "BLOCK.NODE", "Block.Node"])
def test_topology_counts_with_its_pattern(pattern: str) -> None:
    env = {"SLURM_TOPOLOGY_ADDR": "b1.n2", "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert sources(env)[OrderSource.TOPOLOGY] == "b1.n2"


@pytest.mark.rule("B3")
@pytest.mark.parametrize("pattern", ["", "switch.node", "switch.switch.node", "block", "block.node.x", "node"])
def test_any_other_topology_is_ignored(pattern: str) -> None:
    env = {"SLURM_TOPOLOGY_ADDR": "b1.n2", "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert OrderSource.TOPOLOGY not in sources(env)


@pytest.mark.rule("B3", "B5")
@pytest.mark.parametrize(
    ("env", "rank"),
    [
        ({}, None),
        ({"SLURM_PROCID": "3"}, 3),
        ({"SLURM_PROCID": " 3 "}, 3),
        ({"SLURM_PROCID": "007"}, 7),
        ({"SLURM_PROCID": HUGE}, int(HUGE)),
        ({"SLURM_PROCID": "1", "SLURM_ARRAY_TASK_ID": "4", "SLURM_NNODES": "2"}, 9),
        ({"SLURM_PROCID": "1", "SLURM_ARRAY_TASK_ID": "4", "SLURM_JOB_NUM_NODES": "3"}, 13),
        ({"SLURM_PROCID": "1", "SLURM_ARRAY_TASK_ID": "4", "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "3"}, 9),
        ({"SLURM_PROCID": "0", "SLURM_ARRAY_TASK_ID": "0", "SLURM_NNODES": "1"}, 0),
        ({"SLURM_ARRAY_TASK_ID": "4"}, None),
    ],
)
def test_array_rank(env: dict[str, str], rank: int | None) -> None:
    assert array_rank(env) == rank


@pytest.mark.rule("B3")
@pytest.mark.parametrize(
    ("env", "parts"),
    [
        ({"NVRX_INFRA_RANK_FROM_NODENAME": "maybe"}, ["NVRX_INFRA_RANK_FROM_NODENAME", "'maybe'"]),
        ({"CROSS_SLURM_PROCID": "x"}, ["CROSS_SLURM_PROCID", "'x'"]),
        ({"SLURM_PROCID": "-1"}, ["SLURM_PROCID", "'-1'"]),
        ({"SLURM_PROCID": "1.5"}, ["SLURM_PROCID", "'1.5'"]),
        ({"SLURM_PROCID": "9" * 257}, ["SLURM_PROCID"]),
        ({"GROUP_RANK": "two"}, ["GROUP_RANK", "'two'"]),
        ({"SLURM_PROCID": "0", "SLURM_ARRAY_TASK_ID": "1"}, ["SLURM_NNODES", "SLURM_JOB_NUM_NODES"]),
        ({"SLURM_PROCID": "0", "SLURM_ARRAY_TASK_ID": "a", "SLURM_NNODES": "1"}, ["SLURM_ARRAY_TASK_ID", "'a'"]),
        ({"SLURM_PROCID": "0", "SLURM_ARRAY_TASK_ID": "1", "SLURM_NNODES": "two"}, ["SLURM_NNODES", "'two'"]),
        ({"SLURM_JOB_ID": "17"}, ["SLURM_JOB_ID=17", "SLURM_PROCID", "srun"]),
        ({"SLURM_JOB_ID": "17", "GROUP_RANK": "0"}, ["SLURM_PROCID", "srun"]),
    ],
)
def test_unusable_variables_are_named(env: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(BadVariable) as caught:
        sources(env)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.rule("A0")
def test_an_empty_job_id_is_none() -> None:
    assert sources({"SLURM_JOB_ID": ""}) == {OrderSource.NODE_ID: "me"}


@pytest.mark.rule("B3")
@pytest.mark.parametrize(
    ("source", "in_order"),
    [
        (OrderSource.NODENAME, ["a", "b1", "b2", "b10", "b010x", "b11", "node", "node-1", "z"]),
        (OrderSource.NODENAME, ["r1n9", "r1n10", "r2n1", "r10n1"]),
        (OrderSource.NODENAME, [f"n{HUGE}", f"n{HUGE}0"]),
        (OrderSource.NODENAME, ["7", "n7"]),
        (OrderSource.NODENAME, ["n01", "n1"]),
        (OrderSource.TOPOLOGY, ["b2.n9", "b2.n10", "b10.n1", "b10.n1.x"]),
        (OrderSource.PROCID, ["0", "9", "10", HUGE]),
        (OrderSource.NODE_ID, ["node-a", "node-b", "node-c"]),
    ],
)
def test_order(source: OrderSource, in_order: list[str]) -> None:
    shuffled = in_order[1::2] + in_order[::2]
    assert sorted(shuffled, key=lambda text: order_key(source, text, NodeId("x"))) == in_order


@pytest.mark.rule("B3", "B4")
def test_a_node_without_the_source_comes_last() -> None:
    keys = [
        order_key(OrderSource.PROCID, HUGE, NodeId("z")),
        order_key(OrderSource.PROCID, None, NodeId("n2")),
        order_key(OrderSource.PROCID, None, NodeId("n10")),
    ]
    assert keys == sorted(keys)


@pytest.mark.rule("B3")
@given(st.text(), st.text())
def test_two_different_names_never_tie(one: str, other: str) -> None:
    assert (natural_key(one) == natural_key(other)) == (one == other)
    assert (natural_key(one) < natural_key(other)) != (natural_key(one) >= natural_key(other))


@pytest.mark.rule("B3")
@given(st.integers(0, 10**30), st.integers(0, 10**30), st.integers(0, 3))
def test_numbers_in_names_compare_as_numbers(one: int, other: int, zeros: int) -> None:
    if one < other:
        assert natural_key(f"n{'0' * zeros}{one}x") < natural_key(f"n{other}x")
