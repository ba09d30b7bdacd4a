"""What the coordinator's end of the store process tells runs, without a store process."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx.core.ids import RunId
from nvrx.core.presence import HostedStores, StoreMode
from nvrx.server.hosted import Hosted
from nvrx.server.store_host.control import Paths
from nvrx.server.store_host.host import StoreConfig, StoreHost
from tests.core.driver import World

OFFER = HostedStores("10.9.9.9", 7701, (30_001, 30_002))


@pytest.mark.rule("I6", "D5")
def test_a_store_that_died_while_its_cycle_was_being_written_down_is_told_at_once(tmp_path: Path) -> None:
    """Else its workers, which fail before another process is there, would be charged a restart."""
    told: list[HostedStores] = []

    def offer(_: RunId, stores: HostedStores) -> None:
        told.append(stores)

    host = StoreHost(StoreConfig("bridge", "127.0.0.1", "10.9.9.9", Paths(tmp_path, "k"), tmp_path / "log"), offer)
    world = World(1, 1, store=StoreMode.BRIDGE)
    world.presence.stores = OFFER
    world.join("n0")
    world.start()
    hosted = Hosted(world.run, world.presence, 0.0)  # the process that offered the port is gone: none is open
    host.observe(hosted)
    assert told[-1].lost == {30_001}
    said = len(told)
    host.observe(hosted)
    assert len(told) == said
