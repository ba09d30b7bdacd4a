"""torch's store clients in one process: a line of JSON read is one call, a line written its answer.

Every client has a thread of its own, so that one may be blocked while others go on. Knows nothing of the servers.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from .values import from_line, from_plain, to_line, to_plain

_writing = threading.Lock()


def _answer(**words: Any) -> None:
    with _writing:
        sys.stdout.buffer.write(to_line(words))
        sys.stdout.buffer.flush()


class _Client:
    """A store and the thread that uses it, call by call."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._store: Any = None
        self.accept = self._calls.put
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            try:
                result = self._do(call["op"], from_plain(call["args"]))
                _answer(id=call["id"], result=to_plain(result))
            # Whatever torch raises is the answer.
            except Exception as error:  # noqa: BLE001
                _answer(id=call["id"], error=type(error).__name__, text=str(error))

    def _do(self, op: str, args: list[Any]) -> Any:
        if op == "open":
            self._store = _open(*args)
            return threading.get_native_id()
        if op == "close":
            self._store = None
            return None
        if op == "clone":
            self._store = clients[args[0]].store.clone()
            return threading.get_native_id()
        return getattr(self._store, op)(*args)

    @property
    def store(self) -> Any:
        return self._store


def _open(host: str, port: int, timeout: timedelta, prefixes: list[str]) -> Store:
    store: Store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    for prefix in prefixes:
        store = PrefixStore(prefix, store)
    return store


clients: dict[int, _Client] = {}

if __name__ == "__main__":
    for line in sys.stdin.buffer:
        one = from_line(line)
        if one["client"] not in clients:
            clients[one["client"]] = _Client()
        clients[one["client"]].accept(one)
    # Without waiting for what still blocks.
    os._exit(0)
