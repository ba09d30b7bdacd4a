"""Several coordinators on one etcd: one leads, another takes over, workers run on (rule E6)."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import grpc
import pytest

from nvrx.channel import CHANNEL_OPTIONS
from nvrx.core.refused import Reason
from nvrx.errors import refused_from
from nvrx.v1 import run_pb2, run_pb2_grpc
from tests.etcd_cluster import EtcdCluster, Proxy

from .board import PATIENCE_S
from .cluster import RUN_ID
from .leaders import Leaders, logged_at

FOLLOWS = "following again"
LEADS = "leads in term"


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdCluster]:
    """Three members, for tests that leave all of them alone."""
    cluster = EtcdCluster(3)
    yield cluster
    cluster.close()


@pytest.fixture
def fragile() -> Iterator[EtcdCluster]:
    """Three members of a test's own."""
    cluster = EtcdCluster(3)
    yield cluster
    cluster.close()


@pytest.fixture
def leaders(etcd: EtcdCluster) -> Iterator[Leaders]:
    yield from _leaders(etcd)


@pytest.fixture
def on_fragile(fragile: EtcdCluster) -> Iterator[Leaders]:
    yield from _leaders(fragile)


def _leaders(etcd: EtcdCluster) -> Iterator[Leaders]:
    leaders = Leaders(etcd)
    try:
        yield leaders
    finally:
        leaders.close()


def goes_on(leaders: Leaders, before: list[int], cycle: int = 0) -> None:
    """The same workers run in the same cycle, nothing was charged, nobody lost; a failure then starts the next."""
    leaders.all_back()
    assert leaders.pids(cycle) == before
    run = leaders.run()
    assert (run.cycle, run.restarts_used, run.replacements_used) == (cycle, cycle, 0)
    assert not leaders.find("NodeLost")
    leaders.worker("b", cycle).tell("exit", code=6)
    leaders.workers(cycle + 1, 2)
    leaders.wait_for("CycleRunning", cycle + 1)
    failure = leaders.rank_map(cycle).failure
    assert (failure.node_id, failure.exit_code) == ("b", 6)
    assert leaders.run().restarts_used == cycle + 1
    assert [one.revision for one in leaders.facts] == list(range(1, len(leaders.facts) + 1))


@pytest.mark.rule("E6", "E5")
def test_a_killed_leader_is_replaced(leaders: Leaders) -> None:
    """Twice in a row: same pids, same cycle, revisions unbroken; the last coordinator alone goes on."""
    leaders.stand_all("x y z")
    agents, before = leaders.begin()
    leaders.coordinators["x"].send(signal.SIGKILL)
    second = leaders.leader(but="x")
    goes_on(leaders, before)
    before = leaders.pids(1)
    leaders.coordinators[second].send(signal.SIGKILL)
    leaders.leader(but=second)
    goes_on(leaders, before, cycle=1)
    for worker in leaders.workers(2, 2):
        worker.tell("exit", code=0)
    assert [one.ended() for one in agents] == [0, 0, 0]


@pytest.mark.rule("E6")
def test_a_suspended_leader_writes_and_says_nothing_when_it_wakes(leaders: Leaders) -> None:
    """Its watch and a call that came while it slept are answered NOT_LEADER, though the run has changed meanwhile."""
    leaders.stand_all("x y")
    _, before = leaders.begin()
    old = leaders.coordinators["x"]
    with grpc.insecure_channel(leaders.addresses["x"], options=CHANNEL_OPTIONS) as channel:
        stub = run_pb2_grpc.RunServiceStub(channel)
        seen = len(leaders.facts)
        watch = stub.WatchFacts(run_pb2.WatchFactsRequest(run_id=RUN_ID), timeout=2 * PATIENCE_S)
        assert [next(watch).fact.revision for _ in range(seen)][-1] == seen
        old.send(signal.SIGSTOP)
        asked = stub.GetRun.future(run_pb2.GetRunRequest(run_id=RUN_ID), timeout=2 * PATIENCE_S)
        leaders.leads("y")
        goes_on(leaders, before)
        after = len(leaders.facts)
        old.send(signal.SIGCONT)
        with pytest.raises(grpc.RpcError) as ended:
            next(watch)
        assert is_not_leader(ended.value)
        error = asked.exception(PATIENCE_S)
        assert isinstance(error, grpc.RpcError)
        assert is_not_leader(error)
    old.said(FOLLOWS)
    assert leaders.leader() == "y"
    leaders.all_back()
    assert len(leaders.facts) == after
    leaders.coordinators["y"].send(signal.SIGKILL)  # and it can lead again
    leaders.leads("x")
    goes_on(leaders, leaders.pids(1), cycle=1)


def is_not_leader(error: grpc.RpcError) -> bool:
    refused = refused_from(error)  # type: ignore[arg-type]
    return refused is not None and refused.reason is Reason.NOT_LEADER


@pytest.mark.rule("E6", "E7")
def test_sigterm_hands_over_at_once(leaders: Leaders) -> None:
    """The lease would be good for longer than this test waits."""
    leaders.stand_all("x y", ttl="600")
    _, before = leaders.begin()
    leaders.coordinators["x"].send(signal.SIGTERM)
    assert leaders.coordinators["x"].ended() == 0
    leaders.leads("y")
    goes_on(leaders, before)


@pytest.mark.rule("E6", "E7")
def test_sigterm_while_etcd_does_not_answer(on_fragile: Leaders, fragile: EtcdCluster) -> None:
    """Also with a fact on its way: it exits 0 within 5 s, and workers run on."""
    on_fragile.stand_all("x", ttl="60")
    agents, _ = on_fragile.begin()
    for member in fragile.members:
        member.signal(signal.SIGSTOP)
    on_fragile.worker("b").tell("exit", code=6)
    agents[1].said("failed: exit 6")
    on_fragile.coordinators["x"].send(signal.SIGTERM)
    assert on_fragile.coordinators["x"].ended(5.0) == 0
    assert on_fragile.worker("a").ended_at is None


@pytest.mark.rule("E6")
def test_members_of_etcd_end_and_the_leader_goes_on(on_fragile: Leaders, fragile: EtcdCluster) -> None:
    """One after the other, etcd's leader among them: the same coordinator leads all the time."""
    on_fragile.stand_all("x y", ttl="8")
    _, before = on_fragile.begin()
    for cycle, member in enumerate(fragile.members):
        member.kill()
        goes_on(on_fragile, before, cycle)
        before = on_fragile.pids(cycle + 1)
        member.start_again()
        fragile.wait_until_whole()
    assert on_fragile.leader() == "x"
    assert not [line for line in on_fragile.coordinators["x"].err if FOLLOWS in line]


@pytest.mark.rule("E6")
def test_a_leader_cut_off_from_etcd_steps_down_first(leaders: Leaders, etcd: EtcdCluster) -> None:
    """Nobody tells it: it follows before another leads, and leads again once it can."""
    proxy = Proxy(etcd.members[0].port)
    try:
        leaders.stand("x", state=etcd.state(leaders.prefix, [proxy.port]))
        leaders.leads("x")
        leaders.stand("y")
        leaders.watch()
        _, before = leaders.begin()
        proxy.cut()
        leaders.leads("y")
        old, new = leaders.coordinators["x"], leaders.coordinators["y"]
        assert logged_at(old, FOLLOWS) <= logged_at(new, LEADS)
        goes_on(leaders, before)
        proxy.mend()
        new.send(signal.SIGKILL)
        leaders.leads("x")
        goes_on(leaders, leaders.pids(1), cycle=1)
    finally:
        proxy.close()


@pytest.mark.rule("E6")
def test_etcd_without_a_quorum(on_fragile: Leaders, fragile: EtcdCluster) -> None:
    """Nobody leads, workers run on; when etcd is back somebody leads and the run goes on."""
    on_fragile.stand_all("x y")
    _, before = on_fragile.begin()
    for member in fragile.members[:2]:
        member.signal(signal.SIGSTOP)
    on_fragile.coordinators["x"].said(FOLLOWS)
    assert not on_fragile.is_leading("x")
    assert not on_fragile.is_leading("y")
    for member in fragile.members[:2]:
        member.signal(signal.SIGCONT)
    on_fragile.leader()
    goes_on(on_fragile, before)
