"""The network fails and heals, while every process lives on: coordinator and agents in namespaces of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest

from nvrx.v1 import common_pb2

from .cluster import OBEY, TIMING, Cluster, worker_script
from .hall import Worker
from .namespaces import Namespaces, NotAllowedError
from .programs import Program

COORDINATOR_HOST = "hub"
LONG_LEASE = ("--heartbeat-interval", "0.3", "--lease-ttl", "60", "--reconnect-grace", "60")
"""Far longer than an agent takes to find that the coordinator is out of reach (3 s)."""
CUT_OFF = "lost the coordinator .*: nothing heard for 3 s; workers run on"


@pytest.fixture
def network() -> Iterator[Namespaces]:
    try:
        made = Namespaces([COORDINATOR_HOST, *"abcd"])
    except NotAllowedError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    yield made
    made.close()


class Site:
    """A coordinator, and agents on hosts of the same names."""

    def __init__(self, cluster: Cluster, network: Namespaces) -> None:
        self.cluster, self.network = cluster, network
        self.agents: dict[str, Program] = {}

    def start(
        self, names: str, *options: str, timing: Sequence[str] = TIMING, command: Sequence[str] = OBEY
    ) -> list[Worker]:
        """Start all; the workers of the first cycle, once it is RUNNING."""
        listen = f"{self.network.address(COORDINATOR_HOST)}:0"
        inside = self.network.inside(COORDINATOR_HOST)
        self.cluster.serve("--insecure", listen=listen, timing=timing, wrapped=inside, relayed=True)
        for name in names.split():
            inside = self.network.inside(name)
            last_call = ("--last-call", "20")
            self.agents[name] = self.cluster.join(
                name, *options, *last_call, command=command, wrapped=inside, stop_grace="60"
            )
        self.cluster.wait_for("CycleRunning", 0)
        return self.cluster.workers(0, len(self.cluster.world(0)))

    def standby_again(self, name: str) -> None:
        """Wait until a node that was lost is a member anew, without workers."""
        lost = self.cluster.wait_for("NodeLost", node=name)
        again = self.cluster.wait_for("NodeJoined", node=name, after=lost.revision)
        first = self.cluster.find("NodeJoined", node=name)[0]
        assert again.detail["node"]["incarnation"] != first.detail["node"]["incarnation"]
        self.cluster.board.until(
            lambda: self.cluster.nodes()[name].state == common_pb2.NODE_STATE_STANDBY, f"{name} to stand by"
        )


@pytest.fixture
def site(network: Namespaces, cluster: Cluster) -> Site:
    return Site(cluster, network)


@pytest.mark.rule("E1", "E3", "E4", "D2")
def test_a_node_that_is_cut_off(site: Site) -> None:
    """Lost after its lease, a standby takes its place; back, it ends its old workers before it does anything else."""
    cluster = site.cluster
    old, other = site.start("a b c", "--nnodes", "2:3", command=worker_script("reluctant"))
    site.network.cut("a")
    assert "silent for" in cluster.wait_for("NodeLost", node="a").text
    other.said("terminated")
    other.tell("exit")
    assert [one.node for one in cluster.workers(1, 2)] == ["b", "c"]
    cluster.wait_for("CycleRunning", 1)
    site.agents["a"].said(CUT_OFF)
    assert old.ended_at is None

    lost = cluster.find("NodeLost", node="a")[0]
    site.network.heal("a")
    old.said("terminated")
    cluster.run()
    assert not cluster.find("NodeJoined", node="a", after=lost.revision), "joined while an old worker ran"
    old.tell("exit")
    old.ended()
    site.agents["a"].said("joining anew: .*declared lost")
    site.standby_again("a")
    assert not cluster.hall.find("a", 1)
    assert len(cluster.find("WorldChosen")) == 2
    assert [one.ended_at for one in cluster.workers(1, 2)] == [None, None]


@pytest.mark.rule("E1", "D3")
def test_two_nodes_cut_off_together(site: Site) -> None:
    """One new cycle for both; back together, they stand by and disturb nothing."""
    cluster = site.cluster
    before = site.start("a b c d", "--nnodes", "2:4")
    site.network.cut("a", "b")
    for name in "ab":
        cluster.wait_for("NodeLost", node=name)
    after = cluster.workers(1, 2)
    cluster.wait_for("CycleRunning", 1)
    assert [one.node for one in after] == ["c", "d"]
    assert [one.ended_at for one in before] == [None, None]
    site.network.heal("a", "b")
    for name in "ab":
        site.standby_again(name)
    for one in before:
        one.ended()
    assert [one.ended_at for one in after] == [None, None]
    assert len(cluster.find("WorldChosen")) == 2
    assert cluster.run().replacements_used == 1


@pytest.mark.rule("E1", "E3")
def test_the_coordinator_is_cut_off_for_less_than_a_lease(site: Site) -> None:
    """Nothing happens: same workers, no new fact."""
    cluster = site.cluster
    workers = site.start("a b", "--nnodes", "2", timing=LONG_LEASE)
    known = len(cluster.facts)
    site.network.cut(COORDINATOR_HOST)
    for agent in site.agents.values():
        agent.said(CUT_OFF)
    site.network.heal(COORDINATOR_HOST)
    for agent in site.agents.values():
        agent.said("the coordinator .* is back after")
    cluster.all_back()
    assert len(cluster.facts) == known
    for worker in workers:
        worker.tell("exit", code=0)
    assert [agent.ended() for agent in site.agents.values()] == [0, 0]


@pytest.mark.rule("E1", "E3")
def test_the_coordinator_is_cut_off_for_longer_than_the_leases(site: Site) -> None:
    """It hears nobody, so it judges nobody and says so; the same workers train on when it is back."""
    cluster = site.cluster
    workers = site.start("a b c", "--nnodes", "2:3")
    known = len(cluster.facts)
    site.network.cut(COORDINATOR_HOST)
    for agent in site.agents.values():
        agent.said(CUT_OFF)
    cluster.programs[0].said("waiting: none of 3 nodes is heard")
    assert "none of 3 nodes is heard" in cluster.run().waiting_reason
    site.network.heal(COORDINATOR_HOST)
    for agent in site.agents.values():
        agent.said("the coordinator .* is back after")
    cluster.all_back()
    assert not cluster.run().waiting_reason
    assert len(cluster.facts) == known
    for worker in workers:
        worker.tell("exit", code=0)
    assert [agent.ended() for agent in site.agents.values()] == [0, 0, 0]


@pytest.mark.rule("E1", "D9")
def test_the_coordinator_is_cut_off_for_good(site: Site) -> None:
    """The run ends when the join timeout is over; agents learn of it should they be heard again."""
    cluster = site.cluster
    site.start("a b", "--nnodes", "2", "--join-timeout", "3")
    site.network.cut(COORDINATOR_HOST)
    closed = cluster.wait_for("RunClosed")
    assert "0 of 2 joined; gone: a (" in closed.text
    assert "after waiting 3 s (join_timeout)" in closed.text
    site.network.heal(COORDINATOR_HOST)
    assert [agent.ended() for agent in site.agents.values()] == [1, 1]


@pytest.mark.rule("E1", "E3", "E4")
def test_a_node_that_hears_and_is_not_heard(site: Site) -> None:
    """It gives up its stream for want of answers before its lease is over, and learns of its loss when heard again."""
    cluster = site.cluster
    timing = ("--heartbeat-interval", "0.3", "--lease-ttl", "8", "--reconnect-grace", "1")
    old, _ = site.start("a b c", "--nnodes", "2:3", timing=timing)
    site.network.silence("a", COORDINATOR_HOST)
    site.agents["a"].said(CUT_OFF)
    cluster.wait_for("NodeLost", node="a")
    assert [one.node for one in cluster.workers(1, 2)] == ["b", "c"]
    assert old.ended_at is None
    site.network.unsilence("a", COORDINATOR_HOST)
    old.ended()
    site.agents["a"].said("joining anew: .*declared lost")
    site.standby_again("a")
    assert len(cluster.find("WorldChosen")) == 2


@pytest.mark.rule("E1", "E4")
def test_a_node_that_is_heard_and_does_not_hear(site: Site) -> None:
    """It breaks its stream, which the coordinator sees: lost after the reconnect grace."""
    cluster = site.cluster
    old, _ = site.start("a b c", "--nnodes", "2:3")
    site.network.silence(COORDINATOR_HOST, "a")
    site.agents["a"].said(CUT_OFF)
    cluster.wait_for("NodeLost", node="a")
    assert [one.node for one in cluster.workers(1, 2)] == ["b", "c"]
    assert old.ended_at is None
    site.network.unsilence(COORDINATOR_HOST, "a")
    old.ended()
    site.agents["a"].said("joining anew: .*declared lost")
    site.standby_again("a")
    assert len(cluster.find("WorldChosen")) == 2


@pytest.mark.rule("E3", "E4")
def test_workers_of_a_node_that_is_cut_off_may_be_ended_by_its_agent(site: Site) -> None:
    """`--on-partition stop`: when the lease is over, long before the link heals."""
    cluster = site.cluster
    old, _ = site.start("a b c", "--nnodes", "2:3", "--on-partition", "stop")
    site.network.cut("a")
    old.ended()
    site.agents["a"].said(r"joining anew: .* longer than the lease of 4 s \(--on-partition stop\)")
    assert [one.node for one in cluster.workers(1, 2)] == ["b", "c"]
    site.network.heal("a")
    site.standby_again("a")
    assert len(cluster.find("WorldChosen")) == 2
