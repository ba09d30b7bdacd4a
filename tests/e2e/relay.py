"""A program: hands each connection to a UNIX socket on to an address, and so into the network that it runs in.

Knows nothing of what is said.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

_CHUNK_BYTES = 65536


async def _hand_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(_CHUNK_BYTES):
            target.write(data)
            await target.drain()
    target.close()


async def relay(path: str, host: str, port: int) -> None:
    """Relay for ever."""

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_hand_on(reader, there_writer), _hand_on(there_reader, writer))

    server = await asyncio.start_unix_server(join, path)
    print("relay ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    host, _, port = sys.argv[2].rpartition(":")
    asyncio.run(relay(sys.argv[1], host, int(port)))
