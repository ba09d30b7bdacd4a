"""Answers SIGTERM with exit code 0 at once."""

import os
import signal

from .talk import Line, obey

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    line = Line()
    line.say("ready")
    obey(line)
