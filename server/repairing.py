"""`nvrx-coord repair`: tells a person what is damaged in a state directory, and what was done. Decides nothing."""

from __future__ import annotations

from pathlib import Path

import click

from nvrx.commandline import EXIT_USAGE, Failed, option

from .journals import JournalError, StateTaken
from .journals.repair import Found, NoJournal, RunFound, repair
from .journals.rows import readable


@click.command(
    "repair",
    epilog="""\b
Example: nvrx-coord repair --state-dir /var/lib/nvrx --dry-run

\b
Exit codes: 0 repaired, or nothing is damaged; 1 failure; 2 usage, or a coordinator runs on it.
""",
)
@option("--state-dir", type=click.Path(path_type=Path, file_okay=False), required=True, help="That of serve.")
@option("--dry-run", is_flag=True, envvar=None, help="Change nothing; say what would be kept.")
def repair_command(state_dir: Path, dry_run: bool) -> int:
    """Keep what is whole of a damaged journal: of each run the facts up to the damage.

    The damaged files stay beside it. Agents find another journal: they stop their workers, join anew, and train on in a
    cycle with a higher number.
    """
    try:
        done = repair(state_dir, dry_run=dry_run)
    except (StateTaken, NoJournal) as error:
        raise Failed(str(error), EXIT_USAGE) from error
    except JournalError as error:
        raise Failed(str(error)) from error
    if not done.found.is_damaged:
        print(f"the journal in {state_dir} is whole; nothing was changed")
    for line in _told(done.found):
        print(line)
    if done.aside is not None:
        print(f"the damaged journal is {done.aside}; the new one has the id {done.journal_id}")
    elif done.found.is_damaged:
        print("nothing was changed; without --dry-run it would be cut so")
    return 0


def _told(found: Found) -> list[str]:
    file = [f"the file: {found.problem}"] if found.problem is not None else []
    return [*file, *map(_run_told, found.runs)]


def _run_told(run: RunFound) -> str:
    kept = f"kept up to revision {run.kept}" if run.kept else "nothing kept"
    name = f"run {readable(run.run_id)}: {kept}"
    if run.problem is None:
        return name
    rest = "the rest cannot be counted" if run.cut is None else f"{run.cut} rows cut"
    return f"{name}, {rest} ({run.problem})"
