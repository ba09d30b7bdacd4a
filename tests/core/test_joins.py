"""Who may be a member (A2, A3, A5, B1, B2, B4)."""

import dataclasses
import math

import pytest

from nvrx.core.commands import Command, CycleExits, Leave, Report
from nvrx.core.facts import CycleEnded, NodeJoined, NodeLost, RunReopened, RunState, WorldChosen
from nvrx.core.ids import CycleNumber, Incarnation, NodeId
from nvrx.core.narrate import order_warning
from nvrx.core.parallel import ParallelSizes
from nvrx.core.refused import Reason, Refused
from nvrx.core.shape import SettingsWish, Shape
from nvrx.core.topology import OrderSource

from .driver import World, ended, trained


def refusal(world: World, name: str, **join: bool) -> Refused:
    with pytest.raises(Refused) as caught:
        world.join(name, **join)
    return caught.value


@pytest.mark.rule("B2")
def test_join_is_idempotent() -> None:
    """Field case C044: the answer was lost, the node asks again; MIN is not reached by counting it twice."""
    world = World(2, 2)
    world.join("n0", "n0", "n0")
    assert len(world.of(NodeJoined)) == 1
    assert not world.run.cycles
    world.join("n1")
    assert world.submit(world.join_command("n0")) == []
    assert world.active() == ["n0", "n1"]


@pytest.mark.rule("B2")
def test_a_second_agent_of_a_live_node_is_refused() -> None:
    world = trained()
    other = dataclasses.replace(world.node("n0").info(), incarnation=Incarnation("x"), address="10.9.9.9", pid=77)
    with pytest.raises(Refused) as caught:
        world.submit(dataclasses.replace(world.join_command("n0"), node=other))
    assert caught.value.reason is Reason.NODE_ALREADY_JOINED
    for part in ("n0", "10.0.0.0", "1000", "10.9.9.9", "77", "--node-id"):
        assert part in caught.value.message
    assert world.is_training


@pytest.mark.rule("B2", "E4")
def test_an_incarnation_that_was_declared_lost_is_told_so() -> None:
    world = trained()
    world.kill("n1")
    world.advance(3)
    assert refusal(world, "n1").reason is Reason.STALE_INCARNATION
    world.rejoin("n1")
    assert world.active() == ["n0", "n2"]


@pytest.mark.rule("B2")
@pytest.mark.parametrize("word", ["report", "leave"])
def test_late_words_of_an_old_incarnation_change_nothing(word: str) -> None:
    world = trained()
    old = world.node("n1").incarnation
    world.kill("n1")
    world.advance(3)
    world.rejoin("n1")
    before = world.run
    told = (CycleExits(world.cycle.number, (ended(0, 1),)),)
    commands: dict[str, Command] = {
        "report": Report(NodeId("n1"), old, told),
        "leave": Leave(NodeId("n1"), old, "late", False, 1.0),
    }
    with pytest.raises(Refused) as caught:
        world.submit(commands[word])
    assert caught.value.reason is Reason.STALE_INCARNATION
    assert caught.value.details["current_incarnation"] == world.node("n1").incarnation
    assert world.run == before


@pytest.mark.rule("B2")
def test_a_stranger_is_told_to_join_first() -> None:
    world = trained()
    with pytest.raises(Refused) as caught:
        world.submit(Report(NodeId("n9"), Incarnation("x"), ()))
    assert caught.value.reason is Reason.UNKNOWN_NODE


@pytest.mark.rule("B2")
def test_a_new_incarnation_replaces_one_whose_lease_is_over() -> None:
    """The join comes before the coordinator's own timer did."""
    world = trained()
    world.kill("n1")
    world.now += 2
    world.rejoin("n1")
    assert [type(one) for one in world.facts[-4:]] == [NodeLost, NodeJoined, CycleEnded, WorldChosen]
    failure = world.run.cycles[0].failure
    assert failure is not None
    assert (failure.node_id, failure.message) == ("n1", "replaced by incarnation n1.1")


@pytest.mark.rule("B2", "C1")
def test_who_replaces_a_dead_agent_at_once_is_chosen_when_it_is_heard_itself() -> None:
    """The dead one was heard a moment ago: that says nothing of the one that joins."""
    world = World(2, 2)
    for name in ("n0", "n1"):
        command = world.join_command(name)
        world.submit(dataclasses.replace(command, node=dataclasses.replace(command.node, host="boot")))
        world.connect(name)
    world.start()
    dead = world.node("n1").incarnation
    world.node("n1").life += 1
    command = world.join_command("n1")
    node = dataclasses.replace(command.node, host="boot")
    facts = world.submit(dataclasses.replace(command, node=node, replaces=dead))
    assert [type(one) for one in facts] == [NodeLost, NodeJoined, CycleEnded]
    world.connect("n1")
    assert world.active() == ["n0", "n1"]
    assert world.is_training


@pytest.mark.rule("B2", "B6")
@pytest.mark.parametrize(("broken", "count", "accepted"), [(True, 1, True), (True, 0, False), (False, 1, False)])
def test_a_requeued_node_replaces_itself_once_its_stream_broke(broken: bool, count: int, accepted: bool) -> None:
    world = trained()
    if broken:
        world.kill("n1")
    world.node("n1").restart_count = count
    if accepted:
        world.rejoin("n1")
    else:
        world.node("n1").life += 1
        assert refusal(world, "n1").reason is Reason.NODE_ALREADY_JOINED
    assert bool(world.of(NodeLost)) == accepted


@pytest.mark.rule("A5")
def test_a_node_beyond_max_is_refused_and_harms_nobody() -> None:
    """Field case C059: the run goes on, and recovers with all alive."""
    world = trained(2, 3)
    refused = refusal(world, "n3")
    assert refused.reason is Reason.RUN_FULL
    assert refused.message == "run run has 3 nodes and allows 3; n3 would be one more"
    world.exit("n1", 0, 1)
    assert world.active() == ["n0", "n1"]
    world.leave("n2", stopped=True)
    world.join("n3")


@pytest.mark.rule("A5")
def test_standbys_come_and_go_and_nothing_restarts() -> None:
    """Field case C029."""
    world = trained(2, 4)
    world.leave("n2", stopped=True)
    world.rejoin("n2")
    world.kill("n3")
    world.advance(30)
    world.rejoin("n3")
    assert len(world.of(WorldChosen)) == 1
    assert world.cycle.is_live
    assert world.run.shape.world_size == 4


@pytest.mark.rule("A2")
def test_a_mismatch_lists_every_field() -> None:
    world = World(2, 3, wish=SettingsWish(max_restarts=2))
    first = world.join_command("n0")
    world.submit(dataclasses.replace(first, shape=dataclasses.replace(first.shape, fingerprint={"python": "3.12.1"})))
    sizes = ParallelSizes(tensor_parallel=4, global_batch_size=240)
    shape = Shape(3, 4, 8, "/other", {"NCCL_DEBUG": "INFO", "python": "3.12.1"}, parallel=sizes)
    with pytest.raises(Refused) as caught:
        world.submit(
            dataclasses.replace(world.join_command("n1"), shape=shape, wish=SettingsWish(1, 5, join_timeout_s=600.0))
        )
    assert caught.value.reason is Reason.SHAPE_MISMATCH
    expected = {
        "min_nodes": ("2", "3"),
        "max_nodes": ("3", "4"),
        "workers_per_node": ("2", "8"),
        "checkpoint_path": ("", "/other"),
        "tensor_parallel": ("1", "4"),
        "global_batch_size": ("None", "240"),
        "NCCL_DEBUG": ("(unset)", "INFO"),
        "max_restarts": ("2", "1"),
        "max_replacements": ("(none)", "5"),
    }
    for name, (run_has, node_gives) in expected.items():
        assert caught.value.details[f"{name}.run"] == run_has
        assert caught.value.details[f"{name}.node"] == node_gives
        assert f"{name}: run has {run_has}, this node gives {node_gives}" in caught.value.message
    assert len(caught.value.details) == 1 + 2 * len(expected), "join_timeout_s agrees"
    world.join("n2")


@pytest.mark.rule("A2")
@pytest.mark.parametrize(
    ("field", "run_has", "node_gives"),
    [("workers_per_node", 8, 4), ("min_nodes", 2, 3), ("max_nodes", 3, 4), ("checkpoint_path", "/a", "/b")],
)
def test_one_odd_node_is_refused_and_the_others_go_on(field: str, run_has: object, node_gives: object) -> None:
    """Field case C028."""
    world = World(2, 3)
    shape = dataclasses.replace(Shape(2, 3, 8), **{field: run_has})  # type: ignore[arg-type]
    odd = dataclasses.replace(shape, **{field: node_gives})  # type: ignore[arg-type]
    world.submit(dataclasses.replace(world.join_command("n0"), shape=shape))
    with pytest.raises(Refused) as caught:
        world.submit(dataclasses.replace(world.join_command("odd"), shape=odd))
    assert f"{field}: run has {run_has}, this node gives {node_gives}" in caught.value.message
    world.submit(dataclasses.replace(world.join_command("n1"), shape=shape))
    assert [one.info.node_id for one in world.run.live_members()] == ["n0", "n1"]


@pytest.mark.rule("A2", "A8")
def test_a_node_without_a_fingerprint_joins_and_so_do_others_after_it() -> None:
    """It was told not to compare, or is of a version that does not."""
    world = World(1, 3)

    def join(name: str, fingerprint: dict[str, str]) -> None:
        command = world.join_command(name)
        shape = dataclasses.replace(command.shape, fingerprint=fingerprint)
        world.submit(dataclasses.replace(command, shape=shape))

    join("n0", {"NCCL_DEBUG": "INFO"})
    join("n1", {})
    with pytest.raises(Refused, match="NCCL_DEBUG: run has INFO, this node gives WARN"):
        join("n2", {"NCCL_DEBUG": "WARN"})
    join("n2", {"NCCL_DEBUG": "{not compared}"})


@pytest.mark.rule("A2")
def test_a_node_without_wishes_takes_what_the_run_has() -> None:
    world = World(1, 2, wish=SettingsWish(max_restarts=7))
    world.join("n0")
    world.wish = SettingsWish()
    world.join("n1")
    assert world.run.settings.max_restarts == 7


@pytest.mark.rule("A5", "B1")
@pytest.mark.parametrize(
    ("change", "reason", "part"),
    [
        ({"node_id": NodeId("a/b")}, Reason.INVALID_FIELD, "'/'"),
        ({"incarnation": Incarnation("")}, Reason.INVALID_FIELD, "incarnation is empty"),
        ({"address": ""}, Reason.INVALID_FIELD, "address is empty"),
        ({"group_array_job_id": "a/b"}, Reason.INVALID_FIELD, "array job id"),
        ({"domain_id": "é"}, Reason.INVALID_FIELD, "domain id"),
        ({"replacement_group_id": "a/b"}, Reason.INVALID_FIELD, "replacement group id"),
        ({"order_sources": {OrderSource.PROCID: "x"}}, Reason.INVALID_FIELD, "SLURM_PROCID='x'"),
        ({"order_sources": {OrderSource.PROCID: "-1"}}, Reason.INVALID_FIELD, "SLURM_PROCID='-1'"),
        ({"order_sources": {OrderSource.NODENAME: ""}}, Reason.INVALID_FIELD, "SLURMD_NODENAME has 0 characters"),
        ({"order_sources": {OrderSource.NODENAME: "x" * 257}}, Reason.INVALID_FIELD, "257 characters"),
    ],
)
def test_a_field_that_no_run_can_have_is_refused(change: dict[str, object], reason: Reason, part: str) -> None:
    world = World(1, 2)
    command = world.join_command("n0")
    with pytest.raises(Refused) as caught:
        world.submit(dataclasses.replace(command, node=dataclasses.replace(command.node, **change)))  # type: ignore[arg-type]
    assert caught.value.reason is reason
    assert part in caught.value.message
    assert world.opened is None


@pytest.mark.rule("A5")
@pytest.mark.parametrize(
    ("shape", "wish", "part"),
    [
        (Shape(0, 2, 1), SettingsWish(), "0:2"),
        (Shape(3, 2, 1), SettingsWish(), "3:2"),
        (Shape(1, 100_001, 1), SettingsWish(), "1:100001"),
        (Shape(1, 1, 0), SettingsWish(), "0 workers"),
        (Shape(1, 1, 1025), SettingsWish(), "1025 workers"),
        (
            Shape(2, 2, 8, parallel=ParallelSizes(4, 6)),
            SettingsWish(),
            "16 = 2 nodes x 8 workers is not a multiple of 24",
        ),
        (Shape(1, 1, 1, parallel=ParallelSizes(global_batch_size=0)), SettingsWish(), "global_batch_size is 0"),
        (Shape(1, 1, 1), SettingsWish(max_restarts=-1), "max_restarts is -1"),
        (Shape(1, 1, 1), SettingsWish(join_timeout_s=math.nan), "join_timeout_s is nan"),
    ],
)
def test_a_run_that_cannot_be_is_not_opened(shape: Shape, wish: SettingsWish, part: str) -> None:
    world = World(1, 1)
    with pytest.raises(Refused) as caught:
        world.submit(dataclasses.replace(world.join_command("n0"), shape=shape, wish=wish))
    assert caught.value.reason is Reason.ILLEGAL_WORLD
    assert part in caught.value.message


@pytest.mark.rule("B4")
@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("text", ["0", "00"])
def test_two_live_nodes_with_one_value_are_told_apart(settled: bool, text: str) -> None:
    world = World(1, 3, wish=SettingsWish(last_call_s=0 if settled else 100))
    world.node("n0", {OrderSource.PROCID: "0"})
    world.node("n1", {OrderSource.PROCID: text})
    world.join("n0")
    refused = refusal(world, "n1")
    assert refused.reason is Reason.DUPLICATE_INFRA_RANK
    for part in ("n0", "n1", f"SLURM_PROCID={text}", "srun"):
        assert part in refused.message
    world.kill("n0")
    world.advance(3)
    world.join("n1")


@pytest.mark.rule("B4")
@pytest.mark.parametrize(
    ("source", "text", "parts"),
    [
        pytest.param(OrderSource.PROCID, "1", ["SLURM_PROCID=1", "CROSS_SLURM_PROCID"], id="C017"),
        pytest.param(OrderSource.PROCID, "0", ["SLURM_PROCID=0", "srun did not start"], id="C018"),
        pytest.param(OrderSource.GROUP_RANK, "0", ["GROUP_RANK=0", "unset GROUP_RANK"], id="C019"),
        pytest.param(OrderSource.CROSS, "0", ["CROSS_SLURM_PROCID=0", "of its own"], id="CROSS"),
        pytest.param(OrderSource.TOPOLOGY, "b1.n1", ["SLURM_TOPOLOGY_ADDR=b1.n1", "one agent per node"], id="TOPOLOGY"),
        pytest.param(OrderSource.NODENAME, "n1", ["SLURMD_NODENAME=n1", "one agent per node"], id="NODENAME"),
    ],
)
def test_a_tie_is_refused_with_what_to_do_about_it(source: OrderSource, text: str, parts: list[str]) -> None:
    """Both nodes are named, the first goes on, and nobody is thrown out in turn."""
    world = World(1, 3)
    world.node("ash", {source: text})
    world.node("elm", {source: text})
    world.join("ash")
    world.advance(1)
    before = world.run
    for _ in range(3):
        refused = refusal(world, "elm")
        assert refused.reason is Reason.DUPLICATE_INFRA_RANK
        for part in ("ash", "elm", *parts):
            assert part in refused.message
        assert (refused.details["node_id"], refused.details["other_node_id"]) == ("elm", "ash")
        assert refused.details["value"] == text
    assert world.run == before
    assert world.active() == ["ash"]


@pytest.mark.rule("B4")
def test_a_newcomer_by_which_others_would_tie_is_told_so() -> None:
    """Nodes of two jobs, numbered through; one that is not numbered would make the run order by SLURM_PROCID."""
    world = World(3, 3)
    world.node("a0", {OrderSource.CROSS: "0", OrderSource.PROCID: "0"})
    world.node("b0", {OrderSource.CROSS: "1", OrderSource.PROCID: "0"})
    world.join("a0", "b0")
    world.node("c0", {OrderSource.PROCID: "1"})
    refused = refusal(world, "c0")
    assert refused.reason is Reason.DUPLICATE_INFRA_RANK
    for part in ("a0", "b0", "SLURM_PROCID=0", "c0, which asks to join"):
        assert part in refused.message


@pytest.mark.rule("B3")
def test_a_mix_of_sources_is_said_once() -> None:
    """Field case C011: three nodes are in a block, one is not."""
    world = World(3, 5)
    for number in range(3):
        world.node(f"n{number}", {OrderSource.TOPOLOGY: f"block1.n{number}", OrderSource.PROCID: str(number)})
    world.node("n9", {OrderSource.PROCID: "9"})
    world.node("late")
    world.join("n0", "n1", "n2", "n9")
    world.advance(1)
    world.join("late")
    world.exit("n0", 0, 1)
    said = [line for fact in world.facts if (line := order_warning(world.run, fact)) is not None]
    assert said == [
        "run run is ordered by SLURM_PROCID: SLURM_TOPOLOGY_ADDR goes before it, but is missing on n9 "
        "(there on n0, n1, n2)",
        "node late has no SLURM_PROCID, by which run run is ordered: it comes after the nodes that have it",
    ]


@pytest.mark.rule("B3")
def test_nothing_is_said_where_all_nodes_have_the_source() -> None:
    world = World(2, 2)
    for number in range(2):
        world.node(f"n{number}", {OrderSource.TOPOLOGY: f"block1.n{number}", OrderSource.PROCID: str(number)})
    world.join("n0", "n1")
    assert [order_warning(world.run, fact) for fact in world.facts] == [None] * len(world.facts)


@pytest.mark.rule("B3", "B4")
def test_the_first_source_that_all_have_orders_the_world_and_is_kept() -> None:
    world = World(2, 4, wish=SettingsWish(last_call_s=1))
    world.node("a", {OrderSource.PROCID: "1", OrderSource.CROSS: "5"})
    world.node("b", {OrderSource.PROCID: "0"})
    world.join("a", "b")
    world.advance(1)
    assert world.active() == ["b", "a"]
    assert world.cycle.order_source is OrderSource.PROCID
    assert [seat.node.infra_rank for seat in world.cycle.seats] == [0, 1]
    world.node("c")
    world.join("c")
    world.leave("a", stopped=True)
    assert world.active() == ["b", "c"], "a later node without the source comes after the others"
    assert world.cycle.order_source is OrderSource.PROCID


@pytest.mark.rule("A3")
def test_a_closed_run_refuses_and_tells_its_outcome() -> None:
    world = trained(1, 2)
    world.finish("n0")
    refused = refusal(world, "n2")
    assert refused.reason is Reason.RUN_CLOSED
    assert refused.details["state"] == "SUCCEEDED"
    assert refused.details["exit_code"] == "0"


@pytest.mark.rule("A3")
@pytest.mark.parametrize("by", ["reopen", "restart count"])
def test_a_reopened_run_counts_on_and_has_fresh_budgets(by: str) -> None:
    world = trained(2, 2, wish=SettingsWish(max_restarts=1))
    world.exit("n0", 0, 1)
    world.exit("n0", 0, 1)
    assert world.run.state is RunState.FAILED
    world.node("n0").restart_count = 0 if by == "reopen" else 1
    world.rejoin("n0", reopen=by == "reopen")
    assert world.of(RunReopened)
    assert world.desired("n0").assignment is None, "no cycle of the old life"
    world.rejoin("n1")
    assert world.cycle.number == 2
    world.start()
    world.exit("n0", 0, 1)
    assert world.cycle.number == 3
    world.exit("n0", 0, 1)
    assert world.run.state is RunState.FAILED


@pytest.mark.rule("A3")
def test_a_restart_count_that_was_seen_reopens_nothing() -> None:
    world = trained(1, 1, wish=SettingsWish(max_restarts=0))
    world.exit("n0", 0, 1)
    world.node("n0").restart_count = 2
    world.rejoin("n0")
    world.exit("n0", 0, 1)
    world.node("n0").restart_count = 0
    world.rejoin("n0", reopen=True)
    world.exit("n0", 0, 1)
    world.node("n0").restart_count = 2
    world.node("n0").life += 1
    assert refusal(world, "n0").reason is Reason.RUN_CLOSED


@pytest.mark.rule("A3")
def test_cycles_are_numbered_above_any_that_a_node_has_seen() -> None:
    """After a journal was lost; also while a cycle runs."""
    world = World(1, 2)
    world.node("n0").last_cycle = CycleNumber(7)
    world.join("n0")
    world.advance(1)
    assert world.cycle.number == 8
    world.node("n1").last_cycle = CycleNumber(20)
    world.join("n1")
    world.exit("n0", 0, 1)
    assert world.cycle.number == 21


@pytest.mark.rule("C1")
def test_a_dead_member_is_not_counted() -> None:
    """Field cases C047 and C057."""
    world = World(2, 2)
    world.join("n0")
    world.kill("n0")
    world.advance(10)
    world.join("n1")
    world.advance(5)
    assert not world.run.cycles
    world.join("n2")
    assert world.active() == ["n1", "n2"]
