"""Ignores SIGTERM."""

import signal

from .talk import Line, obey

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    obey(Line())
