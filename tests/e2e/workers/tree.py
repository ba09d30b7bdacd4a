"""Starts a child that ignores SIGTERM, then obeys; dies itself on SIGTERM and leaves the child behind."""

import signal
import subprocess
import sys

from .talk import Line, obey


def main() -> None:
    if sys.argv[1:] == ["child"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        obey(Line("child"))
        return
    child = subprocess.Popen([sys.executable, "-m", "tests.e2e.workers.tree", "child"])
    obey(Line())
    child.kill()


if __name__ == "__main__":
    main()
