"""Our rendezvous handler at odd moments: what it answers torch's agent, with a real coordinator and real stores.

The handlers of all nodes live in one process, asked by hand where torch's agent would ask.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .board import Board
from .cluster import RUN_ID, Cluster
from .hall import Hall, Worker
from .programs import MARKER, Program, kill_marked
from .torch_agents import python_path

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]
IMPORT_S = 60.0


class Handlers:
    """The process that holds the handlers."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="nvrx-e2e-"))
        self.board = Board()
        self.hall = Hall(self.board, self.directory / "hall")
        self._mark = uuid.uuid4().hex
        self._numbers = itertools.count()
        env = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "PYTHONPATH": python_path(self.directory),
            "W_SOCKET": str(self.directory / "hall"),
            MARKER: self._mark,
        }
        argv = [sys.executable, "-m", "tests.e2e.files_only", str(self.directory)]
        argv += [sys.executable, "-m", "tests.e2e.workers.rendezvous"]
        self.program = Program(self.board, "handlers", argv, env)

    @property
    def worker(self) -> Worker:
        return self.board.until(lambda: next(iter(self.hall.workers), None), "the process of the handlers")

    def ask(self, do: str, name: str, **more: Any) -> str:
        """Give an order; what its answer is called."""
        number = next(self._numbers)
        self.worker.tell(do, number=number, name=name, **more)
        return f"answer {number}"

    def answered(self, question: str) -> dict[str, Any]:
        return self.worker.said(question, IMPORT_S)

    def has_answer(self, question: str) -> bool:
        return any(one["event"] == question for one in self.worker.messages)

    def do(self, do: str, name: str, **more: Any) -> Any:
        answer = self.answered(self.ask(do, name, **more))
        assert "raised" not in answer, answer
        return answer["value"]

    def make(self, name: str, cluster: Cluster, nnodes: tuple[int, int] = (1, 1), **conf: Any) -> None:
        """A handler of a node that is called so."""
        settings = {"nproc_per_node": 1, "last_call": 0.1, "restart_backoff": 0, "log_dir": str(cluster.logs)}
        settings |= {"node_id": name, **conf}
        self.do(
            "make",
            name,
            endpoint=cluster.address,
            run_id=RUN_ID,
            min_nodes=nnodes[0],
            max_nodes=nnodes[1],
            conf=settings,
        )

    def next(self, name: str) -> dict[str, Any]:
        """A handler's place in a world, waited for."""
        found = self.do("next", name)
        assert isinstance(found, dict)
        return found

    def until_unwanted(self, name: str) -> None:
        """Ask as torch's agent does, until a handler says that its workers have to go."""
        self.board.until(lambda: self.do("waiting", name) > 0, f"{name} to have to go")

    def close(self) -> None:
        self.program.send(signal.SIGKILL)
        kill_marked(self._mark)
        self.hall.close()
        self.program.process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


@pytest.fixture(scope="module")
def process() -> Iterator[Handlers]:
    handlers = Handlers()
    try:
        yield handlers
    finally:
        handlers.close()


@pytest.fixture
def handlers(process: Handlers, cluster: Cluster) -> Handlers:
    """The same process for all tests: importing torch takes seconds. Its words are shown where a test fails."""
    cluster.board.describe_with(process.board.state)
    return process


def raised(answer: dict[str, Any]) -> tuple[str, str]:
    return answer.get("raised", ""), answer.get("text", "")


@pytest.mark.rule("J2")
def test_a_wrong_token_is_said_in_one_line(handlers: Handlers, cluster: Cluster) -> None:
    for name in ("right", "wrong"):
        (cluster.directory / name).write_text(f"token-{name}-0123456789\n")
    cluster.serve("--token-file", str(cluster.directory / "right"))
    handlers.make("token", cluster, token_file=str(cluster.directory / "wrong"))
    kind, text = raised(handlers.answered(handlers.ask("next", "token")))
    assert kind == "RendezvousError"
    assert "token" in text
    assert "0123456789" not in text
    assert len(text.splitlines()) == 1


@pytest.mark.rule("A2", "A5", "A3")
def test_one_node_too_many_waits_and_another_shape_is_refused(handlers: Handlers, cluster: Cluster) -> None:
    cluster.serve()
    handlers.make("only", cluster)
    assert handlers.next("only")["rank"] == 0
    handlers.make("many", cluster)
    waits = handlers.ask("next", "many")
    handlers.program.said("waiting for a place as long as the run lives")
    handlers.make("other", cluster, (1, 3))
    kind, text = raised(handlers.answered(handlers.ask("next", "other")))
    assert kind == "RendezvousError"
    assert "max_nodes: run has 1, this node gives 3" in text
    assert not handlers.has_answer(waits)
    assert handlers.do("shutdown", "only")
    assert raised(handlers.answered(waits)) == ("SystemExit", "0")
    assert cluster.wait_for("RunClosed").detail["state"] == "SUCCEEDED"


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ({"max_restart": "3"}, "max_restart: not known to nvrx; known are advertise_addr"),
        ({"max_restarts": "many"}, "--max-restarts"),
        ({"reopen": "perhaps"}, "give true or false"),
        ({"node_id": "a/b"}, "'a/b' has a '/'"),
        ({"tensor_parallel": "2"}, "world size 1"),
        ({"nproc_per_node": "none"}, "--rdzv-conf nproc_per_node=N"),
    ],
)
@pytest.mark.rule("A7", "B1")
def test_settings_that_cannot_be_meant_are_refused_before_anything_is_joined(
    handlers: Handlers, cluster: Cluster, conf: dict[str, str], words: str
) -> None:
    cluster.address = "127.0.0.1:1"
    settings = {"nproc_per_node": 1, "log_dir": str(cluster.logs)} | conf
    more = {"endpoint": cluster.address, "run_id": RUN_ID, "min_nodes": 1, "max_nodes": 1, "conf": settings}
    answer = handlers.answered(handlers.ask("make", "bad", **more))
    if "raised" not in answer:
        answer = handlers.answered(handlers.ask("next", "bad"))
    kind, text = raised(answer)
    assert kind == "RendezvousError"
    assert words in text


@pytest.mark.rule("E5", "E7", "E3")
def test_a_coordinator_that_is_killed_and_started_again_costs_nothing(handlers: Handlers, cluster: Cluster) -> None:
    coordinator = cluster.serve()
    listen = cluster.address
    for name in ("a", "b"):
        handlers.make(name, cluster, (2, 2))
    asked = [handlers.ask("next", name) for name in ("a", "b")]
    places = [handlers.answered(one)["value"] for one in asked]
    assert [one["rank"] for one in places] == [0, 1]
    for name in ("a", "b"):
        assert handlers.do("waiting", name) == 0
    cluster.wait_for("CycleRunning", 0)
    coordinator.send(signal.SIGKILL)
    coordinator.ended()
    handlers.program.said("lost the coordinator")
    assert [handlers.do("waiting", name) for name in ("a", "b")] == [0, 0]
    cluster.serve(listen=listen)
    cluster.all_back()
    assert [handlers.do("waiting", name) for name in ("a", "b")] == [0, 0]
    # Their store is served on: it is a process of its own.
    handlers.do("set", "a", key="k", value="v")
    assert handlers.do("get", "b", key="k") == "v"
    ends = [handlers.ask("shutdown", name) for name in ("a", "b")]
    assert [handlers.answered(one)["value"] for one in ends] == [True, True]
    assert cluster.wait_for("RunClosed").detail["state"] == "SUCCEEDED"
    assert cluster.run().restarts_used == 0


@pytest.mark.rule("E3", "E4")
def test_without_a_coordinator_for_its_grace_a_node_stops_and_ends(handlers: Handlers, cluster: Cluster) -> None:
    coordinator = cluster.serve()
    handlers.make("alone", cluster, coordinator_grace=0.5)
    handlers.next("alone")
    assert handlers.do("waiting", "alone") == 0
    coordinator.send(signal.SIGKILL)
    handlers.until_unwanted("alone")
    kind, text = raised(handlers.answered(handlers.ask("next", "alone")))
    assert kind == "RendezvousConnectionError"
    assert "gave up after 0.5 s" in text
    assert handlers.do("closed", "alone") is True


@pytest.mark.rule("E4")
def test_a_coordinator_with_another_journal_is_joined_anew(handlers: Handlers, cluster: Cluster) -> None:
    """It knows nothing of the cycle that the node works in, and numbers on from it."""
    coordinator = cluster.serve()
    listen = cluster.address
    handlers.make("again", cluster)
    assert handlers.next("again")["cycle"] == 0
    assert handlers.do("waiting", "again") == 0
    cluster.wait_for("CycleRunning", 0)
    cluster.forget_facts()
    coordinator.send(signal.SIGKILL)
    coordinator.ended()
    shutil.rmtree(cluster.state_dir)
    cluster.serve(listen=listen)
    handlers.until_unwanted("again")
    assert handlers.next("again")["cycle"] == 1
    assert handlers.do("waiting", "again") == 0
    assert handlers.do("shutdown", "again")


@pytest.mark.rule("F1", "E8", "C5")
def test_a_drained_node_gives_its_place_to_a_standby_and_gets_none_until_it_is_returned(
    handlers: Handlers, cluster: Cluster
) -> None:
    cluster.serve()
    for name in ("x", "y"):
        handlers.make(name, cluster, (1, 2))
    first = handlers.ask("next", "x")
    assert handlers.answered(first)["value"]["cycle"] == 0
    second = handlers.ask("next", "y")
    cluster.wait_for("NodeJoined", node="y")
    assert handlers.do("waiting", "x") == 0
    cluster.wait_for("CycleRunning", 0)
    assert cluster.view("drain", "x", "--immediate").exit_code == 0
    handlers.until_unwanted("x")
    excluded = handlers.ask("next", "x")
    assert handlers.answered(second)["value"]["cycle"] == 1
    assert not handlers.has_answer(excluded)
    assert handlers.do("waiting", "y") == 0
    cluster.wait_for("CycleRunning", 1)
    assert cluster.view("undrain", "x").exit_code == 0
    assert cluster.view("promote", "x", "--replace", "y", "--immediate").exit_code == 0
    handlers.until_unwanted("y")
    gone = handlers.ask("next", "y")
    assert handlers.answered(excluded)["value"]["cycle"] == 2
    assert cluster.view("stop").exit_code == 0
    handlers.until_unwanted("x")
    for answer in (handlers.answered(handlers.ask("next", "x")), handlers.answered(gone)):
        kind, text = raised(answer)
        assert kind == "RendezvousClosedError"
        assert "stopped by an operator" in text


@pytest.mark.rule("D2", "D4", "D5")
def test_workers_that_torchrun_restarts_by_itself_count_as_failed(handlers: Handlers, cluster: Cluster) -> None:
    """Until the run's own limit: then it fails for all."""
    cluster.serve()
    handlers.make("f", cluster, max_restarts=1)
    assert handlers.next("f")["cycle"] == 0
    assert handlers.do("waiting", "f") == 0
    assert handlers.next("f")["cycle"] == 1
    failure = cluster.rank_map(0).failure
    assert (failure.node_id, failure.exit_code) == ("f", 1)
    assert failure.message.startswith("torchrun stopped this node's workers by itself")
    kind, text = raised(handlers.answered(handlers.ask("next", "f")))
    assert kind == "RendezvousClosedError"
    assert "max_restarts" in text or "restarts" in text


@pytest.mark.rule("I1", "I2")
def test_the_first_node_serves_the_store_where_the_coordinator_has_none(handlers: Handlers, cluster: Cluster) -> None:
    cluster.serve("--store", "rank0")
    names = ("s", "t")
    for name in names:
        handlers.make(name, cluster, (2, 2))
    asked = [handlers.ask("next", name) for name in names]
    ports = set()
    for cycle in range(3):
        places = [handlers.answered(one)["value"] for one in asked]
        assert [(one["rank"], one["cycle"]) for one in places] == [(0, cycle), (1, cycle)]
        assert places[0]["store"] == places[1]["store"]
        ports.add(places[0]["store"])
        handlers.do("set", "t", key="cycle", value=str(cycle))
        assert handlers.do("get", "s", key="cycle") == str(cycle)
        assert [handlers.do("waiting", name) for name in names] == [0, 0]
        cluster.wait_for("CycleRunning", cycle)
        if cycle < 2:
            failed = handlers.ask("next", "t")
            handlers.until_unwanted("s")
            asked = [handlers.ask("next", "s"), failed]
    assert len(ports) == 3


@pytest.mark.rule("I1")
def test_a_coordinator_without_stores_is_said_to_be_of_no_use(handlers: Handlers, cluster: Cluster) -> None:
    cluster.serve("--store", "off")
    handlers.make("o", cluster)
    kind, text = raised(handlers.answered(handlers.ask("next", "o")))
    assert kind == "RendezvousError"
    assert "--store off" in text
