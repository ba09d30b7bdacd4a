"""Options and profiles of the core's tests."""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "core", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("core")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write what the scenarios now say into their transcripts")
