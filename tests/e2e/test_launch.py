"""`nvrx.launch` from real programs: functions and commands as workers."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .cluster import Cluster
from .programs import ROOT, Program

PROGRAM = Path(__file__).with_name("launching.py")


def _launching(cluster: Cluster, name: str, env: dict[str, str] | None = None) -> Program:
    return cluster.start(name, [sys.executable, str(PROGRAM), name, str(cluster.logs)], env)


@pytest.mark.rule("A4", "G1")
def test_a_function_of_the_program_itself_returns_a_value_on_each_rank(cluster: Cluster) -> None:
    program = _launching(cluster, "function")
    assert program.ended() == 0, program.tail()
    said = [line for line in program.out if line[0].isdecimal()]
    argv = ["function", str(cluster.logs)]
    assert said == [f"{rank}: one 42 {argv} __mp_main__" for rank in range(2)]


@pytest.mark.rule("D1")
def test_the_values_are_those_of_the_last_cycle(cluster: Cluster) -> None:
    program = _launching(cluster, "again")
    assert program.ended() == 0, program.tail()
    assert program.out[-1] == "{0: 1, 1: 1}"


@pytest.mark.rule("D5")
def test_a_failure_is_an_exception_with_the_exit_code(cluster: Cluster) -> None:
    program = _launching(cluster, "failure")
    assert program.ended() == 0, program.tail()
    assert program.out[-1] == "1 nvrx-node join ended with exit code 1; its last lines say why"


@pytest.mark.rule("G3")
def test_a_command_gets_its_arguments_as_text(cluster: Cluster) -> None:
    program = _launching(cluster, "command")
    assert program.ended() == 0, program.tail()
    assert (cluster.logs / "said").read_text() == "a b\n--\n3\n"
    assert program.out[-1] == "{}"


@pytest.mark.rule("G3")
def test_a_wrong_option_is_said_in_the_agents_words(cluster: Cluster) -> None:
    program = _launching(cluster, "usage")
    assert program.ended() == 1
    program.said("No such option.*--nodes")
    program.said(r"LaunchFailed: nvrx-node join ended with exit code 2")


@pytest.mark.rule("G4")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_the_program(cluster: Cluster, number: signal.Signals) -> None:
    program = _launching(cluster, "forever")
    worker = cluster.worker(None)
    program.send(number)
    worker.ended()
    assert program.ended() == -number
    cluster.board.until(lambda: not cluster.alive() or None, "all of its processes to be gone")


@pytest.mark.rule("G7")
def test_a_function_is_not_bound_to_numa_nodes_and_says_so(cluster: Cluster) -> None:
    program = _launching(cluster, "function", {"NVRX_GPUS_PER_NUMA": "1"})
    assert program.ended() == 0, program.tail()
    program.said("a function is not bound to NUMA nodes: NVRX_GPUS_PER_NUMA is not used")


def test_a_function_of_an_interactive_session_is_refused() -> None:
    program = "import nvrx\ndef work(): pass\nnvrx.launch(work)"
    ended = subprocess.run([sys.executable, "-"], input=program, text=True, capture_output=True, cwd=ROOT, timeout=60)
    assert ended.returncode == 1
    assert "TypeError: work is defined in an interactive session; put it into a module" in ended.stderr


def test_importing_the_package_imports_little() -> None:
    program = (
        "import sys, nvrx; print(sorted(one for one in sys.modules if one.startswith(('nvrx', 'grpc', 'asyncio'))))"
    )
    said = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, cwd=ROOT, timeout=60).stdout
    assert said.strip() == "['nvrx']"
