"""Fixtures of the coordinator's tests."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from nvrx.server.etcd.address import EtcdAddress
from tests.etcd_cluster import EtcdCluster

from .coordination import QUICK, serving
from .storing import StoreProcess, Stores, serving_store, store_process
from .story import Story, tell_story


@pytest.fixture
async def story() -> AsyncIterator[Story]:
    async with serving(timing=QUICK) as served:
        yield await tell_story(served)


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[StoreProcess]:
    async with store_process(tmp_path) as process:
        yield process


@pytest.fixture
async def stores(process: StoreProcess) -> AsyncIterator[Stores]:
    async with serving_store(process) as stores:
        yield stores


@pytest.fixture(scope="session")
def one_etcd() -> Iterator[EtcdCluster]:
    """A single member, for tests that end none."""
    cluster = EtcdCluster(1)
    yield cluster
    cluster.close()


@pytest.fixture
def prefix(one_etcd: EtcdCluster) -> EtcdAddress:
    """A prefix of this test's own on that member."""
    return one_etcd.address(uuid.uuid4().hex)
