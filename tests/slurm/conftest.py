"""Fixtures of the tests on a real Slurm cluster: one for all of them, and a new one after a test that broke it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .deployment import Deployment
from .slurm_cluster import SlurmCluster, problem, required

NODES = 8


class _Kept:
    """The cluster between tests. To make one takes two seconds; to repair one, as long as Slurm's time-outs."""

    def __init__(self) -> None:
        self._cluster: SlurmCluster | None = None

    def clean(self) -> SlurmCluster:
        if self._cluster is not None and not self._cluster.is_clean():
            self.close()
        if self._cluster is None:
            self._cluster = SlurmCluster(NODES)
        return self._cluster

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None


@pytest.fixture(scope="session")
def _kept() -> Iterator[_Kept]:
    why = problem()
    if why is not None:
        pytest.fail(why) if required() else pytest.skip(why)
    kept = _Kept()
    try:
        yield kept
    finally:
        kept.close()


@pytest.fixture
def slurm(_kept: _Kept) -> SlurmCluster:
    return _kept.clean()


@pytest.fixture
def deployment(slurm: SlurmCluster, _kept: _Kept) -> Iterator[Deployment]:
    deployment = Deployment(slurm)
    try:
        yield deployment
    finally:
        if slurm.jobs():
            _kept.close()  # before what it runs is ended: it would start agents again
        deployment.close()
