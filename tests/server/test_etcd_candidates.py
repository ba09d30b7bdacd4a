"""Several coordinators on one etcd, in this process: who leads answers, the others name the leader (rule E6)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from nvrx.core.ids import JournalId
from nvrx.core.presence import StoreMode
from nvrx.server.etcd.address import EtcdAddress
from nvrx.server.etcd.client import Etcd, delete
from nvrx.server.office import SERVICES
from nvrx.server.store_host.control import read_record
from nvrx.server.store_host.host import paths_for
from nvrx.store.client import StoreClient
from nvrx.v1 import common_pb2, heartbeat_pb2, join_pb2, promote_pb2, rank_map_pb2, run_pb2, store_pb2

from .coordination import EXIT, RUN_WORKERS, SUCCEEDED, WAIT_S, HandAgent, exited, info_of, refused, world
from .standing import NOT_SERVING, Standing, standing

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.mark.rule("E6")
async def test_who_follows_names_the_leader_for_every_call(prefix: EtcdAddress) -> None:
    async with standing(prefix) as leader:
        await leader.leads()
        async with standing(prefix) as follower:
            await knows_leader(follower)
            stream = follower.heartbeats.Heartbeat()
            await stream.write(heartbeat_pb2.HeartbeatRequest())
            for call in (
                follower.joins.Join(join_pb2.JoinRequest()),
                follower.joins.Leave(join_pb2.LeaveRequest()),
                follower.maps.GetRankMap(rank_map_pb2.GetRankMapRequest()),
                follower.runs.ListFacts(run_pb2.ListFactsRequest()),
                follower.runs.WatchFacts(run_pb2.WatchFactsRequest()).read(),
                follower.promotes.StopRun(promote_pb2.StopRunRequest()),
                follower.stores.Get(store_pb2.GetRequest(key="x")),
                stream.read(),
            ):
                assert await refused(call, UNAVAILABLE, "NOT_LEADER") == {"leader": leader.address}
            await follower.becomes(NOT_SERVING)


async def knows_leader(follower: Standing) -> None:
    """Wait until a follower has seen who leads; before that it says that it knows nobody."""
    async with asyncio.timeout(WAIT_S):
        while not await refused(follower.runs.ListRuns(run_pb2.ListRunsRequest()), UNAVAILABLE, "NOT_LEADER"):
            pass


@pytest.mark.rule("E6")
async def test_reflection_works_on_who_follows(prefix: EtcdAddress) -> None:
    async with standing(prefix) as leader:
        await leader.leads()
        async with standing(prefix) as follower:
            await lists_services(follower)


async def lists_services(follower: Standing) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(follower.channel)
    call = stub.ServerReflectionInfo(timeout=WAIT_S)
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = {one.name for one in (await call.read()).list_services_response.service}
    assert set(SERVICES) < listed
    call.cancel()


@pytest.mark.rule("E6")
async def test_an_rpc_that_there_is_not_is_unimplemented_on_both(prefix: EtcdAddress) -> None:
    async with standing(prefix) as leader:
        await leader.leads()
        async with standing(prefix) as follower:
            for one in (leader, follower):
                call: Any = one.channel.unary_unary("/nvrx.v1.RunService/NoSuchThing")
                with pytest.raises(grpc.aio.AioRpcError) as seen:
                    await call(b"")
                assert seen.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.rule("E6", "E5")
async def test_the_next_leader_goes_on_in_a_higher_term(prefix: EtcdAddress) -> None:
    """The same places, the same facts, the next revision; a restart is decided as if nothing had been."""
    async with standing(prefix) as old:
        await old.leads()
        async with standing(prefix) as new:
            agents = await world(old)
            before, facts = await old.run_state(), await old.facts()
            terms = [agent.last.term for agent in agents if agent.last is not None]
            old.candidate.stop()
            for agent in agents:
                error = await agent.ended()
                assert error.code() is UNAVAILABLE
                assert info_of(error).reason == "SHUTTING_DOWN"
            await new.leads()
            assert await new.facts() == facts
            for agent in agents:
                agent.served, agent.last = new, None
                answer = await agent.open()
                assert answer.term > max(terms)
                assert (answer.revision, answer.journal_id) == (before.revision, before.journal_id)
            await agents[0].report(exited(0, 1))
            assert (await agents[1].until(RUN_WORKERS, 1)).revision > before.revision
            assert [one.revision for one in await new.facts()] == list(range(1, len(await new.facts()) + 1))


@pytest.mark.rule("E6")
async def test_a_node_that_joins_is_told_all_coordinators_the_leader_first(prefix: EtcdAddress) -> None:
    async with standing(prefix) as leader:
        await leader.leads()
        agent = HandAgent(leader, "n0")
        assert list((await agent.join()).coordinators) == [leader.address]
        async with standing(prefix) as second, standing(prefix) as third:
            others = sorted([second.address, third.address])
            async with asyncio.timeout(WAIT_S):
                while list((await agent.join()).coordinators) != [leader.address, *others]:
                    pass
        async with asyncio.timeout(WAIT_S):
            while list((await agent.join()).coordinators) != [leader.address]:
                pass


@pytest.mark.rule("E6")
async def test_a_leader_whose_lease_was_taken_away_follows_again(prefix: EtcdAddress) -> None:
    """As an operator can with etcdctl: it finds out when it renews the lease, and its calls end with NOT_LEADER."""
    async with standing(prefix, ttl_s=2.0) as one:
        await one.leads()
        agent = await HandAgent(one, "n0").enter()
        waiting = asyncio.create_task(agent.ended())
        async with standing(prefix, ttl_s=2.0) as other:
            await revoke_leader(prefix)
            assert info_of(await waiting).reason == "NOT_LEADER"
            await leader_of(one, other)


@pytest.mark.rule("E6")
async def test_a_leader_that_loses_its_key_writes_no_more(prefix: EtcdAddress) -> None:
    """The key is gone and its lease is not: the next fact is refused by etcd, and nothing of it is told or kept."""
    async with standing(prefix) as one:
        await one.leads()
        agent = HandAgent(one, "n0")
        await agent.join()
        facts = await one.facts()
        async with ctl(prefix) as etcd:
            await etcd.transact([], [delete(f"{prefix.prefix}/leader")], within_s=WAIT_S)
        assert await refused(HandAgent(one, "n1").join(), UNAVAILABLE, "NOT_LEADER") == {}
        await one.leads()
        assert await one.facts() == facts
        await HandAgent(one, "n1").join()
        assert len(await one.facts()) == len(facts) + 1


@pytest.mark.rule("E6")
async def test_a_watch_that_waits_for_a_key_ends_with_the_term(prefix: EtcdAddress, tmp_path: Path) -> None:
    """Also calls that have nothing to do with facts."""
    async with standing(prefix, store=StoreMode.BRIDGE, runtime_dir=str(tmp_path / "rt"), ttl_s=2.0) as one:
        await one.leads()
        waiting = asyncio.ensure_future(one.stores.Wait(store_pb2.WaitRequest(keys=["never"]), timeout=WAIT_S))
        await one.stores.Set(store_pb2.SetRequest(key="other", value=b"1"), timeout=WAIT_S)
        await revoke_leader(prefix)
        assert await refused(waiting, UNAVAILABLE, "NOT_LEADER") == {}


@pytest.mark.rule("E6", "I6")
async def test_two_coordinators_on_one_host_hand_the_store_process_on(prefix: EtcdAddress, tmp_path: Path) -> None:
    """They do not fight over it: who follows leaves it alone, the next leader takes it over with its open ports."""
    given: dict[str, Any] = {"store": StoreMode.BRIDGE, "runtime_dir": str(tmp_path / "rt"), "ttl_s": 2.0}
    async with standing(prefix, **given) as first:
        await first.leads()
        async with standing(prefix, **given) as second:
            agents = await world(first)
            assignment = (await agents[0].until(RUN_WORKERS, 0)).desired.assignment
            paths = paths_for(given["runtime_dir"], JournalId((await first.run_state()).journal_id))
            record = read_record(paths)
            assert record is not None
            worker = await StoreClient.connect("127.0.0.1", assignment.master_port)
            await worker.set("k", b"v")
            await revoke_leader(prefix)
            for agent in agents:
                await agent.ended()
            leader = await leader_of(first, second)
            for agent in agents:
                agent.served, agent.last = leader, None
                await agent.open()
            assert read_record(paths) == record
            assert await worker.get("k") == b"v"
            await agents[0].report(exited(0, 1))
            after = (await agents[1].until(RUN_WORKERS, 1)).desired.assignment
            assert after.lasting_store_port == assignment.lasting_store_port
            assert after.master_port != assignment.master_port
            assert (await leader.rank_map(0)).failure.cause == common_pb2.CAUSE_WORKER_FAILED
            worker.close()


@pytest.mark.rule("E6", "I6")
@pytest.mark.parametrize("survives", [True, False])
async def test_a_leader_on_another_host_has_a_store_of_its_own(
    prefix: EtcdAddress, tmp_path: Path, survives: bool
) -> None:
    """The running cycle keeps the store it has. A worker's failure there is blamed on the store if that has died."""
    first_host: dict[str, Any] = {"host": "127.0.0.1", "runtime_dir": str(tmp_path / "1")}
    second_host: dict[str, Any] = {"host": "127.0.0.2", "runtime_dir": str(tmp_path / "2")}
    async with standing(prefix, store=StoreMode.BRIDGE, **first_host) as first:
        await first.leads()
        async with standing(prefix, store=StoreMode.BRIDGE, **second_host) as second:
            agents = await world(first)
            before = (await agents[0].until(RUN_WORKERS, 0)).desired.assignment
            assert before.master_address == "127.0.0.1"
            record = read_record(paths_for(first_host["runtime_dir"], second.candidate.journal_id))
            assert record is not None
            worker = await StoreClient.connect(before.master_address, before.master_port)
            await worker.set("k", b"v")
            first.candidate.stop()
            await second.leads()
            for agent in agents:
                await agent.ended()
                agent.served, agent.last = second, None
                told = (await agent.open()).desired.assignment
                assert told.master_port in {before.master_port, 0}  # 0: it stands by
            assert await worker.get("k") == b"v"
            if not survives:
                os.kill(record.pid, signal.SIGKILL)
                await second.stores_lost(before.master_port)
            await agents[0].report(exited(0, 1))
            after = (await agents[1].until(RUN_WORKERS, 1)).desired.assignment
            assert after.master_address == "127.0.0.2"
            cause = common_pb2.CAUSE_WORKER_FAILED if survives else common_pb2.CAUSE_STORE_LOST
            assert (await second.rank_map(0)).failure.cause == cause
            assert (await second.run_state()).restarts_used == (1 if survives else 0)
            other = await StoreClient.connect(after.master_address, after.master_port)
            assert await other.count() == 0
            other.close()
            worker.close()


@pytest.mark.rule("E6")
async def test_with_once_the_next_leader_ends_when_the_outcome_is_known_to_all(prefix: EtcdAddress) -> None:
    """A member may come to it that has not heard the outcome from the one before."""
    async with standing(prefix, once=True) as one:
        await one.leads()
        async with standing(prefix, once=True) as other:
            agent = HandAgent(one, "n0", nnodes=(1, 1))
            await agent.join()
            await agent.open()
            await agent.started(0)
            await agent.report(exited(0, 0), exited(1, 0), phase=SUCCEEDED)
            await agent.until(EXIT)
            await agent.break_stream()
            async with asyncio.timeout(WAIT_S):
                await one.running
            await other.leads()
            agent.served = other
            await agent.open()
            await agent.until(EXIT)
            await agent.break_stream()
            async with asyncio.timeout(WAIT_S):
                await other.running


@contextlib.asynccontextmanager
async def ctl(where: EtcdAddress) -> AsyncIterator[Etcd]:
    """What an operator's etcdctl can do."""
    etcd = Etcd(where)
    yield etcd
    await etcd.close()


async def revoke_leader(where: EtcdAddress) -> None:
    """End the lease of whoever leads."""
    async with ctl(where) as etcd:
        found = await etcd.range(f"{where.prefix}/leader", within_s=WAIT_S)
        await etcd.revoke(found.kvs[0].lease, within_s=WAIT_S)


async def leader_of(*several: Standing) -> Standing:
    """Wait until one of them leads; asked of a follower, who knows."""
    waiting = {asyncio.create_task(one.leads()): one for one in several}
    done, rest = await asyncio.wait(waiting, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    return waiting[done.pop()]
