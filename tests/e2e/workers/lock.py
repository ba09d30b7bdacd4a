"""Holds an exclusive lock file per node and local rank (W_LOCKS), and takes half a second to stop.

Exit code 77 says that another worker still held the lock.
"""

import fcntl
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from .talk import Line, obey


def main() -> None:
    name = f"{os.environ['NVRX_NODE_ID']}-{os.environ['LOCAL_RANK']}"
    with (Path(os.environ["W_LOCKS"]) / name).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(77)

        def stop(number: int, frame: FrameType | None) -> None:
            time.sleep(0.5)
            sys.exit(0)

        signal.signal(signal.SIGTERM, stop)
        line = Line()
        obey(line)


if __name__ == "__main__":
    main()
