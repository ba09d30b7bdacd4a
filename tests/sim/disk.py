"""The simulated disk of the coordinator's host: rows as text, kept over the coordinator's death.

Knows no rule. Who reads from it gets facts decoded from text, as from the real journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from nvrx.core.ids import JournalId, Revision, RunId
from nvrx.server.journals import JournalError, Row
from nvrx.server.journals.codec import decode, encode, kind_of


@dataclass(frozen=True)
class _Text:
    run_id: RunId
    revision: Revision
    kind: str
    body: str

    def row(self) -> Row:
        return Row(self.run_id, self.revision, decode(self.kind, self.body))


@dataclass
class Disk:
    """What is durable. `on_durable` is called with each batch once it is."""

    on_durable: Callable[[Sequence[Row]], None]
    journal_id: JournalId = JournalId("journal-0")
    fails_next: bool = False
    lives: int = 0
    _rows: list[_Text] = field(default_factory=list)

    def write(self, rows: Sequence[Row]) -> None:
        if self.fails_next:
            self.fails_next = False
            raise JournalError("cannot write the journal: the simulated disk is full")
        texts = [_Text(one.run_id, one.revision, kind_of(one.fact), encode(one.fact)) for one in rows]
        self._rows += texts
        self.on_durable([one.row() for one in texts])

    def lose_all(self) -> None:
        """Somebody begins with an empty state directory: another journal."""
        self._rows.clear()
        self.lives += 1
        self.journal_id = JournalId(f"journal-{self.lives}")

    def rows(self) -> Iterator[Row]:
        return (one.row() for one in self._rows)


class DiskJournal:
    """The journal port of one life of the coordinator, on the disk."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.journal_id = disk.journal_id

    def load(self) -> Iterator[Row]:
        return self._disk.rows()

    def append(self, rows: Sequence[Row]) -> None:
        self._disk.write(rows)

    def read(self, run_id: RunId, first: Revision, limit: int) -> list[Row]:
        return [one for one in self._disk.rows() if one.run_id == run_id and one.revision >= first][:limit]

    def close(self) -> None:
        pass
