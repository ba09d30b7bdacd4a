"""The lasting store as the rest of the coordinator sees it. Knows no process, socket or record."""

from __future__ import annotations

from typing import Protocol

from nvrx.store.client import StoreClient


class Lasting(Protocol):
    """Where connections to the lasting store come from."""

    async def connect(self) -> StoreClient:
        """A new connection that may write all keys. Raises StoreGone while the store is being restarted."""
        ...
