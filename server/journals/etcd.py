"""The journal that several coordinators share: each fact a key in etcd, written by the leader alone (rule E6).

Below the prefix: `journal` (format and id), `committed` (number of the last batch that is whole) and
`runs/<run>/facts/<revision>`. Every transaction compares the leader's key: who no longer leads writes nothing. A batch
too large for one transaction goes in parts, `committed` with the last; rows of a later batch do not count, and the next
leader removes them. Called from threads; the calls to etcd are made on the loop.
"""

from __future__ import annotations

import asyncio
import json
import uuid
import zlib
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from nvrx.core.ids import JournalId, Revision, RunId

from ..etcd.client import Etcd, EtcdError, Message, created_at, delete, end_of, get, put
from ..etcd.election import TermNumber
from ..etcd.lease import Lease
from . import JournalError, NotLeading, Row
from .codec import UnreadableFact, decode, encode, kind_of

FORMAT = 1
MAX_OPERATIONS = 120
"""Of a transaction; etcd's own default is 128."""
MAX_BYTES = 1024 * 1024
"""Of a transaction's keys and values; etcd's own default is 1.5 MiB for the whole request."""
DEFLATE_ABOVE = 4096
"""Bytes. Small rows stay legible for etcdctl; the world of thousands of nodes shrinks to a tenth and less."""
PAGE_ROWS = 256
_REVISION_DIGITS = 20
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
class _Found:
    """A row as it lies in etcd."""

    key: str
    batch: int
    row: Row


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
        expected: dict[RunId, int] = {}
        unfinished: list[str] = []
        begin = self._runs_key
        while begin:
            page = self._on_loop(self._page(begin, end_of(self._runs_key), PAGE_ROWS))
            for one in page:
                if one.batch > self._committed:
                    unfinished.append(one.key)
                    continue
                wanted = expected.get(one.row.run_id, 1)
                if one.row.revision != wanted:
                    raise JournalError(
                        f"the journal {self._etcd.address} lacks revision {wanted} of run {one.row.run_id}; restore it "
                        "from a snapshot of etcd"
                    )
                expected[one.row.run_id] = wanted + 1
                yield one.row
            begin = f"{page[-1].key}\0" if len(page) == PAGE_ROWS else ""
        self._on_loop(self._remove(unfinished))

    def append(self, rows: Sequence[Row]) -> None:
        batch = self._committed + 1
        parts = _parts([(self._key(row.run_id, row.revision), _pack(batch, row)) for row in rows])
        parts[-1].append((self._committed_key, str(batch).encode()))
        for part in parts:
            self._on_loop(self._write([put(key, value) for key, value in part]))
        self._committed = batch

    def read(self, run_id: RunId, first: Revision, limit: int) -> list[Row]:
        end = end_of(f"{self._runs_key}{run_id}/facts/")
        found = self._on_loop(self._page(self._key(run_id, first), end, limit))
        return [one.row for one in found if one.batch <= self._committed]

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
        return int(found.kvs[0].value) if found.kvs else 0

    async def _page(self, begin: str, end: str, limit: int) -> list[_Found]:
        found = await self._etcd.range(begin, end, limit=limit, within_s=self._lease.left_s)
        return [self._unpack(one.key.decode(), one.value) for one in found.kvs]

    async def _write(self, operations: list[Message]) -> None:
        """May be repeated: the same rows would be written again, and by nobody but the leader of this term."""
        answer = await self._etcd.transact([self._is_led], operations, within_s=self._lease.left_s)
        if not answer.succeeded:
            raise NotLeading(f"term {self._term} is over: another coordinator leads, or may; nothing was written")

    async def _remove(self, keys: list[str]) -> None:
        for at in range(0, len(keys), MAX_OPERATIONS):
            await self._write([delete(key) for key in keys[at : at + MAX_OPERATIONS]])

    # ---- rows ---------------------------------------------------------------------------------------------

    def _key(self, run_id: RunId, revision: int) -> str:
        return f"{self._runs_key}{run_id}/facts/{revision:0{_REVISION_DIGITS}d}"

    def _unpack(self, key: str, value: bytes) -> _Found:
        run_id, _, digits = key.removeprefix(self._runs_key).split("/")
        revision = int(digits)
        try:
            header, _, body = value.partition(b"\n")
            batch, kind, form = header.split(b" ")
            text = (zlib.decompress(body) if form == _DEFLATED else body).decode()
            row = Row(RunId(run_id), Revision(revision), decode(kind.decode(), text))
            return _Found(key, int(batch), row)
        except (UnreadableFact, ValueError, zlib.error) as error:
            raise JournalError(
                f"the journal {self._etcd.address} has an unreadable row, run {run_id} revision {revision}: {error}"
            ) from error


def _pack(batch: int, row: Row) -> bytes:
    """A row's value: batch, kind and form, a line break, the fact."""
    body, form = encode(row.fact).encode(), _PLAIN
    if len(body) > DEFLATE_ABOVE:
        body, form = zlib.compress(body), _DEFLATED
    if len(body) > MAX_BYTES:
        raise JournalError(
            f"cannot keep {kind_of(row.fact)} of run {row.run_id} in etcd: {len(body)} bytes, at most {MAX_BYTES}"
            " fit; use --state-dir for a run of this size"
        )
    return b"%d %s %s\n%s" % (batch, kind_of(row.fact).encode(), form, body)


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
