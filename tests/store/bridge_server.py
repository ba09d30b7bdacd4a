"""Our store server as a process: each line read opens one more store, whose port is printed; ends at the end of its
input. Knows no store process, which has tests of its own: what is judged here is the protocol.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from importlib import import_module

BRIDGE = "nvrx.server.store_host.bridge"


def _listening() -> socket.socket:
    """On every address, IPv4 and IPv6, as torch's server does."""
    listening = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
    listening.setblocking(False)
    return listening


async def main() -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    servers = []
    while await lines.readline():
        servers.append(await import_module(BRIDGE).BridgeServer.start(_listening()))
        print(servers[-1].port, flush=True)
    # Without waiting for clients that tests have left connected.
    os._exit(0)


if __name__ == "__main__":
    # The loop that the store process uses.
    import_module("uvloop").run(main())
