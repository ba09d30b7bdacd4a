"""Fixtures of the end-to-end tests."""

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from .cluster import Cluster


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(f"received {signal.Signals(number).name}")


@pytest.fixture(scope="session", autouse=True)
def end_in_order() -> Iterator[None]:
    """SIGTERM, as from `timeout`, ends the tests like Ctrl-C: what they started is ended, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    try:
        yield cluster
    finally:
        cluster.close()
