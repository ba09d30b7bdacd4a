"""What the programs have in common that look at this node for the agent: they say what they see, line by line.

A line is a JSON object. They end when their standard input does, which is when the agent has gone. Imports nothing of
the agent.
"""

from __future__ import annotations

import json
import os
import select
import sys
from typing import Any

NOTHING_TO_WATCH = 3
"""Exit code where there is nothing of the kind on this host."""
_STDIN = 0


def say(**told: Any) -> None:
    """One line to the agent. Ends the program where nobody listens."""
    try:
        print(json.dumps(told), flush=True)
    except BrokenPipeError:
        os._exit(0)


def report(state: str = "HEALTHY", reason: str = "") -> None:
    """How things are."""
    say(state=state, reason=reason)


def asked_within(seconds: float) -> str | None:
    """What the agent asks; None where it asks nothing in that time. Ends the program when the agent has gone."""
    ready, _, _ = select.select([_STDIN], [], [], seconds)
    if not ready:
        return None
    data = os.read(_STDIN, 4096)
    if not data:
        sys.exit(0)
    return data.decode("ascii", "replace").strip()
