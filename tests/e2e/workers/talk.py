"""A worker's end of its connection to the test. Standard library only: workers start fast."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class Line:
    """Says hello with the whole environment; then what the worker wants to say."""

    def __init__(self, role: str = "worker") -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(os.environ["W_SOCKET"])
        self._commands = self._socket.makefile("r")
        self.say("hello", role=role, pid=os.getpid(), env=dict(os.environ), argv=sys.argv[1:], cwd=os.getcwd())

    def say(self, event: str, **more: Any) -> None:
        self._socket.sendall(json.dumps({"event": event, "at": time.monotonic(), **more}).encode() + b"\n")

    def orders(self) -> Iterator[dict[str, Any]]:
        for line in self._commands:
            yield json.loads(line)


def obey(line: Line, more: Mapping[str, Callable[[dict[str, Any]], None]] | None = None) -> None:
    """Do as the test says; without an order, run for ever. `more`: what this worker can do beside."""
    for order in line.orders():
        if more is not None and order["do"] in more:
            more[order["do"]](order)
            continue
        match order["do"]:
            case "exit":
                sys.exit(order.get("code"))
            case "_exit":
                os._exit(order["code"])
            case "kill":
                os.kill(os.getpid(), order["signal"])
                signal.pause()
            case "print":
                rest = order["text"].encode() * order.get("times", 1)
                while rest:
                    rest = rest[os.write(order["fd"], rest) :]
                line.say("printed")
            case "raise":
                raise RuntimeError(order["text"])
            case other:
                raise AssertionError(f"no such order: {other}")
