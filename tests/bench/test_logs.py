"""The benchmark of logs measures what it says: all output is there, whichever way it went."""

import pytest

from bench import logs


@pytest.mark.parametrize("way", list(logs.WAYS))
@pytest.mark.parametrize("kind", list(logs.KINDS))
def test_a_turn_of_each_kind(kind: str, way: str) -> None:
    assert logs.measure(kind, 1, way) > 0.0


def test_missing_output_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logs.KINDS, "lines", "print('little')")
    with pytest.raises(SystemExit, match=r"rank-0\.out has 7 bytes"):
        logs.measure("lines", 1, "file")
