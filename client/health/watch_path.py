"""A program: says again and again whether a path is there and can be read. `watch_path PATH SECONDS`.

A process of its own: on a network file system that hangs it hangs, and the agent sees that it says nothing.
"""

from __future__ import annotations

import os
import stat
import sys

from . import rounds


def problem(path: str) -> str | None:
    """What is wrong with a path; None where it is there and can be read."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            with os.scandir(path) as entries:
                next(entries, None)
        elif stat.S_ISREG(mode):
            with open(path, "rb") as file:
                file.read(1)
        elif not os.access(path, os.R_OK):  # to open a pipe or a device may do something
            return "cannot be read"
    except OSError as error:
        return error.strerror or repr(error)
    return None


def main(path: str, every_s: float) -> None:
    while True:
        found = problem(path)
        if found is None:
            rounds.report()
        else:
            rounds.report("UNHEALTHY", f"{path}: {found}")
        rounds.asked_within(every_s)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
