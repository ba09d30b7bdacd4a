"""Fixtures of the conformance tests: a server of each kind, and torch's clients, each process started once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial

import pytest

from .clients import Client, Clients, start_clients
from .raw import RawClient
from .servers import STARTS, RunningStore, StoreHost, start_torch


@pytest.fixture(scope="session", params=sorted(STARTS, reverse=True))
def server_kind(request: pytest.FixtureRequest) -> str:
    """Each kind of server in turn."""
    kind: str = request.param
    return kind


@pytest.fixture(scope="session")
def server(server_kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreHost]:
    """A server process of that kind."""
    try:
        starting = STARTS[server_kind](tmp_path_factory.mktemp("server"))
    except NotImplementedError as error:
        pytest.skip(str(error))
    with starting as host:
        yield host


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreHost]:
    """torch's server once more, to compare another with; with itself, too, lest it differ from run to run."""
    with start_torch(tmp_path_factory.mktemp("oracle")) as host:
        yield host


@pytest.fixture(scope="session")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    """The process that holds torch's clients."""
    with start_clients(tmp_path_factory.mktemp("clients")) as clients:
        yield clients


@pytest.fixture
def store(server: StoreHost) -> RunningStore:
    """A store of the test's own, empty."""
    return server.open()


@pytest.fixture
def connect(clients: Clients, store: RunningStore) -> Callable[..., Client]:
    """Makes torch clients of the test's store: `connect(*prefixes, timeout_s=..., host=...)`."""
    return partial(clients.client, store)


@pytest.fixture
def client(connect: Callable[..., Client]) -> Client:
    """One torch client of the test's store."""
    return connect()


@pytest.fixture
def raw(store: RunningStore) -> Iterator[Callable[[], RawClient]]:
    """Makes connections to the test's store, closed when it ends."""
    with ExitStack() as opened:
        yield lambda: opened.enter_context(closing(store.raw()))
