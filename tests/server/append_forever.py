"""Appends facts to a journal until it is killed; prints the last revision of each batch once it is kept."""

import itertools
import sys
from pathlib import Path

from nvrx.core.facts import NodeLost
from nvrx.core.ids import Incarnation, NodeId, Revision, RunId
from nvrx.server.journals import Row
from nvrx.server.journals.sqlite import SqliteJournal

BATCH = 3


def main() -> None:
    journal = SqliteJournal(Path(sys.argv[1]))
    for first in itertools.count(1, BATCH):
        rows = [
            Row(RunId("r"), Revision(place), NodeLost(float(place), NodeId("n"), Incarnation("i"), "x" * 500))
            for place in range(first, first + BATCH)
        ]
        journal.append(rows)
        print(first + BATCH - 1, flush=True)


if __name__ == "__main__":
    main()
