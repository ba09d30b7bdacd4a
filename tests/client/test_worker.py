"""`nvrx.worker` in real processes, on a real socket: what it sends, what it costs, and that it never harms training."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx.client.worker_sockets import Heard, WorkerSockets, word_in
from nvrx.core.hang import Section, Word
from nvrx.core.ids import LocalRank
from nvrx.worker import HEAD, MAGIC, MAX_STEP, SOCKET_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
MANY = "class Many:\n def __eq__(self, other): raise ValueError('the truth value of many is ambiguous')\n"
R0, R1 = LocalRank(0), LocalRank(1)


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[WorkerSockets]:
    made = WorkerSockets(tmp_path / "run", 2)
    yield made
    made.close()


def run_worker(script: str, path: str | None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a training script to its end; it has to end well."""
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **env}
    if path is not None:
        given[SOCKET_VARIABLE] = path
    source = f"import os, sys, time, nvrx.worker as worker\n{MANY}{script}"
    done = subprocess.run([sys.executable, "-c", source], env=given, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done


def heard(sockets: WorkerSockets, rank: LocalRank = R0) -> Word | None:
    """The last word that waits."""
    found = sockets.read_one(rank)
    return found.word if found is not None else None


def words(sockets: WorkerSockets, rank: LocalRank = R0) -> list[Word | None]:
    """Each word that waits."""
    found = []
    for fd, one in sockets.filenos().items():
        if one == rank:
            with socket.socket(fileno=os.dup(fd)) as channel:
                while True:
                    try:
                        found.append(word_in(channel.recv(4096)))
                    except BlockingIOError:
                        break
    return found


@pytest.mark.rule("G9")
def test_what_a_worker_tells_is_heard(sockets: WorkerSockets) -> None:
    pid = int(run_worker("worker.heartbeat(); print(os.getpid())", sockets.paths[0]).stdout)
    assert list(sockets.read()) == [Heard(R0, Word(), pid, may_have_said_more=False)]
    run_worker("worker.report_progress(7)", sockets.paths[1])
    assert (heard(sockets, R0), heard(sockets, R1)) == (None, Word(7))
    run_worker(f"worker.report_progress({MAX_STEP})", sockets.paths[1])
    assert heard(sockets, R1) == Word(MAX_STEP)


@pytest.mark.rule("G9")
def test_sections_nest_and_the_one_entered_last_counts(sockets: WorkerSockets) -> None:
    run_worker(
        "with worker.section('epoch'):\n"
        " with worker.section('checkpoint', timeout=600):\n"
        "  pass\n"
        " try:\n"
        "  with worker.section('evaluation', 60): raise KeyError\n"
        " except KeyError: pass\n",
        sockets.paths[0],
    )
    epoch = Word(None, Section("epoch", None))
    assert words(sockets) == [
        epoch,
        Word(None, Section("checkpoint", 600.0)),
        epoch,
        Word(None, Section("evaluation", 60.0)),
        epoch,
        Word(),
    ]


@pytest.mark.rule("G9")
def test_sections_of_several_threads_are_told_apart(sockets: WorkerSockets) -> None:
    """A thread leaves its own section, also where another has entered one since."""
    run_worker(
        "import threading\n"
        "entered, leave = threading.Event(), threading.Event()\n"
        "def save():\n"
        " with worker.section('save', 9): entered.set(); leave.wait()\n"
        "thread = threading.Thread(target=save); thread.start(); entered.wait()\n"
        "with worker.section('train', 5): leave.set(); thread.join()\n",
        sockets.paths[0],
    )
    names = [one.section.name if one is not None and one.section is not None else None for one in words(sockets)]
    assert names == ["save", "train", "train", None]


@pytest.mark.rule("G9")
def test_a_million_calls_send_a_few_words_and_leave_room_for_a_section(sockets: WorkerSockets) -> None:
    """Nobody reads meanwhile: the kernel's queue may take no more than 11 words."""
    run_worker(
        "began = time.monotonic()\n"
        "while time.monotonic() < began + 1.5:\n"
        " for step in range(1000): worker.heartbeat(); worker.report_progress(step)\n"
        "with worker.section('save', 9): pass\n"
        "worker.section('last', 8).__enter__()\n",
        sockets.paths[0],
    )
    found = words(sockets)
    assert len(found) <= 8
    assert found[-1] == Word(999, Section("last", 8.0))


@pytest.mark.rule("G9")
def test_outside_nvrx_every_call_does_nothing(tmp_path: Path) -> None:
    script = (
        "worker.heartbeat(); worker.report_progress(3)\n"
        "with worker.section('x', timeout=1): pass\n"
        "print(worker.rank_map(), worker.failed_rank_map())\n"
    )
    done = run_worker(script, None)
    assert (done.stdout, done.stderr) == ("None None\n", "")
    gone = run_worker(script, str(tmp_path / "gone"))
    assert gone.stdout == "None None\n"
    assert gone.stderr.count("\n") == 1, "an agent that cannot be reached is said once"


@pytest.mark.rule("G9")
def test_an_agent_that_went_away_is_no_matter(sockets: WorkerSockets) -> None:
    run_worker(
        "worker.heartbeat()\n"
        f"os.unlink({sockets.paths[0]!r})\n"
        "worker._socket.close()\n"
        "with worker.section('x', 1): worker.report_progress(4)\n",
        sockets.paths[0],
    )


@pytest.mark.rule("G9")
@pytest.mark.parametrize(
    "call",
    [
        "worker.report_progress('seven')",
        "worker.report_progress(None)",
        "worker.report_progress(Many())",
        "worker.report_progress(float('nan'))",
        "worker.report_progress(-1)",
        "worker.report_progress(2 ** 63)",
        "worker.section('x', timeout='long').__enter__()",
        "worker.section('x', timeout=-1).__enter__()",
        "worker.section('x', timeout=float('nan')).__enter__()",
    ],
)
def test_a_slip_in_a_call_is_said_once_and_training_goes_on(sockets: WorkerSockets, call: str) -> None:
    done = run_worker(f"{call}\n{call}\nworker.report_progress(5)\nprint('trained')", sockets.paths[0])
    assert done.stdout == "trained\n"
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("nvrx.worker: ")


@pytest.mark.rule("G9")
def test_any_number_is_a_step_and_any_text_a_name(sockets: WorkerSockets) -> None:
    script = (
        "class Tensor:\n"
        " def __int__(self): return 41\n"
        "worker.report_progress(Tensor())\n"
        "worker.section('é' * 99 + chr(10), float('inf')).__enter__()\n"
    )
    run_worker(script, sockets.paths[0])
    assert heard(sockets) == Word(41, Section("é" * 32, None))
    run_worker("worker.section('a\\n\"b', 2).__enter__()", sockets.paths[0])
    assert heard(sockets) == Word(None, Section("a??b", 2.0)), "nothing in a name breaks a line of a log"


@pytest.mark.rule("G9")
@pytest.mark.parametrize(
    ("how", "speaks"),
    [
        ("if os.fork() == 0: worker.report_progress(9); os._exit(0)\nos.wait()", False),
        ("import multiprocessing as m\nfor kind in ('fork', 'spawn'): run(m.get_context(kind))", False),
        (
            "import subprocess as s\ns.run([sys.executable, '-c', 'import nvrx.worker as w; w.report_progress(9)'])",
            True,
        ),
    ],
    ids=["fork", "multiprocessing", "subprocess"],
)
def test_who_speaks_for_a_worker(sockets: WorkerSockets, tmp_path: Path, how: str, speaks: bool) -> None:
    """Children of a worker that has spoken, such as data loaders, do not; what its script starts as a program does."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, nvrx.worker as worker\n"
        "def child(): worker.report_progress(9)\n"
        "def run(kind):\n"
        " one = kind.Process(target=child); one.start(); one.join(); assert one.exitcode == 0\n"
        "if __name__ == '__main__':\n"
        " worker.heartbeat()\n" + "".join(f" {line}\n" for line in how.splitlines())
    )
    run_worker(f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')", sockets.paths[0])
    assert words(sockets) == [Word(), Word(9)] if speaks else [Word()]


@pytest.mark.rule("G9", "G10")
def test_a_worker_forked_from_a_process_that_only_imported_speaks_to_its_own_agent(sockets: WorkerSockets) -> None:
    script = (
        "if os.fork() == 0:\n"
        f" os.environ[{SOCKET_VARIABLE!r}] = {sockets.paths[1]!r}\n"
        " worker.report_progress(3); os._exit(0)\n"
        "assert os.wait()[1] == 0\n"
    )
    run_worker(script, None)
    assert heard(sockets, R1) == Word(3)
    run_worker("worker.heartbeat()\n" + script, None)
    assert heard(sockets, R1) == Word(3), "nor does a word said to nobody keep it from that"


@pytest.mark.rule("G9")
def test_it_imports_little() -> None:
    script = "print([one for one in ('asyncio', 'grpc', 'google', 'torch', 'socket', 'json') if one in sys.modules])"
    assert run_worker(script, None).stdout == "[]\n"


@pytest.mark.rule("G9", "H3")
def test_rank_maps_are_read_from_the_files_that_the_agent_names(tmp_path: Path) -> None:
    now, failed = tmp_path / "now.json", tmp_path / "failed.json"
    now.write_text('{"cycle": 2, "nodes": []}')
    failed.write_text("not yet whole {")
    script = "import json; print(json.dumps([worker.rank_map(), worker.failed_rank_map()]))"
    done = run_worker(script, None, NVRX_RANK_MAP=str(now), NVRX_FAILED_RANK_MAP=str(failed))
    assert json.loads(done.stdout) == [{"cycle": 2, "nodes": []}, None]


GARBAGE = [
    b"",
    b"x",
    b"\x80\x04\x95",
    MAGIC,
    HEAD.pack(b"NVX1", 0, 0, 0.0),
    HEAD.pack(MAGIC, 8, 0, 0.0),
    HEAD.pack(MAGIC, 255, 0, 0.0),
    HEAD.pack(MAGIC, 1, -1, 0.0),
    HEAD.pack(MAGIC, 6, 0, float("nan")),
    HEAD.pack(MAGIC, 6, 0, float("inf")),
    HEAD.pack(MAGIC, 6, 0, -1.0),
    HEAD.pack(MAGIC, 6, 0, 0.0),
    HEAD.pack(MAGIC, 2, 0, 0.0) + b"n" * 65,
    b"\0" * 4096,
    bytes(range(256)) * 200,
]


@pytest.mark.rule("G9", "J4")
@pytest.mark.parametrize("data", GARBAGE, ids=lambda data: f"{len(data)} bytes {data[:8].hex()}")
def test_what_is_no_word_is_passed_over(sockets: WorkerSockets, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.connect(sockets.paths[0])
        stranger.send(data)
        assert sockets.read_one(R0) is None
        stranger.send(HEAD.pack(MAGIC, 1, 6, 0.0))
        stranger.send(data)
    assert heard(sockets) == Word(6), "and hides no other"


@pytest.mark.rule("G9")
def test_a_queue_that_was_full_may_have_lost_a_word(sockets: WorkerSockets) -> None:
    limit = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as stranger:
        stranger.connect(sockets.paths[0])
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while sent < limit + 1000:
                sent += stranger.send(HEAD.pack(MAGIC, 1, 6, 0.0)) // HEAD.size
    assert sent < limit + 1000
    found = sockets.read_one(R0)
    assert found is not None
    assert found.may_have_said_more


@pytest.mark.rule("G9", "J3")
def test_sockets_are_this_users_alone_have_new_names_each_time_and_leave_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    first, second = WorkerSockets(directory, 2), WorkerSockets(directory, 2)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert len({*first.paths, *second.paths}) == 4
    first.close()
    assert sorted(map(str, directory.iterdir())) == sorted(second.paths), "what others listen at stays"
    second.close()
    assert list(directory.iterdir()) == []


@pytest.mark.rule("G9")
def test_what_a_killed_agent_left_is_removed(tmp_path: Path) -> None:
    dead = WorkerSockets(tmp_path, 1)
    for fd in dead.filenos():
        os.close(os.dup(fd))
    path = Path(dead.paths[0])
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    left = tmp_path / "worker-dead-0"
    stranger.bind(str(left))
    stranger.close()
    assert left.exists()
    WorkerSockets(tmp_path, 1).close()
    assert not left.exists()
    assert path.exists()
    dead.close()


@pytest.mark.rule("G9")
def test_a_run_time_directory_with_a_long_name_will_do(tmp_path: Path) -> None:
    """The name of a UNIX socket has 107 bytes at most."""
    made = WorkerSockets(tmp_path / ("long" * 30), 2)
    run_worker("worker.heartbeat()", made.paths[1])
    assert heard(made, R1) == Word()
    directory = Path(made.paths[0]).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    made.close()
    assert not directory.exists()
