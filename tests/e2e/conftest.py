"""Fixtures of the end-to-end tests."""

from collections.abc import Iterator

import pytest

from .cluster import Cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        yield cluster
    finally:
        cluster.close()
