"""Several raw connections to one store, played step by step: after each step, all that each has received.

A step is over once every connection has had the answer to a ping, so two servers that do the same send the same bytes
in the same steps. Knows nothing of what a server should answer.
"""

from __future__ import annotations

from .raw import LIST_KEYS, Reply, delete, listed
from .servers import RunningStore


class Stage:
    """Connections by name. One that the server cut is replaced by a new one of that name."""

    def __init__(self, store: RunningStore, names: str) -> None:
        self._store = store
        self._connections = {name: store.raw() for name in names}
        self._settle()

    def do(self, who: str, *commands: bytes) -> dict[str, Reply]:
        """Send commands in one piece; what each connection received until all is done, where it received anything."""
        self._connections[who].send(b"".join(commands))
        return self._settle(who)

    def hang_up(self, who: str) -> dict[str, Reply]:
        """Close a connection and open another in its place."""
        self._replace(who)
        return self._settle(who)

    def _replace(self, who: str) -> None:
        self._connections[who].close()
        self._connections[who] = self._store.raw()

    def _settle(self, first: str = "") -> dict[str, Reply]:
        replies = {}
        for name in sorted(self._connections, key=lambda name: (name != first, name)):
            reply = self._connections[name].settled()
            if reply.cut:
                self._replace(name)
            if reply.cut or reply.data:
                replies[name] = reply
        return replies

    def close(self) -> None:
        for one in self._connections.values():
            one.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def clear(store: RunningStore) -> None:
    """Delete every key, so that the next play in this store counts from none. Queues stay: use other names."""
    with store.raw() as one:
        keys = listed(one.exchange(LIST_KEYS).data)
        one.exchange(*(delete(key) for key in keys))
