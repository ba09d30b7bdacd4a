"""A journal that lasts as long as its process: for tests and for trying things out."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

from nvrx.core.ids import JournalId, Revision, RunId

from . import Row


class MemoryJournal:
    """Keeps rows in memory."""

    def __init__(self) -> None:
        self.journal_id = JournalId(uuid.uuid4().hex)
        self._rows: dict[RunId, list[Row]] = {}

    def load(self) -> Iterator[Row]:
        for rows in self._rows.values():
            yield from rows

    def append(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._rows.setdefault(row.run_id, []).append(row)

    def read(self, run_id: RunId, first: Revision, limit: int) -> list[Row]:
        begin = max(first, 1) - 1
        return self._rows.get(run_id, [])[begin : begin + limit]

    def close(self) -> None:
        pass
