"""Fixtures of the coordinator's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from .coordination import QUICK, serving
from .story import Story, tell_story


@pytest.fixture
async def story() -> AsyncIterator[Story]:
    async with serving(timing=QUICK) as served:
        yield await tell_story(served)
