"""Fixtures of the client's tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from .supervision import Bench


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    await bench.lines.open()
    yield bench
    await bench.close()
