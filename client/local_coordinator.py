"""`--coordinator localhost:0` (rule A4): a coordinator of this node's own, as a child of the agent.

Started as the command it is, before any channel: server and client share no code but the core.
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Iterator

from nvrx.commandline import Failed
from nvrx.core.endpoint import parse_endpoint

from .config import JoinOptions

READY = "nvrx-coord listening on "
ENDS_WITHIN_S = 5.0
# It ends with its agent, however that ends.
_START = (
    "import signal; from nvrx.client.processes import set_parent_death_signal; "
    "set_parent_death_signal(signal.SIGTERM); from nvrx.server.cli import program; program()"
)


@contextlib.contextmanager
def with_local_coordinator(options: JoinOptions) -> Iterator[JoinOptions]:
    """The options with a real port in place of port 0; options without port 0 pass unchanged. Raises Failed."""
    if options.coordinators[0].port != 0:
        yield options
        return
    host = options.coordinators[0].host
    listen = f"[{host}]:0" if ":" in host else f"{host}:0"
    command = [sys.executable, "-c", _START, "serve", "--listen", listen, "--state", "memory", "--once"]
    command += ["--store", "rank0"]  # one node: nothing has to outlive it
    process = subprocess.Popen(
        [*command, "--log-level", "warning"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line.startswith(READY):
            raise Failed(f"the coordinator of this node did not start: exit code {process.wait()}")
        yield dataclasses.replace(options, coordinators=(parse_endpoint(line.removeprefix(READY)),))
    finally:
        process.terminate()
        try:
            process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
