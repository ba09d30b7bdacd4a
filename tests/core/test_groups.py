"""Replacement groups: who may join one, who counts against MAX, and that they are active whole or not at all."""

from __future__ import annotations

import dataclasses

import pytest

from nvrx.core.commands import Join, Undrain
from nvrx.core.groups import counted
from nvrx.core.ids import GroupId, NodeId
from nvrx.core.refused import Reason, Refused
from nvrx.core.shape import SettingsWish, Shape

from .driver import World


@dataclasses.dataclass
class Grouped(World):
    """Groups of two: n0 and n1 are g0, n2 and n3 are g1, and so on; unless `units` says otherwise."""

    units: dict[str, tuple[str, str, int]] = dataclasses.field(default_factory=dict)
    """By node: group id, array job id, restart count."""

    @property
    def shape(self) -> Shape:
        return Shape(self.min_nodes, self.max_nodes, self.workers, replacement_group_size=2)

    def join_command(self, name: str, *, reopen: bool = False) -> Join:
        group, array, restarts = self.units.get(name, (f"g{int(name[1:]) // 2}", "", 0))
        command = super().join_command(name, reopen=reopen)
        node = dataclasses.replace(
            command.node,
            replacement_group_id=GroupId(group) if group else None,
            group_array_job_id=array,
            restart_count=restarts,
        )
        return dataclasses.replace(command, node=node)


def grouped(*names: str, nnodes: tuple[int, int] = (2, 4)) -> Grouped:
    world = Grouped(*nnodes)
    world.join(*names)
    return world


def counts(world: World) -> set[str]:
    return {str(one.info.node_id) for one in counted(world.run)}


@pytest.mark.rule("C2")
def test_groups_are_active_whole() -> None:
    """C2, and the standby group is promoted whole: one lost node makes its sister a standby."""
    world = grouped("n0", "n1", "n2", "n3", nnodes=(2, 4))
    world.start()
    assert world.active() == ["n0", "n1"]
    world.kill("n1")
    world.advance(5)
    assert world.waiting() == "n0 leaves the world and its workers are still stopping"
    world.stopped("n0")
    world.start()
    assert world.active() == ["n2", "n3"]
    assert "g0" in next(one.reason for one in world.cycle.standbys if one.node.node_id == NodeId("n0"))


@pytest.mark.rule("C2", "C4")
def test_half_a_group_is_no_spare() -> None:
    world = grouped("n0", "n1", "n2", nnodes=(2, 4))
    world.advance(2)
    world.start()
    world.kill("n0")
    world.advance(5)
    assert not world.is_training
    assert "g1" in world.waiting()


@pytest.mark.rule("B6")
def test_a_node_without_a_group_is_admitted_and_never_chosen() -> None:
    world = Grouped(2, 4, units={"n9": ("", "", 0)})
    world.join("n9", "n0", "n1")
    world.advance(2)
    assert world.active() == ["n0", "n1"]
    assert "no replacement group" in next(one.reason for one in world.cycle.standbys)


@pytest.mark.rule("B6")
def test_the_same_task_of_another_array_is_refused() -> None:
    world = Grouped(2, 8, units={"n0": ("1", "700", 0), "n1": ("1", "701", 0)})
    world.join("n0")
    with pytest.raises(Refused) as seen:
        world.join("n1")
    assert seen.value.reason is Reason.GROUP_CONFLICT
    assert "700" in seen.value.message
    assert "701" in seen.value.message
    assert seen.value.details["other_node_id"] == "n0"


@pytest.mark.rule("B6")
def test_a_group_has_no_more_members_than_its_size() -> None:
    world = Grouped(2, 8, units={"n5": ("g0", "", 0)})
    world.join("n0", "n1")
    with pytest.raises(Refused) as seen:
        world.join("n5")
    assert seen.value.reason is Reason.GROUP_CONFLICT
    assert "n0, n1" in seen.value.message
    world.join("n0")
    assert counts(world) == {"n0", "n1"}


@pytest.mark.rule("B6")
def test_a_requeued_unit_replaces_its_older_members_at_once() -> None:
    """On other hosts, of which the old ones were never heard to end."""
    old = dict.fromkeys(("n0", "n1"), ("1", "700", 0))
    new = dict.fromkeys(("n4", "n5"), ("1", "700", 1))
    world = Grouped(2, 4, units=old | new)
    world.join("n0", "n1")
    world.advance(2)
    world.start()
    assert world.active() == ["n0", "n1"]
    world.join("n4")
    assert world.run.live(NodeId("n0")) is None
    assert not world.is_training
    world.join("n5")
    assert world.active() == ["n4", "n5"]
    with pytest.raises(Refused) as seen:
        world.rejoin("n0")
    assert seen.value.reason is Reason.GROUP_CONFLICT
    assert "restart 1" in seen.value.message


@pytest.mark.rule("A5")
def test_what_is_left_of_a_broken_unit_keeps_no_replacement_out() -> None:
    world = grouped("n0", "n1", "n2", "n3", nnodes=(2, 4))
    world.start()
    world.kill("n1")
    world.advance(5)
    assert counts(world) == {"n2", "n3"}, "n0 is a leftover: it may stay, and stands in nobody's way"
    world.join("n4", "n5")
    assert counts(world) == {"n2", "n3", "n4", "n5"}
    with pytest.raises(Refused) as seen:
        world.join("n6")
    assert seen.value.reason is Reason.RUN_FULL
    with pytest.raises(Refused) as seen:
        world.rejoin("n1")  # whole again, its group would count: two nodes too many
    assert seen.value.reason is Reason.RUN_FULL


@pytest.mark.rule("A5")
def test_groups_that_still_fill_count() -> None:
    """With the places of those that are still to come: else two units for one unit's room could keep each other out."""
    world = grouped("n0", nnodes=(2, 2))
    assert counts(world) == {"n0"}
    with pytest.raises(Refused) as seen:
        world.join("n2")
    assert seen.value.reason is Reason.RUN_FULL
    assert seen.value.message == (
        "run run has 1 nodes, keeps 1 places for the rest of their units and allows 2; there is no room for the unit "
        "of n2"
    )
    world.join("n1")
    assert world.active() == ["n0", "n1"]


@pytest.mark.rule("A7", "A2")
def test_group_sizes_belong_to_the_shape() -> None:
    world = Grouped(3, 4)
    with pytest.raises(Refused) as seen:
        world.join("n0")
    assert seen.value.reason is Reason.ILLEGAL_WORLD
    assert "3" in seen.value.message
    assert "2" in seen.value.message
    world = grouped("n0")
    other = world.join_command("n1")
    with pytest.raises(Refused) as seen:
        world.submit(dataclasses.replace(other, shape=dataclasses.replace(other.shape, replacement_group_size=1)))
    assert seen.value.reason is Reason.SHAPE_MISMATCH
    assert seen.value.details["replacement_group_size.run"] == "2"


@pytest.mark.rule("D9")
def test_enough_nodes_in_broken_units_are_too_few() -> None:
    """Nobody waits for ever because the leftovers of two units are as many as a whole one."""
    world = grouped("n0", "n1", "n2", "n3", nnodes=(2, 4))
    world.start()
    world.kill("n1", "n3")
    world.advance(5)
    world.stopped("n0")
    assert not world.is_training
    assert world.run.short_since is not None
    world.advance(590)
    assert world.run.is_open
    world.advance(20)
    assert not world.run.is_open
    assert "group g0 has 1 of 2 (n1 lost)" in world.run.close_reason
    assert "join_timeout" in world.run.close_reason


@pytest.mark.rule("D9")
def test_a_unit_that_is_whole_again_ends_the_wait() -> None:
    world = grouped("n0", "n1", nnodes=(2, 4))
    world.advance(2)
    world.start()
    world.kill("n1")
    world.advance(300)
    world.rejoin("n1")
    assert world.active() == ["n0", "n1"]
    world.start()
    world.kill("n1")
    world.advance(400)
    assert world.run.is_open, "each wait has its own time"


@pytest.mark.rule("A5", "F1")
def test_a_drained_node_that_joins_makes_no_place_taken_by_its_sister() -> None:
    """Its group cannot be chosen: neither of them counts, and the run does not become too large."""
    world = grouped("n0", "n1", "n5", nnodes=(2, 4))
    world.advance(2)
    world.drain("n5")
    world.leave("n5", stopped=True)
    world.join("n4", "n2", "n3")
    world.rejoin("n5")
    assert counts(world) == {"n0", "n1", "n2", "n3"}
    with pytest.raises(Refused) as seen:
        world.submit(Undrain(NodeId("n5")))
    assert seen.value.reason is Reason.RUN_FULL


@pytest.mark.rule("A5", "D7")
def test_a_node_in_quarantine_does_not_make_its_group_whole_where_there_is_no_place_for_it() -> None:
    world = Grouped(2, 4, wish=SettingsWish(max_node_failures=1))
    world.join("n4", "n5")
    world.advance(2)
    world.start()
    world.exit("n5", 0, 1)
    assert world.run.quarantined.keys() == {"n5"}
    world.kill("n5")
    world.advance(3)
    world.join("n0", "n1", "n2", "n3")
    with pytest.raises(Refused) as seen:
        world.rejoin("n5")
    assert seen.value.reason is Reason.RUN_FULL
    assert counts(world) == {"n0", "n1", "n2", "n3"}


@pytest.mark.rule("A5", "G11")
def test_who_is_well_again_takes_no_place_that_is_kept_for_the_rest_of_a_unit() -> None:
    world = grouped("n0", "n2", nnodes=(4, 4))
    world.ails("n0")
    world.join("n4")
    world.heals("n0")
    assert world.run.unhealthy.keys() == {"n0"}
    world.join("n3", "n5")
    assert world.active() == ["n2", "n3", "n4", "n5"]
