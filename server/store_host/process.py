"""The store process: `python -m nvrx.server.store_host.process`. Started by a coordinator, outlives it (rule I6).

Serves one lasting port and one port per cycle, opens and closes the latter as the coordinator says over a Unix socket,
and ends when there is neither a coordinator nor a client of a cycle. Knows no run, cycle or rank.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import hmac
import logging
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import uvloop

from nvrx import logs
from nvrx.runtime_dir import make_private

from .bridge import BridgeServer, Complaints
from .control import (
    HELLO_WITHIN_S,
    MAX_LINE_BYTES,
    READY,
    VERSION,
    Kind,
    Message,
    Paths,
    Record,
    forget_record,
    read_message,
    within_limit,
    write_message,
    write_record,
)
from .ports import NoPort, PortRange, Ports
from .torch_server import TorchServer

log = logging.getLogger("nvrx.store")

READ_ONLY_BELOW = b"/nvrx/"
"""Keys of the lasting port that the coordinator writes; torch's clients put the first slash before every key."""
MAX_OPENED_AT_ONCE = 64


class StoreServer(Protocol):
    """A store on one port, whoever implements it."""

    port: int

    @property
    def clients(self) -> int: ...

    async def close(self) -> None: ...

    async def serve_privileged(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None: ...


@dataclass(frozen=True)
class Patience:
    """How long a process waits. `linger_s`: without coordinator and without clients of a cycle, for either."""

    linger_s: float = 10.0
    hello_within_s: float = HELLO_WITHIN_S


class StoreProcess:
    """All stores of one coordinator."""

    def __init__(self, kind: Kind, ports: Ports, paths: Paths, patience: Patience) -> None:
        self._kind = kind
        self._ports = ports
        self._paths = paths
        self._patience = patience
        self._cycles: dict[int, StoreServer] = {}
        self._lasting: StoreServer | None = None
        self._secret = secrets.token_hex(32)
        self._coordinators: set[asyncio.StreamWriter] = set()
        self._told_to_end = False
        self._news = asyncio.Event()
        self._complaints = Complaints(time.monotonic)

    async def run(self, lasting_port: int) -> None:
        """Serve until nobody needs it. Raises NoPort or OSError before it is ready."""
        self._lasting = await self._start(self._ports.lasting(lasting_port), READ_ONLY_BELOW)
        with contextlib.suppress(FileNotFoundError):
            self._paths.socket.unlink()
        with within_limit(self._paths.socket) as path:
            control = await asyncio.start_unix_server(self._talk, path, limit=MAX_LINE_BYTES)
        record = Record(VERSION, self._kind, os.getpid(), self._secret, self._ports.host, self._lasting.port)
        write_record(self._paths, record)
        print(READY, flush=True)
        log.info("store process %d serves the lasting store on %s:%d", record.pid, record.host, record.lasting_port)
        try:
            await self._needed()
        finally:
            control.close()
            forget_record(self._paths, record)
            for server in (self._lasting, *self._cycles.values()):
                await server.close()

    async def _needed(self) -> None:
        """Returns once there is neither a coordinator nor a client of a cycle, nor will be soon."""
        while True:
            while self._coordinators:
                self._news.clear()
                await self._news.wait()
            if self._told_to_end and not self._clients():
                log.info("no client is left, and the coordinator ended")
                return
            try:
                async with asyncio.timeout(self._patience.linger_s):
                    self._news.clear()
                    await self._news.wait()
            except TimeoutError:
                if not self._coordinators and not self._clients():
                    log.info("neither a coordinator nor a client came for %g s", self._patience.linger_s)
                    return

    def _clients(self) -> int:
        return sum(server.clients for server in self._cycles.values())

    async def _start(self, listening: socket.socket, read_only_below: bytes | None = None) -> StoreServer:
        if self._kind == "torch":
            return await TorchServer.start(listening)
        return await BridgeServer.start(listening, read_only_below, self._complaints, self._news.set)

    # ---- coordinators -------------------------------------------------------------------------------------

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._patience.hello_within_s):
                hello = await read_message(reader)
            secret = hello.get("secret") if hello is not None else None
            if not isinstance(secret, str) or not hmac.compare_digest(ascii(secret), ascii(self._secret)):
                log.warning("refused somebody on the control socket who does not know the secret")
                return
            self._coordinators.add(writer)
            self._told_to_end = False
            self._news.set()
            write_message(writer, self._state())
            while (message := await read_message(reader)) is not None:
                if message.get("do") == "store":
                    await self._speak_store(reader, writer)
                    return
                write_message(writer, await self._do(message))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.CancelledError) as error:
            # Cancelled as the process ends; asyncio's streams would log that with a traceback.
            log.debug("a control connection ended: %s", error)
        finally:
            if writer in self._coordinators:
                self._coordinators.discard(writer)
                self._news.set()
            writer.close()

    def _state(self) -> Message:
        assert self._lasting is not None
        clients = {str(port): server.clients for port, server in self._cycles.items()}
        return {"ok": True, "lasting_port": self._lasting.port, "ports": clients}

    async def _do(self, message: Message) -> Message:
        match message:
            case {"do": "open", "count": int(count)} if 0 < count <= MAX_OPENED_AT_ONCE:
                return await self._open(count)
            case {"do": "close", "ports": list(ports)}:
                await self._close(ports)
                return self._state()
            case {"do": "range", "low": int(low), "high": int(high)}:
                self._ports.choose_from(PortRange(low, high))
                return self._state()
            case {"do": "range", "low": None, "high": None}:
                self._ports.choose_from(None)
                return self._state()
            case {"do": "end"}:
                self._told_to_end = True
                return self._state()
            case {"do": "state"}:
                return self._state()
        return {"ok": False, "error": f"unknown request {str(message)[:128]}"}

    async def _open(self, count: int) -> Message:
        opened = []
        try:
            for _ in range(count):
                server = await self._start(self._ports.cycle())
                self._cycles[server.port] = server
                opened.append(server.port)
        except (NoPort, OSError) as error:
            if not opened:
                return {"ok": False, "error": str(error)}
        return {"ok": True, "ports": opened}

    async def _close(self, ports: Sequence[object]) -> None:
        for port in ports:
            server = self._cycles.pop(port, None) if isinstance(port, int) else None
            if server is not None:
                log.info("closed port %d with %d clients", server.port, server.clients)
                await server.close()
                self._ports.retire(server.port)

    async def _speak_store(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """From here on the connection is one to the lasting store, privileged."""
        write_message(writer, {"ok": True})
        assert self._lasting is not None
        await self._lasting.serve_privileged(reader, writer)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The store process of a coordinator.")
    parser.add_argument("--kind", choices=["bridge", "torch"], required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--lasting-port", type=int, default=0)
    parser.add_argument("--cycle-ports", type=int, nargs=2, metavar=("LOW", "HIGH"))
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--linger-s", type=float, default=Patience.linger_s, help=argparse.SUPPRESS)
    parser.add_argument("--hello-within-s", type=float, default=Patience.hello_within_s, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # a terminal's Ctrl-C is for the coordinator, the others for workers
    paths = Paths(options.directory, options.key)
    try:
        make_private(str(options.directory))
        logs.start("info", "text")
        ports = Ports(options.host, PortRange(*options.cycle_ports) if options.cycle_ports else None)
        process = StoreProcess(options.kind, ports, paths, Patience(options.linger_s, options.hello_within_s))
        uvloop.run(_run(process, options.lasting_port))
    except (NoPort, OSError) as error:
        print(f"failed {error}", flush=True)
        return 1
    finally:
        logs.finish()
    return 0


async def _run(process: StoreProcess, lasting_port: int) -> None:
    running = asyncio.ensure_future(process.run(lasting_port))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    gc.freeze()
    # A burst makes thousands of objects that stay; those that end leave no cycles behind.
    gc.set_threshold(50_000, 20, 100)
    with contextlib.suppress(asyncio.CancelledError):
        await running


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
