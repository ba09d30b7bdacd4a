"""Fixtures of the coordinator's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

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
