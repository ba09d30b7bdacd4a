"""`make demo` in a short form: it ends well when all is well, and says so loudly when something is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]


def demo(*options: str) -> list[str]:
    return [sys.executable, str(REPOSITORY / "examples" / "demo.py"), "--steps", "80", *options]


def run_demo(temporary: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        demo(*options),
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )


def left_running(temporary: Path) -> list[str]:
    """Command lines that name the demonstration's directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # gone meanwhile
            continue
        if str(temporary) in line:
            found.append(line)
    return found


@pytest.mark.rule("C7", "D2", "D4", "D8", "E1", "G4", "H1")
def test_the_demo_ends_well_and_leaves_nothing(tmp_path: Path) -> None:
    done = run_demo(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "loss of step" in done.stdout
    assert "node-c was promoted" in done.stdout
    assert "every check held" in done.stdout
    assert "\x1b" not in done.stdout
    assert list(tmp_path.iterdir()) == []
    assert left_running(tmp_path) == []


def test_a_training_that_does_not_start_is_told_with_its_error(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise RuntimeError('no such data set')\n")
    done = run_demo(tmp_path, "--script", str(script))
    assert done.returncode == 1
    assert "DEMO FAILED: cycle 0 ended although nothing had been killed" in done.stdout
    assert "RuntimeError: no such data set" in done.stdout
    kept = next(tmp_path.glob("nvrx-demo-*"))
    assert f"kept in {kept}" in done.stdout
    assert (kept / "coordinator.log").exists()
    assert left_running(tmp_path) == []


def test_a_training_that_begins_anew_is_told(tmp_path: Path) -> None:
    """Everything but the training's own checkpoints works: the demonstration must see that."""
    script = tmp_path / "forgetful.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from examples import train_ddp\n"
        "train_ddp.load_newest_checkpoint = lambda directory, rank: None\n"
        "train_ddp.main()\n"
    )
    done = run_demo(tmp_path, "--script", str(script))
    assert done.returncode == 1
    assert "DEMO FAILED: cycle 1 began with step 1, which no checkpoint leads to" in done.stdout
    assert left_running(tmp_path) == []


def test_an_interrupt_ends_everything_and_leaves_nothing(tmp_path: Path) -> None:
    with subprocess.Popen(
        demo(),
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if "cycle 0 running" in line:
                break
        assert len(left_running(tmp_path)) > 4
        running.send_signal(signal.SIGINT)
        rest = running.stdout.read()
    assert running.returncode == 130
    assert "interrupted" in rest
    assert left_running(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
