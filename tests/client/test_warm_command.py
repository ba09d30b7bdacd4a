"""Which commands are warmed: read from their words alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvrx.client.warm_binding import Unwrapped, WarmBinding, unwrap
from nvrx.client.warm_command import (
    EnvironmentChange,
    NotWarm,
    WarmCommand,
    environment_change,
    read_command,
    shared_environment,
)

pytestmark = pytest.mark.rule("G10")


@pytest.mark.parametrize(
    ("line", "options", "kind", "target"),
    [
        ("python train.py --lr 1", "", "script", "train.py"),
        ("/opt/venv/bin/python3.12 -u ./a/train.py -c x", "-u", "script", "./a/train.py"),
        ("python3 -m package.train -m other", "", "module", "package.train"),
        ("python -OBum train", "-O -B -u", "module", "train"),
        (
            "python -W error -Wignore -Xdev -X utf8=1 -I t.py",
            "-W error -W ignore -X dev -X utf8=1 -I",
            "script",
            "t.py",
        ),
        ("python -uW error t.py", "-u -W error", "script", "t.py"),
    ],
)
def test_python_with_a_script_or_a_module_is_warmed(line: str, options: str, kind: str, target: str) -> None:
    words = line.encode().split()
    command = read_command(words)
    assert isinstance(command, WarmCommand)
    assert (b" ".join(command.options).decode(), command.kind) == (options, kind)
    assert command.argv[command.words_before] == target.encode()
    assert command.argv == tuple(words)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("./train.py", "train.py is no python"),
        ("bash -c python", "bash is no python"),
        ("torchrun train.py", "torchrun is no python"),
        ("numactl --membind=0 python train.py", "numactl is no python"),
        ("pypy3 train.py", "pypy3 is no python"),
        ("pythonw train.py", "pythonw is no python"),
        ("python -c pass", "option -c is not one"),
        ("python -i train.py", "option -i is not one"),
        ("python -mtrain", "option -mtrain is not one"),
        ("python --version", "option --version is not one"),
        ("python -x train.py", "option -x is not one"),
        ("python -X importtime train.py", "option -X importtime is not one"),
        ("python -X", "option -X is not one"),
        ("python -m", "option -m is not one"),
        ("python -m a-b", "a-b is no module's name"),
        ("python", "names no script.py"),
        ("python -", "names no script.py"),
        ("python folder", "names no script.py"),
        ("python app.pyz", "names no script.py"),
        ("python -u", "names no script.py"),
    ],
)
def test_what_is_not_understood_is_not_warmed(line: str, why: str) -> None:
    command = read_command(line.encode().split())
    assert isinstance(command, NotWarm)
    assert why in command.reason


def test_only_names_of_places_may_differ_between_workers() -> None:
    place = {b"RANK": b"1", b"LOCAL_WORLD_SIZE": b"2", b"MASTER_PORT": b"1", b"NVRX_RANK_MAP": b"x", b"ROLE_NAME": b"d"}
    common = {b"PATH": b"/bin", b"PYTHONPATH": b"a=b", b"TORCHELASTIC_X": b"", b"MY_RANK": b"1"}
    base = shared_environment(common | place)
    assert base == common
    change = environment_change(base, common | place)
    assert isinstance(change, EnvironmentChange)
    assert (dict(change.set), change.removed) == (place, ())
    for other in ({**common, b"PATH": b"/"}, {**common, b"LD_PRELOAD": b"x"}, {b"PATH": b"/bin"}):
        assert isinstance(environment_change(base, other), NotWarm)
    assert environment_change(base | {b"NVRX_OLD": b""}, common) == EnvironmentChange((b"NVRX_OLD",), ())


def test_bindings_that_the_agent_writes_are_read(tmp_path: Path) -> None:
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("4-6,8\n")
    python = (b"python", b"train.py", b"--membind=3")

    def read(*words: bytes) -> Unwrapped | None:
        return unwrap([*words, *python], str(tmp_path))

    assert read() == Unwrapped(WarmBinding(), python)
    expected = WarmBinding((4, 5, 6, 8), b"bind 1")
    assert read(b"numactl", b"--cpunodebind=1", b"--membind=1") == Unwrapped(expected, python)
    assert read(b"numactl", b"--physcpubind=0-1,3", b"--localalloc") == Unwrapped(
        WarmBinding((0, 1, 3), b"local"), python
    )
    assert read(b"taskset", b"-c", b"2") == Unwrapped(WarmBinding((2,)), python)


@pytest.mark.parametrize(
    "words",
    [
        "numactl --cpunodebind=7",
        "numactl --interleave=all",
        "numactl --membind=0-1",
        "numactl --cpunodebind=+0",
        "numactl -a",
    ],
)
def test_other_bindings_are_left_to_their_program(tmp_path: Path, words: str) -> None:
    found = unwrap([*words.encode().split(), b"python", b"train.py"], str(tmp_path))
    assert found is None or found.argv[0] != b"python"
