"""Fixtures of the tests on a real Slurm cluster: one for all of them, cleaned up after each."""

from collections.abc import Iterator

import pytest

from .slurm_cluster import SlurmCluster, problem, required

NODES = 8


@pytest.fixture(scope="session")
def _slurm() -> Iterator[SlurmCluster]:
    why = problem()
    if why is not None:
        pytest.fail(why) if required() else pytest.skip(why)
    cluster = SlurmCluster(NODES)
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def slurm(_slurm: SlurmCluster) -> Iterator[SlurmCluster]:
    yield _slurm
    _slurm.clean()
