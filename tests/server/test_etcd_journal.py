"""The journal that several coordinators share, on a real etcd: all rows of a batch or none, and the leader's alone."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest

from nvrx.core.facts import Device, Endpoint, Fact, NodeLeft, Placed, Seat, WorldChosen
from nvrx.core.ids import CycleNumber, GroupRank, Incarnation, InfraRank, LocalRank, NodeId, Revision, RunId
from nvrx.core.topology import OrderSource
from nvrx.server.etcd.address import EtcdAddress
from nvrx.server.etcd.client import Etcd, EtcdError, delete, put
from nvrx.server.journals import JournalError, NotLeading, Row
from nvrx.server.journals.codec import encode
from nvrx.server.journals.etcd import MAX_BYTES, MAX_OPERATIONS, MAX_PIECES, shared_journal_id

from .etcd_term import WAIT_S, Term, term
from .facts import EXAMPLES

R, S = RunId("r"), RunId("s-1")


def rows(run_id: RunId, facts: list[Fact], first: int = 1) -> list[Row]:
    return [Row(run_id, Revision(place), fact) for place, fact in enumerate(facts, start=first)]


def left(reason: str) -> NodeLeft:
    return NodeLeft(1.0, NodeId("n0"), Incarnation("life"), reason)


def noise(size: int, seed: int = 0) -> str:
    """Text that deflates to about half of its size."""
    return random.Random(seed).randbytes(size // 2).hex()


def revisions(found: list[Row], run_id: RunId = R) -> list[int]:
    return [row.revision for row in found if row.run_id == run_id]


async def tamper(term: Term, key: str, value: bytes | None) -> None:
    whole = f"{term.etcd.address.prefix}/{key}"
    await term.etcd.transact([], [put(whole, value) if value is not None else delete(whole)], within_s=WAIT_S)


def fact_key(run_id: RunId, revision: int) -> str:
    return f"runs/{run_id}/facts/{revision:020d}"


@pytest.mark.rule("E6")
async def test_rows_come_out_as_they_went_in(prefix: EtcdAddress) -> None:
    given = [*rows(R, EXAMPLES), *rows(S, EXAMPLES[:3])]
    async with term(prefix) as one:
        assert await one.load() == []
        await one.append(given[:4])
        await one.append(given[4:])
        assert await one.load() == given
        assert await one.read(R, 4, 3) == given[3:6]
        assert await one.read(R, 0, 1) == given[:1]
        assert await one.read(R, len(EXAMPLES), 10) == given[len(EXAMPLES) - 1 : len(EXAMPLES)]
        assert await one.read(RunId("nowhere"), 1, 10) == []


@pytest.mark.rule("E6")
async def test_runs_whose_names_begin_alike_are_kept_apart(prefix: EtcdAddress) -> None:
    names = [RunId(one) for one in ("a", "a-b", "a.b", "a b", "ab", "a~")]
    given = [row for name in names for row in rows(name, EXAMPLES[:2])]
    async with term(prefix) as one:
        await one.append(given)
        found = await one.load()
        for name in names:
            assert [row for row in found if row.run_id == name] == rows(name, EXAMPLES[:2])
            assert await one.read(name, 1, 10) == rows(name, EXAMPLES[:2])


@pytest.mark.rule("E6")
async def test_the_next_leader_has_the_same_journal_and_goes_on(prefix: EtcdAddress) -> None:
    given = rows(R, EXAMPLES)
    async with term(prefix, "a") as first:
        await first.append(given[:5])
    async with term(prefix, "b") as second:
        assert second.journal.journal_id == first.journal.journal_id
        assert second.number > first.number
        assert await second.load() == given[:5]
        await second.append(given[5:])
        assert await second.load() == given


@pytest.mark.rule("E6")
async def test_a_deposed_leader_writes_nothing(prefix: EtcdAddress) -> None:
    """Its lease is over at etcd, though it does not know: the transaction itself is refused."""
    given = rows(R, EXAMPLES)
    async with term(prefix, "a") as first:
        await first.append(given[:2])
        await first.etcd.revoke(first.lease.lease_id, within_s=WAIT_S)
        with pytest.raises(NotLeading, match="nothing was written"):
            await first.append(given[2:3])
        async with term(prefix, "b") as second:
            await second.load()
            with pytest.raises(NotLeading):
                await first.append(given[2:3])
            await second.append(given[2:4])
            with pytest.raises(NotLeading):
                await first.append([*given[2:3], *rows(S, EXAMPLES * 10)])
            assert await second.load() == given[:4]


@pytest.mark.rule("E6")
async def test_a_leader_whose_own_clock_says_that_it_is_over_asks_nobody(prefix: EtcdAddress) -> None:
    async with term(prefix) as one:
        await one.append(rows(R, EXAMPLES[:1]))
        one.lease.until = 0.0
        with pytest.raises(NotLeading):
            await one.append(rows(R, EXAMPLES[1:2], 2))


@pytest.mark.rule("E6")
@pytest.mark.parametrize("count", [MAX_OPERATIONS - 1, MAX_OPERATIONS, MAX_OPERATIONS + 1, 5 * MAX_OPERATIONS + 1])
async def test_a_batch_of_many_rows(prefix: EtcdAddress, count: int) -> None:
    given = rows(R, [left(str(number)) for number in range(count)])
    async with term(prefix) as one:
        await one.append(given)
        assert await one.load() == given
        assert (await one.keys())["committed"] == b"1"


@pytest.mark.rule("E6")
async def test_a_batch_of_many_bytes(prefix: EtcdAddress) -> None:
    """Rows that deflate to half a transaction each, and small ones between them."""
    given = rows(R, [left(noise(MAX_BYTES, place)) if place % 2 else left("small") for place in range(8)])
    assert sum(len(zlib.compress(encode(row.fact).encode())) for row in given) > 2 * MAX_BYTES
    async with term(prefix) as one:
        await one.append(given)
        assert await one.load() == given


@pytest.mark.rule("E6")
async def test_a_fact_larger_than_a_transaction_is_kept_in_pieces(prefix: EtcdAddress) -> None:
    """Also where pages end between its pieces, and where it is read by itself."""
    large = [left("before"), left(noise(5 * MAX_BYTES)), left("between"), left(noise(3 * MAX_BYTES)), left("after")]
    given = rows(R, [*large, *large])
    async with term(prefix) as one:
        await one.append(given)
        assert await one.load() == given
        for first in range(1, len(given) + 1):
            assert await one.read(R, first, 1) == given[first - 1 : first]
        assert await one.read(R, 2, 3) == given[1:4]


@pytest.mark.rule("E6")
async def test_a_piece_that_is_missing_is_told(prefix: EtcdAddress) -> None:
    async with term(prefix) as one:
        await one.append(rows(R, [left("x"), left(noise(5 * MAX_BYTES)), left("y")]))
        await tamper(one, f"{fact_key(R, 2)}.001", None)
        with pytest.raises(JournalError, match="unreadable row, run r revision 2: a piece is missing"):
            await one.load()


@pytest.mark.rule("E6")
async def test_a_fact_beyond_every_limit_is_refused_in_one_line(prefix: EtcdAddress) -> None:
    async with term(prefix) as one:
        await one.append(rows(R, EXAMPLES[:1]))
        with pytest.raises(JournalError, match=r"cannot keep NodeLeft of run r in etcd: \d+ bytes, at most") as seen:
            await one.append(rows(R, [left(noise(2 * (MAX_PIECES + 1) * MAX_BYTES))], 2))
        assert len(str(seen.value).splitlines()) == 1
        assert not isinstance(seen.value, NotLeading)
        assert revisions(await one.load()) == [1]


@pytest.mark.rule("E6")
@pytest.mark.parametrize("parts", [0, 1, 2])
async def test_a_crash_between_parts_leaves_nothing_of_the_batch(prefix: EtcdAddress, parts: int) -> None:
    """The leader ends after some parts: the next one does not count those rows, and removes them."""
    kept = rows(R, EXAMPLES[:3])
    batch = [*rows(R, [left("x")] * (2 * MAX_OPERATIONS + 10), 4), *rows(S, EXAMPLES[:2])]
    etcd = CrashesAfter(prefix)
    async with term(prefix, "a", etcd=etcd) as first:
        await first.append(kept)
        etcd.left = parts
        with pytest.raises(RuntimeError, match="crashed"):
            await first.append(batch)
        rows_there = [one for one in await first.keys() if one.startswith("runs/")]
        assert len(rows_there) == len(kept) + parts * MAX_OPERATIONS
        assert await first.read(R, 1, 10) == kept
    async with term(prefix, "b") as second:
        assert await second.load() == kept
        assert sorted(one for one in await second.keys() if one.startswith("runs/")) == [
            fact_key(R, row.revision) for row in kept
        ]
        await second.append(batch)
        assert [row for row in await second.load() if row.run_id == R] == [*kept, *batch[:-2]]


class CrashesAfter(Etcd):
    """The way to etcd of a leader that ends after so many transactions; None: not yet."""

    left: int | None = None

    async def transact(self, *given: Any, **named: Any) -> Any:
        if self.left == 0:
            raise RuntimeError("crashed")
        self.left = None if self.left is None else self.left - 1
        return await super().transact(*given, **named)


@pytest.mark.rule("E6")
@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        (fact_key(S, 3), None, "lacks revision 3 of run s-1"),
        (fact_key(S, 1), None, "lacks revision 1 of run s-1"),
        (fact_key(S, 2), b"1 Painted json 0 1\n{}", "unreadable row, run s-1 revision 2"),
        (fact_key(S, 2), b"1 NodeLeft json 0 1\n{", "unreadable row, run s-1 revision 2"),
        (fact_key(S, 2), b"1 NodeLeft zlib 0 1\nno such thing", "unreadable row, run s-1 revision 2"),
        (fact_key(S, 2), b"", "unreadable row, run s-1 revision 2"),
        (fact_key(S, 2), b"1 NodeLeft json 0 2\n{}", "revision 2: a piece is missing"),
        (fact_key(S, 2), b"1 NodeLeft json 1 2\n{}", "revision 2: a piece is missing"),
        ("runs/stranger", b"", "runs/stranger' of etcd://.* is none of ours"),
        ("runs/r/facts/x", b"", "runs/r/facts/x' of etcd://.* is none of ours"),
        ("committed", b"soon", "committed of etcd://.* holds no number"),
        (fact_key(S, len(EXAMPLES)), b"1 NodeLeft json 0 2\n{}", "a piece is missing"),
    ],
)
async def test_a_damaged_journal_is_refused_by_run_and_revision(
    prefix: EtcdAddress, key: str, value: bytes | None, told: str
) -> None:
    async with term(prefix) as one:
        await one.append([*rows(R, EXAMPLES), *rows(S, EXAMPLES)])
        await tamper(one, key, value)
        with pytest.raises(JournalError, match=told):
            await one.load()


@pytest.mark.rule("A8", "E6")
@pytest.mark.parametrize(
    ("value", "told"),
    [
        (b'{"format": 2, "journal_id": "x"}', "has format 2, this version reads up to 1"),
        (b"?", "none of ours"),
    ],
)
async def test_a_newer_format_and_a_strangers_key_are_refused(prefix: EtcdAddress, value: bytes, told: str) -> None:
    async with term(prefix) as one:
        await tamper(one, "journal", value)
        with pytest.raises(JournalError, match=told):
            await shared_journal_id(one.etcd)


@pytest.mark.rule("E6", "H4")
@pytest.mark.parametrize("nodes", [4_096, 8_192])
async def test_the_world_of_thousands_of_nodes_is_kept(prefix: EtcdAddress, nodes: int) -> None:
    """With 8 GPUs each, whose ids do not deflate; the larger one takes two pieces."""
    fact = world(nodes)
    async with term(prefix) as one:
        await one.append(rows(R, [fact]))
        values = [value for key, value in (await one.keys()).items() if key.startswith(fact_key(R, 1))]
        assert len(values) == nodes // 4_096
        assert sum(map(len, values)) < len(encode(fact)) / 4
        assert await one.load() == rows(R, [fact])


def world(nodes: int) -> WorldChosen:
    source = random.Random(7)

    def placed(place: int) -> Placed:
        devices = tuple(
            Device(LocalRank(one), f"GPU-{source.randbytes(16).hex()}", f"0000:{one:02x}:00.0", one // 4)
            for one in range(8)
        )
        name, life = NodeId(f"node-{place:05d}"), Incarnation(source.randbytes(16).hex())
        return Placed(
            name, life, f"10.1.{place // 256}.{place % 256}", InfraRank(place), str(place), None, None, devices
        )

    seats = tuple(Seat(placed(place), GroupRank(place)) for place in range(nodes))
    return WorldChosen(3.0, CycleNumber(0), OrderSource.PROCID, seats, (), Endpoint("10.0.0.1", 29500))


@pytest.mark.rule("E6")
async def test_what_etcd_refuses_is_told_in_its_words(prefix: EtcdAddress) -> None:
    async with term(prefix) as one:
        with pytest.raises(EtcdError, match="refuses: etcdserver: requested lease not found"):
            await one.etcd.revoke(12345, within_s=WAIT_S)
