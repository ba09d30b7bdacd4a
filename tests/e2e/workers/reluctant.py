"""Says that it was told to end, and ends only when the test says so."""

import signal

from .talk import Line, obey

if __name__ == "__main__":
    line = Line()
    signal.signal(signal.SIGTERM, lambda number, frame: line.say("terminated"))
    line.say("ready")
    obey(line)
