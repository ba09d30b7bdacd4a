"""What a node's health checks are to be, from its options; what can be known to be wrong is refused before joining."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence

from nvrx.commandline import EXIT_USAGE, Failed

from .monitor import HealthWishes

LEAST_INTERVAL_S = 0.1


def health_wishes(command: str | None, interval_s: float, paths: Sequence[str], env: Mapping[str, str]) -> HealthWishes:
    """The command is split as a shell would, and run without one. Raises Failed."""
    if interval_s < LEAST_INTERVAL_S:
        raise Failed(f"--health-interval {interval_s:g} is too short; give {LEAST_INTERVAL_S:g} or more", EXIT_USAGE)
    return HealthWishes(_words(command, env), interval_s, tuple(os.path.abspath(path) for path in paths))


def _words(command: str | None, env: Mapping[str, str]) -> tuple[str, ...]:
    if command is None or not command.strip():
        return ()
    try:
        words = shlex.split(command)
    except ValueError as error:
        text = f"--health-check {command!a} cannot be split into words: {error}; close its quotes"
        raise Failed(text, EXIT_USAGE) from error
    if not words:
        return ()
    if shutil.which(words[0], path=env.get("PATH", os.defpath)) is None:
        why = "is not executable" if os.path.isfile(words[0]) else "not found"
        raise Failed(
            f"--health-check {words[0]}: {why}; it is run without a shell (give sh -c '...' for one)", EXIT_USAGE
        )
    return tuple(words)
