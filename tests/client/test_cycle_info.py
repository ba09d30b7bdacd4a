"""The directory that follows a run's cycles."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from nvrx.client.cycle_info import CycleInfo
from nvrx.core.ids import CycleNumber, RunId

pytestmark = pytest.mark.rule("H5")


def _map(cycle: int, state: str, run: str = "run") -> str:
    return json.dumps({"run_id": run, "cycle": cycle, "state": f"CYCLE_STATE_{state}"})


def _info(directory: Path, run: str = "run") -> CycleInfo:
    return CycleInfo(directory, RunId(run))


def _keep(info: CycleInfo, cycle: int, state: str) -> None:
    info.keep(CycleNumber(cycle), _map(cycle, state), has_ended=state == "ENDED")


def _state(directory: Path, name: str) -> str:
    found = json.loads((directory / name).read_text())
    assert isinstance(found, dict)
    return str(found["state"])


def test_each_cycle_has_a_file_and_current_is_the_latest(tmp_path: Path) -> None:
    info = _info(tmp_path / "made")
    for cycle in range(11):
        _keep(info, cycle, "STARTING")
        assert os.readlink(tmp_path / "made" / "current") == f"run.cycle-{cycle}.json"
    _keep(info, 10, "ENDED")
    assert _state(tmp_path / "made", "current") == "CYCLE_STATE_ENDED"
    assert sorted(os.listdir(tmp_path / "made")) == sorted(["current", *(f"run.cycle-{one}.json" for one in range(11))])


def test_a_node_that_is_late_puts_nothing_back(tmp_path: Path) -> None:
    quick, late = _info(tmp_path), _info(tmp_path)
    _keep(quick, 9, "ENDED")
    _keep(quick, 10, "STARTING")
    _keep(late, 9, "STARTING")
    assert _state(tmp_path, "run.cycle-9.json") == "CYCLE_STATE_ENDED"
    assert os.readlink(tmp_path / "current") == "run.cycle-10.json"


def test_why_a_cycle_ended_may_be_put_right(tmp_path: Path) -> None:
    info = _info(tmp_path)
    _keep(info, 0, "ENDED")
    info.keep(CycleNumber(0), _map(0, "ENDED").replace("}", ', "failure": {}}'), has_ended=True)
    assert "failure" in json.loads((tmp_path / "run.cycle-0.json").read_text())


def test_the_next_run_takes_over_the_link_and_leaves_the_files(tmp_path: Path) -> None:
    _keep(_info(tmp_path, "7001"), 4, "ENDED")
    _keep(_info(tmp_path, "7002"), 0, "STARTING")
    assert os.readlink(tmp_path / "current") == "7002.cycle-0.json"
    assert (tmp_path / "7001.cycle-4.json").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_a_broken_file_is_written_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.cycle-0.json").write_text(content)
    (tmp_path / "current").write_text("not a link")
    _keep(_info(tmp_path), 0, "STARTING")
    assert _state(tmp_path, "current") == "CYCLE_STATE_STARTING"


def test_what_cannot_be_written_leaves_no_part(tmp_path: Path) -> None:
    (tmp_path / "run.cycle-0.json").mkdir()
    with pytest.raises(OSError, match=r"run\.cycle-0\.json"):
        _keep(_info(tmp_path), 0, "STARTING")
    assert os.listdir(tmp_path) == ["run.cycle-0.json"]
