"""Writes a checkpoint on SIGTERM, which takes a while (W_SAVE_S), then exits 0."""

import os
import signal
import sys
import time
from types import FrameType

from .talk import Line, obey


def main() -> None:
    line = Line()

    def save(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        line.say("saving")
        time.sleep(float(os.environ.get("W_SAVE_S", "1")))
        line.say("saved")
        sys.exit(0)

    signal.signal(signal.SIGTERM, save)
    line.say("ready")
    obey(line)


if __name__ == "__main__":
    main()
