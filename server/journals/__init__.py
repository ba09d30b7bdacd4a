"""Where facts are kept. Knows no rule: rows go in, in order, and come out the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from nvrx.core.facts import Fact
from nvrx.core.ids import JournalId, Revision, RunId


class JournalError(Exception):
    """The journal cannot be opened, read or written; the message is one line for a person."""


class StateTaken(JournalError):
    """Another coordinator has the state directory."""


class NotLeading(JournalError):
    """Another coordinator may write the journal by now: this one does not any more (rule E6)."""


@dataclass(frozen=True)
class Row:
    """A fact at its place in a run's journal."""

    run_id: RunId
    revision: Revision
    fact: Fact


class Journal(Protocol):
    """What the engine needs of a journal. Every call may block; `append` returns once the rows are durable."""

    @property
    def journal_id(self) -> JournalId: ...

    def load(self) -> Iterator[Row]:
        """All rows: by run, in the order of their revisions. Raises JournalError."""

    def append(self, rows: Sequence[Row]) -> None:
        """Keep all rows or none. Raises JournalError."""

    def read(self, run_id: RunId, first: Revision, limit: int) -> list[Row]:
        """At most `limit` rows of a run from revision `first` on. Raises JournalError."""

    def close(self) -> None: ...
