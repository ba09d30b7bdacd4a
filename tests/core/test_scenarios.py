"""The transcripts of tests/scenarios: whole stories, their answers as a person reads them.

`python -m pytest tests/core/test_scenarios.py --rewrite` writes the present answers; review the diff like code.
"""

from pathlib import Path

import pytest

from .transcript import rewrite

SCENARIOS = sorted((Path(__file__).parent.parent / "scenarios").glob("*.txt"))


@pytest.mark.rule("D1", "D2", "D5", "D8", "D9", "E5")
@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    written = path.read_text()
    told = rewrite(written)
    if request.config.getoption("--rewrite", default=False):
        path.write_text(told)
        return
    assert told.splitlines() == written.splitlines()


def test_there_are_scenarios() -> None:
    assert len(SCENARIOS) >= 8
