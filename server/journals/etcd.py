"""The journal that several coordinators share: each fact a key in etcd, written by the leader alone (rule E6).

Below the prefix: `journal` (format and id), `committed` (number of the last batch that is whole) and
`runs/<run>/facts/<revision>`, of a large fact followed by `<revision>.001` and so on. Every transaction compares the
leader's key: who no longer leads writes nothing. A batch too large for one transaction goes in parts, `committed` with
the last; rows of a later batch do not count, and the next leader removes them. Called from threads; the calls to etcd
are made on the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
import zlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from nvrx.core.facts import Fact
from nvrx.core.ids import JournalId, Revision, RunId

from ..etcd.client import Etcd, EtcdError, Message, created_at, delete, end_of, get, put
from ..etcd.election import TermNumber
from ..etcd.lease import Lease
from . import JournalError, NotLeading, Row
from .codec import ManyDecoder, UnreadableFact, decode, encode, kind_of

FORMAT = 1
MAX_OPERATIONS = 120
"""Of a transaction; etcd's own default is 128."""
MAX_BYTES = 1024 * 1024
"""Of a transaction's keys and values; etcd's own default is 1.5 MiB for the whole request."""
PIECE_BYTES = MAX_BYTES - 4096
"""Of a row: a larger one is cut, with room left for the key and the header."""
MAX_PIECES = 16
DEFLATE_ABOVE = 512
"""Bytes. Small rows stay legible for etcdctl; those that come once for each node and cycle shrink to a fifth."""
PAGE_ROWS = 256
_REVISION_DIGITS = 20
_INDEX_DIGITS = 3
_OPEN_WITHIN_S = 5.0
_PLAIN, _DEFLATED = b"json", b"zlib"

Answer = TypeVar("Answer")


async def shared_journal_id(etcd: Etcd, *, within_s: float = _OPEN_WITHIN_S) -> JournalId:
    """The id of the journal below the prefix, made if there is none. Raises JournalError."""
    key = f"{etcd.address.prefix}/journal"
    fresh = {"format": FORMAT, "journal_id": uuid.uuid4().hex}
    try:
        answer = await etcd.transact(
            [created_at(key, 0)], [put(key, json.dumps(fresh).encode())], [get(key)], within_s=within_s
        )
    except EtcdError as error:
        raise JournalError(f"cannot open the journal {etcd.address}: {error}") from error
    if answer.succeeded:
        return JournalId(str(fresh["journal_id"]))
    try:
        known = json.loads(answer.responses[0].response_range.kvs[0].value)
        found, journal_id = int(known["format"]), JournalId(str(known["journal_id"]))
    except (ValueError, TypeError, KeyError) as error:
        raise JournalError(f"the key {key} of {etcd.address} is none of ours; give another prefix") from error
    if found > FORMAT:
        raise JournalError(
            f"the journal {etcd.address} has format {found}, this version reads up to {FORMAT}; start the newer "
            "nvrx-coord, or give another prefix"
        )
    return journal_id


@dataclass(frozen=True)
class _Piece:
    """A key and its value: a row, or one of several pieces of a large one."""

    key: str
    run_id: RunId
    revision: Revision
    batch: int
    kind: str
    form: bytes
    index: int
    count: int
    body: bytes


class EtcdJournal:
    """The journal as the leader of one term writes it."""

    def __init__(self, etcd: Etcd, journal_id: JournalId, leader_key: str, term: TermNumber, lease: Lease) -> None:
        """To be made on the loop that `etcd` lives on; its methods are for other threads."""
        self.journal_id = journal_id
        self._etcd = etcd
        self._lease = lease
        self._term = term
        self._is_led = created_at(leader_key, term)
        self._loop = asyncio.get_running_loop()
        self._committed_key = f"{etcd.address.prefix}/committed"
        self._runs_key = f"{etcd.address.prefix}/runs/"
        self._committed = 0

    # ---- what the engine calls ----------------------------------------------------------------------------

    def load(self) -> Iterator[Row]:
        self._committed = self._on_loop(self._read_committed())
        unfinished: list[str] = []
        expected: dict[RunId, int] = {}
        everything = self._pieces(self._runs_key, end_of(self._runs_key), PAGE_ROWS)
        for row in self._whole(self._kept(everything, unfinished), ManyDecoder().decode):
            wanted = expected.get(row.run_id, 1)
            if row.revision != wanted:
                raise JournalError(
                    f"the journal {self._etcd.address} lacks revision {wanted} of run {row.run_id}; restore it from a "
                    "snapshot of etcd"
                )
            expected[row.run_id] = wanted + 1
            yield row
        self._on_loop(self._remove(unfinished))

    def append(self, rows: Sequence[Row]) -> None:
        batch = self._committed + 1
        pairs = [
            (self._key(row.run_id, row.revision, index), value)
            for row in rows
            for index, value in enumerate(_pack(batch, row))
        ]
        parts = _parts(pairs)
        parts[-1].append((self._committed_key, str(batch).encode()))
        for part in parts:
            self._on_loop(self._write([put(key, value) for key, value in part]))
        self._committed = batch

    def read(self, run_id: RunId, first: Revision, limit: int) -> list[Row]:
        end = end_of(f"{self._runs_key}{run_id}/facts/")
        found = self._pieces(self._key(run_id, first), end, min(limit, PAGE_ROWS))
        return list(itertools.islice(self._whole(self._kept(found, [])), limit))

    def close(self) -> None:
        pass

    # ---- what etcd is asked -------------------------------------------------------------------------------

    def _on_loop(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """Raises JournalError, NotLeading where etcd was not reached while the lease was good."""
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop).result()
        except EtcdError as error:
            if not self._lease.is_good:
                raise NotLeading(f"term {self._term} is over: {error}") from error
            raise JournalError(f"cannot use the journal {self._etcd.address}: {error}") from error

    async def _read_committed(self) -> int:
        found = await self._etcd.range(self._committed_key, within_s=self._lease.left_s)
        value = found.kvs[0].value if found.kvs else b"0"
        if not value.isdigit():
            raise JournalError(
                f"the key {self._committed_key} of {self._etcd.address} holds no number; give another prefix"
            )
        return int(value)

    async def _page(self, begin: str, end: str, limit: int) -> Message:
        return await self._etcd.range(begin, end, limit=limit, within_s=self._lease.left_s)

    def _pieces(self, begin: str, end: str, page_rows: int) -> Iterator[_Piece]:
        while begin:
            page = self._on_loop(self._page(begin, end, page_rows)).kvs
            for one in page:
                yield self._unpack(one.key.decode(errors="replace"), one.value)
            begin = f"{page[-1].key.decode()}\0" if len(page) == page_rows else ""

    async def _write(self, operations: list[Message]) -> None:
        """May be repeated: the same rows would be written again, and by nobody but the leader of this term."""
        answer = await self._etcd.transact([self._is_led], operations, within_s=self._lease.left_s)
        if not answer.succeeded:
            raise NotLeading(f"term {self._term} is over: another coordinator leads, or may; nothing was written")

    async def _remove(self, keys: list[str]) -> None:
        for at in range(0, len(keys), MAX_OPERATIONS):
            await self._write([delete(key) for key in keys[at : at + MAX_OPERATIONS]])

    # ---- rows ---------------------------------------------------------------------------------------------

    def _key(self, run_id: RunId, revision: int, index: int = 0) -> str:
        """Pieces but the first have keys that follow the first one's."""
        whole = f"{self._runs_key}{run_id}/facts/{revision:0{_REVISION_DIGITS}d}"
        return f"{whole}.{index:0{_INDEX_DIGITS}d}" if index else whole

    def _unpack(self, key: str, value: bytes) -> _Piece:
        try:
            run_id, _, place = key.removeprefix(self._runs_key).split("/")
            revision = Revision(int(place[:_REVISION_DIGITS]))
        except ValueError as error:
            raise JournalError(f"the key {key[:256]!a} of {self._etcd.address} is none of ours; remove it") from error
        try:
            header, _, body = value.partition(b"\n")
            batch, kind, form, index, count = header.split(b" ")
            return _Piece(key, RunId(run_id), revision, int(batch), kind.decode(), form, int(index), int(count), body)
        except ValueError as error:
            raise self._unreadable(RunId(run_id), revision, error) from error

    def _kept(self, pieces: Iterable[_Piece], unfinished: list[str]) -> Iterator[_Piece]:
        """Those of batches that are whole; the keys of all others go to `unfinished`."""
        for piece in pieces:
            if piece.batch <= self._committed:
                yield piece
            else:
                unfinished.append(piece.key)

    def _whole(self, pieces: Iterable[_Piece], read: Callable[[str, bytes], Fact] = decode) -> Iterator[Row]:
        """Rows put together from their pieces; `read` decodes them. Raises JournalError where one is missing."""
        held: list[_Piece] = []
        for piece in pieces:
            if held and (piece.run_id, piece.revision) != (held[0].run_id, held[0].revision):
                raise self._unreadable(held[0].run_id, held[0].revision, "a piece is missing")
            if piece.index != len(held):
                raise self._unreadable(piece.run_id, piece.revision, "a piece is missing")
            held.append(piece)
            if len(held) == piece.count:
                yield self._row(held, read)
                held = []
        if held:
            raise self._unreadable(held[0].run_id, held[0].revision, "a piece is missing")

    def _row(self, pieces: Sequence[_Piece], read: Callable[[str, bytes], Fact]) -> Row:
        first, body = pieces[0], b"".join(one.body for one in pieces)
        try:
            content = zlib.decompress(body) if first.form == _DEFLATED else body
            return Row(first.run_id, first.revision, read(first.kind, content))
        except (UnreadableFact, ValueError, zlib.error) as error:
            raise self._unreadable(first.run_id, first.revision, error) from error

    def _unreadable(self, run_id: RunId, revision: int, why: object) -> JournalError:
        return JournalError(
            f"the journal {self._etcd.address} has an unreadable row, run {run_id} revision {revision}: {why}"
        )


def _pack(batch: int, row: Row) -> list[bytes]:
    """A row's values, one for each piece: batch, kind, form, index and count, a line break, a part of the fact."""
    body, form = encode(row.fact).encode(), _PLAIN
    if len(body) > DEFLATE_ABOVE:
        body, form = zlib.compress(body), _DEFLATED
    bodies = [body[at : at + PIECE_BYTES] for at in range(0, len(body), PIECE_BYTES)]
    if len(bodies) > MAX_PIECES:
        raise JournalError(
            f"cannot keep {kind_of(row.fact)} of run {row.run_id} in etcd: {len(body)} bytes, at most "
            f"{MAX_PIECES * PIECE_BYTES}; use --state-dir for a run of this size"
        )
    kind = kind_of(row.fact).encode()
    return [
        b"%d %s %s %d %d\n%s" % (batch, kind, form, index, len(bodies), piece) for index, piece in enumerate(bodies)
    ]


def _parts(pairs: Sequence[tuple[str, bytes]]) -> list[list[tuple[str, bytes]]]:
    """Keys and values in groups that fit into one transaction each, with room for one more key; one group at least."""
    parts: list[list[tuple[str, bytes]]] = [[]]
    size = 0
    for key, value in pairs:
        needed = len(key) + len(value)
        if parts[-1] and (len(parts[-1]) == MAX_OPERATIONS or size + needed > MAX_BYTES):
            parts.append([])
            size = 0
        parts[-1].append((key, value))
        size += needed
    return parts
