"""Tells its environment and does what the test says; ends on SIGTERM like any program."""

from .talk import Line, obey

if __name__ == "__main__":
    obey(Line())
