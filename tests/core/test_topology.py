"""Where a node stands: order sources and array rank, from variables as clusters set them (A0, B3, B5)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest

from nvrx.core.ids import NodeId
from nvrx.core.topology import (
    BadVariable,
    OrderSource,
    array_rank,
    natural_key,
    order_key,
    order_sources,
    settle_source,
)

Env = Mapping[str, str]
BLOCK = "block.node"


def order_of(nodes: Mapping[str, Env]) -> list[str]:
    """The names in infra order; the same for every order of joining."""
    told = {name: order_sources(env, name, NodeId(name)) for name, env in nodes.items()}
    found = set()
    for joining in itertools.islice(itertools.permutations(nodes), 24):
        source = settle_source([told[one] for one in joining])
        in_order = sorted(joining, key=lambda one: order_key(source, told[one].get(source), NodeId(one)))
        keys = [order_key(source, told[one].get(source), NodeId(one)) for one in in_order]
        assert len(set(keys)) == len(keys), "no two tie"
        found.add(tuple(in_order))
    (order,) = found
    return list(order)


def source_of(env: Env) -> OrderSource:
    return settle_source([order_sources(env, "host", NodeId("host"))])


def block(address: str, pattern: str = BLOCK, **more: str) -> dict[str, str]:
    return {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern, **more}


@pytest.mark.rule("B3", "B5")
def test_ranks_are_unique_over_a_whole_array() -> None:
    """C001: 3 tasks of 4 nodes, each with its own SLURM_PROCID from 0."""
    envs = {
        f"n{task}-{procid}": {
            "SLURM_ARRAY_JOB_ID": "7001",
            "SLURM_ARRAY_TASK_ID": str(task),
            "SLURM_NNODES": "4",
            "SLURM_PROCID": str(procid),
        }
        for task in range(3)
        for procid in range(4)
    }
    assert [array_rank(env) for env in envs.values()] == list(range(12))
    assert order_of(dict(reversed(envs.items()))) == list(envs)
    told = order_sources(envs["n2-3"], "h", NodeId("h"))
    assert told[OrderSource.PROCID] == "11"


@pytest.mark.rule("B3", "B5")
def test_an_array_with_holes() -> None:
    """C002: `--array=1,3,5,7`; an infra rank is no group rank, and nothing demands a rank 0."""
    envs = {
        f"n{task}": {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_NNODES": "1", "SLURM_PROCID": "0"}
        for task in (1, 3, 5, 7)
    }
    assert [array_rank(env) for env in envs.values()] == [1, 3, 5, 7]
    assert order_of(envs) == ["n1", "n3", "n5", "n7"]


@pytest.mark.rule("B3")
@pytest.mark.parametrize(
    "in_order",
    [
        pytest.param(["block1.node33", "block2.node9", "block2.node10", "block10.node1"], id="C003 numbers"),
        pytest.param(
            ["block001.node008", "block001.node010", "block002.node1", "block002.node009"], id="C004 leading zeros"
        ),
        pytest.param(["rackA.n1", "rackA.n2", "rackB.n1", "rackB.n2"], id="C006 no digit in the block"),
        pytest.param(["block002.alpha", "block002.beta", "block010.alpha"], id="C006 no digit in the node"),
        pytest.param(["b02.node07", "b2.node07", "b2.node7"], id="C004 written in two ways, yet two nodes"),
        pytest.param(["b1.n1.cluster.local", "b1.n2.cluster.local"], id="the block ends at the first dot"),
        pytest.param(["b1.n99999999999999999998", "b1.n99999999999999999999"], id="more digits than a word has"),
    ],
)
def test_blocks_and_nodes_are_in_natural_order(in_order: list[str]) -> None:
    """The process ids say the reverse, and are not used."""
    envs = {one: block(one, SLURM_PROCID=str(-rank + 9)) for rank, one in enumerate(in_order)}
    assert order_of(dict(reversed(envs.items()))) == in_order


TOPOLOGIES = [
    ("block1.node3", BLOCK),
    ("b2.node07", BLOCK),
    ("block001.srv1103", BLOCK),
    ("rack1.c07", "Block.Node"),
    ("block002.beta", "BLOCK.NODE"),
    ("gpu1", "node"),
    ("login.localdomain", "node"),
    ("c4-n10", "node"),
    ("s0.s5.c3005", "switch.switch.node"),
    ("fab04.fab04-isw-16.fab04-16n05", "switch.switch.node"),
    ("root.ibsw-h200.25a-gpn026", "switch.switch.node"),
    ("ibcore[1-4].ib8.n177", "switch.switch.node"),
    ("core[06,14-15,07,11].leaf13.cn-0256", "switch.switch.node"),
    ("a2_zone1.w2115", "switch.node"),
    ("top.mid.leaf4.n0417", "switch.switch.switch.node"),
    (".leaf2.n05", "switch.switch.node"),
    ("ring1:3.n7", "ring:position.node"),
    ("t0:1:0:2.n44", "torus:x:y:z.node"),
    ("", ""),
    ("", BLOCK),
    ("block1", BLOCK),
    ("block1.n1", ""),
]


@pytest.mark.rule("B3")
@pytest.mark.parametrize(("address", "pattern"), TOPOLOGIES)
def test_only_a_block_is_a_topology(address: str, pattern: str) -> None:
    """C008, C009, C010: switches, brackets, empty levels, rings and tori fall through to SLURM_PROCID."""
    is_block = pattern.lower() == BLOCK and "." in address
    env = block(address, pattern, SLURM_PROCID="0")
    assert source_of(env) is (OrderSource.TOPOLOGY if is_block else OrderSource.PROCID)


@pytest.mark.rule("B3")
def test_switches_do_not_order() -> None:
    """C008."""
    addresses = ["a2_zone1.w2115", "a2_zone1.w0007", "a1_zone9.w0003"]
    envs = {f"n{rank}": block(one, "switch.node", SLURM_PROCID=str(rank)) for rank, one in enumerate(addresses)}
    assert order_of(envs) == ["n0", "n1", "n2"]


@pytest.mark.rule("B3")
def test_some_nodes_in_a_block_and_some_not() -> None:
    """C011: one source for all, the first that all have."""
    envs = {one: block(one, SLURM_PROCID=str(rank)) for rank, one in enumerate(["block1.n1", "block1.n2", "block2.n3"])}
    envs["n9"] = block("n9", "node", SLURM_PROCID="3")
    assert order_of(envs) == ["block1.n1", "block1.n2", "block2.n3", "n9"]


@pytest.mark.rule("B3")
@pytest.mark.parametrize(
    "in_order",
    [["dgx-9", "dgx-10", "dgx-100"], ["node", "node-a"], ["n001", "n01", "n1"], ["gpu-a", "gpu-b"], ["n2", "n2-ib"]],
)
def test_names_are_in_natural_order(in_order: list[str]) -> None:
    """C013."""
    envs = {one: {"NVRX_INFRA_RANK_FROM_NODENAME": "1", "SLURMD_NODENAME": one} for one in in_order}
    assert order_of(dict(reversed(envs.items()))) == in_order
    by_host = {one: {"NVRX_INFRA_RANK_FROM_NODENAME": "1"} for one in in_order}
    assert order_of(by_host) == in_order


@pytest.mark.rule("B3")
def test_node_name_is_never_the_node_id() -> None:
    env = {"NVRX_INFRA_RANK_FROM_NODENAME": "1"}
    assert order_sources(env, "host", NodeId("given"))[OrderSource.NODENAME] == "host"
    env["SLURMD_NODENAME"] = "slurm"
    assert order_sources(env, "host", NodeId("given"))[OrderSource.NODENAME] == "slurm"


@pytest.mark.rule("B3")
def test_precedence_of_the_sources() -> None:
    """C014: every source orders the two nodes differently from the one before it; taken away from the top."""
    shared = {"NVRX_INFRA_RANK_FROM_NODENAME": "1"}
    envs = {
        "x": {**shared, "SLURMD_NODENAME": "n2", "CROSS_SLURM_PROCID": "0", **block("block2.n"), "SLURM_PROCID": "0"},
        "y": {**shared, "SLURMD_NODENAME": "n1", "CROSS_SLURM_PROCID": "1", **block("block1.n"), "SLURM_PROCID": "1"},
    }
    envs["x"]["GROUP_RANK"], envs["y"]["GROUP_RANK"] = "1", "0"
    seen = []
    for gone in (
        "",
        "NVRX_INFRA_RANK_FROM_NODENAME",
        "CROSS_SLURM_PROCID",
        "SLURM_TOPOLOGY_ADDR",
        "SLURM_PROCID",
        "GROUP_RANK",
    ):
        for env in envs.values():
            env.pop(gone, None)
        seen.append((source_of(envs["x"]), order_of(envs)))
    assert seen == [
        (OrderSource.NODENAME, ["y", "x"]),
        (OrderSource.CROSS, ["x", "y"]),
        (OrderSource.TOPOLOGY, ["y", "x"]),
        (OrderSource.PROCID, ["x", "y"]),
        (OrderSource.GROUP_RANK, ["y", "x"]),
        (OrderSource.NODE_ID, ["x", "y"]),
    ]


@pytest.mark.rule("B3")
@pytest.mark.parametrize("value", ["0", "false", "No", "OFF", "", " "])
def test_zero_and_nothing_switch_off(value: str) -> None:
    """C015: order by SLURM_PROCID, though the names say the reverse."""
    envs = {
        name: {"NVRX_INFRA_RANK_FROM_NODENAME": value, "SLURMD_NODENAME": name, "SLURM_PROCID": procid}
        for name, procid in (("n9", "0"), ("n1", "1"))
    }
    assert order_of(envs) == ["n9", "n1"]


@pytest.mark.rule("B3")
@pytest.mark.parametrize("value", ["1", "true", "YES", "On"])
def test_one_and_yes_switch_on(value: str) -> None:
    """C015."""
    assert source_of({"NVRX_INFRA_RANK_FROM_NODENAME": value, "SLURM_PROCID": "0"}) is OrderSource.NODENAME


@pytest.mark.rule("B3")
@pytest.mark.parametrize("value", ["2", "ja", "nodename", "-1"])
def test_any_other_switch_is_an_error(value: str) -> None:
    """C015."""
    with pytest.raises(BadVariable, match="NVRX_INFRA_RANK_FROM_NODENAME"):
        source_of({"NVRX_INFRA_RANK_FROM_NODENAME": value})


@pytest.mark.rule("B3")
def test_two_jobs_form_one_run() -> None:
    """C016: both number their processes from 0; CROSS_SLURM_PROCID goes through."""
    envs = {
        f"{job}-{procid}": {
            "SLURM_JOB_ID": job,
            "SLURM_PROCID": str(procid),
            "CROSS_SLURM_PROCID": str(procid + (2 if job == "502" else 0)),
        }
        for job in ("501", "502")
        for procid in range(2)
    }
    assert order_of(envs) == ["501-0", "501-1", "502-0", "502-1"]


@pytest.mark.rule("B3", "C8")
def test_nothing_set_at_all() -> None:
    """C020."""
    assert order_of({"node-c": {}, "node-a": {}, "node-b": {}}) == ["node-a", "node-b", "node-c"]


@pytest.mark.rule("B3", "B5")
def test_the_step_says_how_many_nodes_an_array_task_has() -> None:
    """C035: a 4-node allocation of which the step uses 2."""
    envs = [
        {
            "SLURM_ARRAY_TASK_ID": str(task),
            "SLURM_NNODES": "2",
            "SLURM_JOB_NUM_NODES": "4",
            "SLURM_PROCID": str(procid),
        }
        for task in range(2)
        for procid in range(2)
    ]
    assert [array_rank(env) for env in envs] == [0, 1, 2, 3]
    assert array_rank({**envs[3], "SLURM_NNODES": ""}) == 5, "else the job does"


@pytest.mark.rule("B3", "A0")
@pytest.mark.parametrize("empty", [{}, {"SLURM_NNODES": "", "SLURM_JOB_NUM_NODES": " "}])
def test_an_array_without_a_node_count(empty: dict[str, str]) -> None:
    """C036: an error that names both variables; neither 0 nodes nor rank 0."""
    env = {"SLURM_ARRAY_TASK_ID": "2", "SLURM_PROCID": "0", **empty}
    with pytest.raises(BadVariable, match=r"SLURM_ARRAY_TASK_ID=2 .*SLURM_NNODES.*SLURM_JOB_NUM_NODES"):
        order_sources(env, "h", NodeId("h"))


@pytest.mark.rule("B3")
def test_under_slurm_a_node_without_a_place_is_refused() -> None:
    """C034: never a silent place in a job of several nodes; GROUP_RANK and the node's name are none."""
    env = {"SLURM_JOB_ID": "5", "GROUP_RANK": "0"}
    with pytest.raises(BadVariable, match=r"SLURM_JOB_ID=5 .*SLURM_PROCID.*srun --ntasks=<nodes> --ntasks-per-node=1"):
        order_sources(env, "h", NodeId("h"))
    for more in (
        {"SLURM_PROCID": "0"},
        {"CROSS_SLURM_PROCID": "0"},
        block("b1.n1"),
        {"NVRX_INFRA_RANK_FROM_NODENAME": "1"},
    ):
        order_sources({**env, **more}, "h", NodeId("h"))
    order_sources({**env, "SLURM_JOB_ID": ""}, "h", NodeId("h"))


@pytest.mark.rule("B5")
def test_array_rank_is_of_process_ids_alone() -> None:
    """Topology, names and CROSS_SLURM_PROCID order the run, never the allocation."""
    env = {
        **block("b9.n9"),
        "NVRX_INFRA_RANK_FROM_NODENAME": "1",
        "CROSS_SLURM_PROCID": "77",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_NNODES": "2",
        "SLURM_PROCID": "1",
    }
    assert array_rank(env) == 7
    assert array_rank({"SLURM_PROCID": "4"}) == 4, "without an array"
    assert array_rank({"GROUP_RANK": "4", "CROSS_SLURM_PROCID": "4"}) is None


@pytest.mark.rule("B3")
def test_node_lists_are_not_parsed() -> None:
    """C040, C041: the job's list and the step's differ, and change nothing here."""
    env = {"SLURM_PROCID": "1", "SLURMD_NODENAME": "n4"}
    lists = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n[3-4]", "SLURM_NODELIST": "node[1-"}
    assert order_sources({**env, **lists}, "n4", NodeId("n4")) == order_sources(env, "n4", NodeId("n4"))


@pytest.mark.rule("B3")
@pytest.mark.parametrize("name", ["SLURM_PROCID", "CROSS_SLURM_PROCID", "GROUP_RANK", "SLURM_ARRAY_TASK_ID"])
@pytest.mark.parametrize("value", ["-1", "x", "1.0", "٣", "9" * 300])
def test_what_is_no_number_is_named(name: str, value: str) -> None:
    with pytest.raises(BadVariable, match=name):
        order_sources({"SLURM_PROCID": "0", "SLURM_NNODES": "1", name: value}, "h", NodeId("h"))


@pytest.mark.rule("B3")
def test_different_texts_have_different_keys() -> None:
    texts = ["", "1", "01", "a", "a1", "a01", "a1b", "1a", "a-1", "a_1"]
    assert len({natural_key(one) for one in texts}) == len(texts)
