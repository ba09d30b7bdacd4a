"""`nvrx-coord plan`: what it chooses, what it refuses, its files, and that it says what a coordinator would."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shlex
import time
from pathlib import Path
from typing import Any

import pytest

from nvrx.core.placement import Bounds, place
from nvrx.server.cli import main
from nvrx.v1 import common_pb2

from .coordination import HandAgent, serving
from .planned import EXAMPLES, ROOT, Planner, grouped, node, procs


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Planner:
    return Planner(tmp_path, capsys)


# ---- what it chooses ----------------------------------------------------------------------------------


@pytest.mark.rule("A5", "C5")
def test_six_of_eight(plan: Planner) -> None:
    assert plan.example("spares.yaml").order == ["n0", "n1", "n2", "n3", "n4", "n5"]
    lost = plan.example("spares.yaml", "--lose", "n0, n3")
    assert lost.order == ["n1", "n2", "n4", "n5", "n6", "n7"]
    assert [one["first_rank"] for one in lost.json["nodes"]] == [0, 8, 16, 24, 32, 40]
    assert lost.standbys == {}
    assert plan.example("spares.yaml", "--nnodes", "8").json["world_size"] == 64


@pytest.mark.rule("C2", "C5")
def test_the_loss_of_a_node_takes_its_group(plan: Planner) -> None:
    assert plan.example("groups.yaml").order == ["n0", "n1", "n2", "n3"]
    lost = plan.example("groups.yaml", "--lose", "n1")
    assert lost.order == ["n2", "n3", "n4", "n5"]
    assert lost.standbys == {"n0": "its group g0 has 1 of 2 nodes here (n1 lost)"}
    assert lost.json["cycle"] == 1
    assert plan.example("groups.yaml", "--lose", "n1,n4").shortage == (
        "4 nodes are ready, but at most 2 of 4 can train together: "
        "group g0 has 1 of 2 (n1 lost); group g2 has 1 of 2 (n4 lost)"
    )


@pytest.mark.rule("C3")
def test_segments_of_four(plan: Planner) -> None:
    found = plan.example("segments.yaml")
    assert [one["domain_id"] for one in found.json["nodes"]] == ["A"] * 8 + ["B"] * 4
    assert found.standbys["n8"] == "domain A gives 8 of its 9 nodes: segments have 4"
    short = plan.example("segments.yaml", "--nnodes", "16:18", "--lose", "n17").shortage
    assert "domain C has 3 of 4 (segments of 4)" in short


@pytest.mark.rule("B3", "B5", "B6", "C1")
def test_an_array_with_holes(plan: Planner) -> None:
    found = plan.example("array.yaml")
    assert [one["infra_rank"] for one in found.json["nodes"]] == [2, 3, 6, 7, 14, 15]
    assert [one["replacement_group_id"] for one in found.json["nodes"]] == ["1", "1", "3", "3", "7", "7"]
    assert "t5-1 of its group 5" in found.standbys["t5-0"]
    assert plan.example("array.yaml", "--lose", "t3-0").order == ["t1-0", "t1-1", "t5-0", "t5-1", "t7-0", "t7-1"]


@pytest.mark.rule("B3", "B7", "C3")
def test_a_block_topology(plan: Planner) -> None:
    found = plan.example("blocks.yaml")
    assert found.order == ["n33", "n34", "n35", "n36", "n9", "n10"]
    assert found.json["order_source"] == "ORDER_SOURCE_TOPOLOGY"
    assert found.json["rank_policy"] == "RANK_POLICY_STICKY"
    assert [one["domain_id"] for one in found.json["nodes"]] == ["block1"] * 4 + ["block2"] * 2


@pytest.mark.rule("C2", "C3", "C4")
def test_groups_that_span_domains(plan: Planner) -> None:
    found = plan.example("spanning.yaml")
    assert found.order == ["n0", "n1", "n2", "n6", "n7", "n8"]
    assert found.standbys["n11"] == "drained"
    assert found.standbys["n9"] == "its group g3 has 2 of 3 nodes here (n11 drained)"


@pytest.mark.rule("C1")
@pytest.mark.parametrize(
    ("state", "others_suffice", "is_short"),
    [
        ("healthy", False, False),
        ("degraded", True, False),
        ("unhealthy", True, True),
        ("lost", True, True),
        ("draining", True, True),
    ],
)
def test_states(plan: Planner, state: str, others_suffice: bool, is_short: bool) -> None:
    nodes = procs(3)
    nodes[0]["state"] = state
    assert plan.nodes({"nnodes": "2:3"}, nodes).order == (["n1", "n2"] if others_suffice else ["n0", "n1"])
    all_needed = plan.nodes({"nnodes": "3:3"}, nodes)
    if is_short:
        why = {"draining": "drained"}.get(state, state)
        assert all_needed.shortage == f"2 of 3 nodes are ready: n0 {why}"
    else:
        assert all_needed.order == ["n0", "n1", "n2"]


@pytest.mark.rule("C1", "G11")
def test_an_unhealthy_node_is_listed_once(plan: Planner) -> None:
    nodes = procs(3)
    nodes[0]["state"] = "unhealthy"
    assert plan.nodes({"nnodes": "2:3"}, nodes).standbys == {"n0": "unhealthy"}
    assert plan.call("--nodes", plan.path).out.count("n0") == 1


@pytest.mark.rule("C5", "C6")
@pytest.mark.parametrize(("policy", "order"), [("infra", ["n1", "n2", "n3"]), ("sticky", ["n2", "n1", "n3"])])
def test_survivors_are_kept_and_ranks_follow_the_policy(plan: Planner, policy: str, order: list[str]) -> None:
    nodes = procs(4)
    for rank, number in enumerate([2, 1, 0]):
        nodes[number]["previous_group_rank"] = rank
    assert plan.nodes({"nnodes": "3:4", "rank_policy": policy}, nodes, "--lose", "n0").order == order
    nodes[0]["previous_group_rank"], nodes[3]["previous_group_rank"] = None, 2
    kept = plan.nodes({"nnodes": "3:4", "rank_policy": policy}, nodes)
    assert set(kept.order) == {"n1", "n2", "n3"}
    assert kept.standbys == {"n0": "the world of 3 keeps 3 nodes of the cycle before"}


@pytest.mark.rule("B4", "D9")
def test_who_was_there_before_is_named_and_does_not_change_the_order(plan: Planner) -> None:
    nodes = [{**one, "previous_group_rank": number} for number, one in enumerate(procs(2))]
    standby = node("n2", {"SLURM_PROCID": 2})
    gone = {"node_id": "old", "state": "lost", "previous_group_rank": 2}
    found = plan.nodes({"nnodes": "3:4"}, [gone, *nodes, standby])
    assert (found.order, found.json["order_source"]) == (["n0", "n1", "n2"], "ORDER_SOURCE_PROCID")
    short = plan.nodes({"nnodes": "3:4"}, [gone, *nodes, standby], "--lose", "n2").shortage
    assert short == "2 of 3 nodes are ready: old lost, n2 lost"


@pytest.mark.rule("A5", "B2")
def test_a_lost_node_takes_no_place(plan: Planner) -> None:
    assert plan.nodes({"nnodes": "2:2"}, procs(3), "--lose", "n1").order == ["n0", "n2"]
    again = [*procs(2), node("n0", {"SLURM_PROCID": 0}, state="lost", previous_group_rank=0)]
    assert plan.nodes({"nnodes": "2:2"}, again).order == ["n0", "n1"]
    assert plan.nodes({"nnodes": "2:2"}, procs(2), "--lose", "n0,n1").shortage.startswith("0 of 2 nodes are ready")
    assert plan.nodes({"nnodes": "2:2"}, []).shortage == "0 of 2 nodes are ready"
    bare = {"node_id": "n9", "state": "lost"}
    found = plan.nodes({"nnodes": "2:2", "segment_size": 2}, [*procs(2, domain_id="A"), bare])
    assert found.order == ["n0", "n1"]


@pytest.mark.rule("C4")
def test_past_the_bound_it_says_so(plan: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    domains = [number // 8 for number in range(192)]
    random.Random(3).shuffle(domains)
    nodes = [{**one, "domain_id": f"d{domains[number]}"} for number, one in enumerate(grouped(192))]
    assert place.__kwdefaults__ is not None
    monkeypatch.setitem(place.__kwdefaults__, "bounds", Bounds(5_000, 50_000))
    found = plan.nodes({"nnodes": "96:192", "segment_size": 2, "replacement_group_size": 2}, nodes)
    assert all(one.endswith("(not proven best)") for one in found.standbys.values())
    table = plan.call("--nodes", plan.path).out.splitlines()
    assert table[-1].endswith("; policy infra; not proven best: 93 groups tie 24 domains")
    monkeypatch.setitem(place.__kwdefaults__, "bounds", Bounds(0, 0))
    short = plan.nodes({"nnodes": "112:192", "segment_size": 4, "replacement_group_size": 2}, nodes).shortage
    assert short.startswith("undecided: 93 groups tie 24 domains")


# ---- what it refuses ----------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], list[dict[str, Any]], tuple[str, str], str]] = [
    ("one too many", {"nnodes": "1:2"}, procs(3), ("n2", "RUN_FULL"), "allows 2"),
    (
        "one value twice",
        {"nnodes": "2:3"},
        [*procs(2), node("x", {"SLURM_PROCID": 1})],
        ("x", "DUPLICATE_INFRA_RANK"),
        "SLURM_PROCID=1",
    ),
    (
        "a group too large",
        {"nnodes": "4:8", "replacement_group_size": 2},
        [*grouped(4), node("x", {"SLURM_PROCID": 9}, replacement_group_id="g0")],
        ("x", "GROUP_CONFLICT"),
        "g0 has its 2 nodes (n0, n1)",
    ),
    (
        "two arrays",
        {"nnodes": "2:4"},
        [
            node(
                f"n{job}", {"SLURM_ARRAY_JOB_ID": job, "SLURM_ARRAY_TASK_ID": 3, "SLURM_NNODES": 2, "SLURM_PROCID": job}
            )
            for job in (7, 8)
        ],
        ("n8", "GROUP_CONFLICT"),
        "array job 7",
    ),
    ("one id twice", {"nnodes": "1:3"}, [*procs(2), node("n0")], ("n0", "NODE_ALREADY_JOINED"), "--node-id"),
    (
        "MIN and groups",
        {"nnodes": "5:8", "replacement_group_size": 2},
        grouped(6),
        ("n0", "ILLEGAL_WORLD"),
        "MIN 5 is no multiple",
    ),
    ("MIN and segments", {"nnodes": "5:8", "segment_size": 2}, procs(5, domain_id="A"), ("n0", "ILLEGAL_WORLD"), "5"),
    ("no workers", {"nnodes": "2", "nproc_per_node": 0}, procs(2), ("n0", "ILLEGAL_WORLD"), "0 workers"),
    ("a shape alone", {"nnodes": "3", "segment_size": 2}, [], ("", "ILLEGAL_WORLD"), "MIN 3"),
    (
        "sizes that do not divide",
        {"nnodes": "2", "nproc_per_node": 8, "tensor-parallel": 3},
        procs(2),
        ("n0", "ILLEGAL_WORLD"),
        "world size 16 = 2 nodes x 8 workers is not a multiple of 3",
    ),
    ("an impossible name", {"nnodes": "2"}, [*procs(1), node("a/b")], ("a/b", "INVALID_FIELD"), "'/'"),
    ("a bad number", {"nnodes": "1"}, [node("n0", {"SLURM_PROCID": "x"})], ("n0", "INVALID_FIELD"), "SLURM_PROCID"),
    ("no domain", {"nnodes": "2", "segment_size": 2}, procs(2), ("n0", "INVALID_FIELD"), "NVRX_DOMAIN_ID"),
    ("no group size", {"nnodes": "2"}, grouped(2), ("n0", "INVALID_FIELD"), "--replacement-group-size"),
    ("restarts", {"nnodes": "1"}, [node("n0", {"SLURM_RESTART_COUNT": "x"})], ("n0", "INVALID_FIELD"), "RESTART"),
    (
        "two tasks on a node",
        {"nnodes": "1"},
        [node("n0", {"SLURM_JOB_ID": 1, "SLURM_STEP_ID": 0, "SLURM_PROCID": 0, "SLURM_LOCALID": 1})],
        ("n0", "INVALID_FIELD"),
        "SLURM_LOCALID=1",
    ),
    (
        "array tasks of different size",
        {"nnodes": "2:4"},
        [
            node(
                f"t{task}",
                {"SLURM_ARRAY_JOB_ID": 7, "SLURM_ARRAY_TASK_ID": task, "SLURM_NNODES": task, "SLURM_PROCID": 0},
            )
            for task in (1, 2)
        ],
        ("t2", "SHAPE_MISMATCH"),
        "replacement_group_size: run has 1, this node gives 2",
    ),
]


@pytest.mark.rule("A1", "A2", "A5", "A6", "A7", "B4", "B6", "B7")
@pytest.mark.parametrize(("what", "shape", "nodes", "refused", "words"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refusals(
    plan: Planner,
    what: str,
    shape: dict[str, Any],
    nodes: list[dict[str, Any]],
    refused: tuple[str, str],
    words: str,
) -> None:
    found = plan.nodes(shape, nodes)
    assert found.refused == refused
    assert words in found.message


def test_the_first_in_the_file_that_would_be_refused_is_named(plan: Planner) -> None:
    nodes = [*procs(2), node("x", {"SLURM_PROCID": 1}), node("y", {"SLURM_PROCID": "bad"})]
    assert plan.nodes({"nnodes": "2:4"}, nodes).refused == ("x", "DUPLICATE_INFRA_RANK")
    assert plan.nodes({"nnodes": "2:4"}, nodes, "--lose", "x").refused == ("y", "INVALID_FIELD")
    assert plan.nodes({"nnodes": "2:4"}, nodes, "--lose", "x,y").order == ["n0", "n1"]


def test_a_refusal_and_a_shortage_as_text(plan: Planner) -> None:
    refused = plan.call("--nodes", EXAMPLES / "duplicate.json")
    assert refused.code == 3
    assert refused.out.startswith("refused: oak: DUPLICATE_INFRA_RANK: nodes elm and oak both have SLURM_PROCID=1")
    assert len(refused.out.splitlines()) == 1
    plan.nodes({"nnodes": "1"}, [node("a\n\x1b[2Jb")])
    odd = plan.call("--nodes", plan.path)
    assert odd.code == 3
    assert len(odd.out.splitlines()) == 1
    assert "\x1b" not in odd.out
    short = plan.call("--nodes", EXAMPLES / "spares.yaml", "--lose", "n1,n2,n3")
    assert (short.code, short.err) == (1, "")
    assert short.out == "no world: 5 of 6 nodes are ready: n1 lost, n2 lost, n3 lost\n"


# ---- files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "nodes is missing"),
        ("[1, 2]", "the file is no mapping"),
        ("just words", "the file is no mapping"),
        ("shape: {nnodes: 2", "neither YAML nor JSON: "),
        ("a: b: c", "line 1, column 5"),
        ('{"shape": {"nnodes": "2"}, "nodes": [', "neither YAML nor JSON"),
        ("[" * 100_000, "neither YAML nor JSON"),
        (b"\xff\xfe\x00", "no UTF-8 text"),
        ("shape: {nnodes: 2}\nnodes: []\nmore: 1", "the file has an unknown key 'more'"),
        ("shape: {nnodes: 2, tensor: 2}\nnodes: []", "shape has an unknown key 'tensor'"),
        ("shape: {nnodes: 2}\nnodes: [{node_id: n7, sate: lost}]", "node n7 has an unknown key 'sate'"),
        ("shape: {nnodes: 2}\nnodes: [{node_id: n0}, {env: {A: 1}}]", "node 2 has no node_id"),
        ("shape: {nnodes: 2}\nnodes: [n0]", "node 1 is no mapping"),
        ("shape: {nnodes: 2}\nnodes: {n0: {}}", "nodes is missing, or no list"),
        ("shape: {nnodes: 2}\nnodes: [{node_id: n0, state: sick}]", "node n0: state is 'sick'"),
        ("shape: {nnodes: 2}\nnodes: [{node_id: n0, env: [A]}]", "node n0: env is no mapping"),
        ("shape: {nnodes: 2}\nnodes: [{node_id: n0, env: {A: [1]}}]", "node n0: A in env is no text"),
        ("shape: {nnodes: 2}\nnodes: [{node_id: n0, previous_group_rank: x}]", "previous_group_rank is 'x'"),
        ("shape: {nnodes: 2}\nnodes: [{node_id: n0, previous_group_rank: -1}]", "previous_group_rank is -1"),
        (
            "shape: {nnodes: 2}\nnodes: [{node_id: a, previous_group_rank: 1}, {node_id: b, previous_group_rank: 1}]",
            "nodes a and b both have previous_group_rank 1",
        ),
        ("nodes: []", "shape.nnodes is missing"),
        ("shape: {nnodes: 3:2}\nnodes: []", "shape.nnodes '3:2' breaks"),
        ("shape: {nnodes: 2, nproc_per_node: gpu}\nnodes: []", "shape.nproc_per_node is 'gpu'"),
        ("shape: {nnodes: 2, rank_policy: best}\nnodes: []", "shape.rank_policy is 'best'"),
        ("shape: !!python/object/apply:os.getcwd []\nnodes: []", "neither YAML nor JSON"),
        ("shape: {nnodes: !!bool two}\nnodes: []", "shape.nnodes 'two'"),
        ("shape: {nnodes: 2}\nnodes: &a [*a]", "node 1 is no mapping"),
        ("{[]: 1}", "neither YAML nor JSON"),
    ],
)
def test_a_bad_file_is_one_line(plan: Planner, text: str | bytes, words: str) -> None:
    assert words in plan.text(text).usage


def test_bad_options_are_one_line(plan: Planner, tmp_path: Path) -> None:
    spares = EXAMPLES / "spares.yaml"
    assert "--nodes" in plan.call().usage
    assert "cannot be read" in plan.call("--nodes", tmp_path / "none.yaml").usage
    assert "--lose n9" in plan.call("--nodes", spares, "--lose", "n1,n9").usage
    assert "--nnodes" in plan.call("--nodes", spares, "--nnodes", "3:2").usage
    assert "--output" in plan.call("--nodes", spares, "--output", "xml").usage


@pytest.mark.rule("B3")
def test_yaml_values_are_taken_as_they_are_written(plan: Planner) -> None:
    text = """
    shape: {nnodes: 3:4, nproc_per_node: 010}
    nodes:
      - {node_id: 1e3, env: &common {SLURM_TOPOLOGY_ADDR_PATTERN: block.node, SLURM_TOPOLOGY_ADDR: 1.10}}
      - {node_id: 0x10, env: {<<: *common, SLURM_TOPOLOGY_ADDR: 1.9, NVRX_INFRA_RANK_FROM_NODENAME: no}}
      - {node_id: no, env: {<<: *common, SLURM_TOPOLOGY_ADDR: 1.100}, previous_group_rank: ~, domain_id: null}
      - {node_id: 2026-11-30, env: {<<: *common, SLURM_TOPOLOGY_ADDR: 2.1}, previous_group_rank: }
    """
    found = plan.text(text)
    assert found.order == ["0x10", "1e3", "no"]
    assert (found.json["workers_per_node"], found.json["cycle"]) == (10, 0)
    assert [one["order_key"] for one in found.json["nodes"]] == ["1.9", "1.10", "1.100"]
    assert [one["domain_id"] for one in found.json["nodes"]] == ["", "", ""]
    assert list(found.standbys) == ["2026-11-30"]


def test_a_large_file_is_quick(plan: Planner) -> None:
    nodes = [
        node(
            f"node-{number:05d}",
            {"SLURM_PROCID": number, "SLURM_NNODES": 4096, "SLURM_TOPOLOGY_ADDR": f"b{number // 8}.n{number}"}
            | {"SLURM_TOPOLOGY_ADDR_PATTERN": "block.node"},
            replacement_group_id=f"g{number // 4}",
            state="lost" if number % 20 == 0 else "healthy",
        )
        for number in range(4096)
    ]
    began = time.process_time()
    found = plan.nodes({"nnodes": "3072:4096", "segment_size": 4, "replacement_group_size": 4}, nodes)
    assert time.process_time() - began < 3
    assert len(found.order) == 3072


# ---- it says what a coordinator would -----------------------------------------------------------------


@pytest.mark.rule("C8", "H1", "H4")
async def test_it_is_what_get_rank_map_would_answer(plan: Planner, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = grouped(6)
    planned = plan.nodes({"nnodes": "4:6", "nproc_per_node": 2, "replacement_group_size": 2}, nodes).json
    async with serving() as served:
        agents = [HandAgent(served, one["node_id"], nnodes=(4, 6)) for one in nodes]
        for agent, one in zip(agents, nodes, strict=True):
            agent.shape.replacement_group_size = 2
            agent.shape.rank_policy = common_pb2.RANK_POLICY_INFRA
            await agent.join(
                order_sources={"PROCID": str(one["env"]["SLURM_PROCID"]), "NODE_ID": one["node_id"]},
                replacement_group_id=one["replacement_group_id"],
            )
        for agent in agents:
            await agent.open()
        await served.until_fact("WorldChosen")
        capsys.readouterr()
        await asyncio.to_thread(main, ["rank-map", "--coordinator", str(served.address), "--output", "json"])
        real = json.loads(capsys.readouterr().out)
    assert real.pop("start_time")
    assert [one["order_key"] for one in real["nodes"]] == ["0", "1", "2", "3"]
    for one in (real, planned):
        one.pop("run_id")
        for row in [*one["nodes"], *one["standbys"]]:
            assert row.pop("address")
            assert row.pop("incarnation")
            row.pop("devices")
    assert planned == real


# ---- the documentation --------------------------------------------------------------------------------


def test_the_documentation_shows_what_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "plan.md").read_text()
    blocks = re.findall(r"```console\n\$ nvrx-coord (plan .*)\n([^`]*)```", text)
    assert len(blocks) == text.count("```console")
    for command, shown in blocks:
        capsys.readouterr()
        main(shlex.split(command))
        printed = capsys.readouterr()
        assert (printed.out, printed.err) == (shown, ""), command
    for example in EXAMPLES.iterdir():
        assert f"docs/examples/plan/{example.name}" in text
