"""What people type: refused before anything is joined, with one line that says what to do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from .cluster import OBEY, RUN_ID, Cluster, worker_script
from .programs import COORDINATOR, NODE, Program

USAGE = 2
NOWHERE = ("--coordinator", "127.0.0.1:9")


def run_all(cluster: Cluster, commands: Sequence[Sequence[str]], program: Sequence[str] = NODE) -> list[Program]:
    """Run command lines side by side, to their ends."""
    started = [cluster.start(" ".join(one), [*program, *one]) for one in commands]
    for one in started:
        one.ended()
    return started


def refused(program: Program, *parts: str) -> None:
    """One line on standard error with all these parts, and exit code 2."""
    assert (program.exit_code, len(program.err), program.out) == (USAGE, 1, []), program.tail()
    for part in parts:
        assert part in program.err[0]


@pytest.mark.rule("A5")
def test_bad_node_counts_are_refused(cluster: Cluster) -> None:
    """C127: each of these is a usage error that shows the value."""
    values = ["8:6", "0:2", "-1:2", "a:b", "1:2:3", ":4", "4:", ""]
    found = run_all(cluster, [["join", *NOWHERE, "--nnodes", value, "--", "true"] for value in values])
    for value, program in zip(values, found, strict=True):
        refused(program, "nvrx-node join: ", "--nnodes", repr(value))


@pytest.mark.rule("A5")
def test_good_node_counts(cluster: Cluster) -> None:
    """C127: `4` is 4:4."""
    cluster.serve()
    found = run_all(cluster, [["check", "--coordinator", cluster.address, "--nnodes", one] for one in ("4", "2:2")])
    assert ["shape     4:4" in found[0].out[2], "shape     2:2" in found[1].out[2]] == [True, True]


@pytest.mark.rule("A4")
def test_bad_endpoints_are_refused(cluster: Cluster) -> None:
    """C128: all of these show the value; an IPv6 address in brackets is fine."""
    values = ["host", "host:", ":5000", "host:99999", "host:abc", "http://host:5000", "::1:5000"]
    found = run_all(cluster, [["join", "--coordinator", value, "--", "true"] for value in values])
    for value, program in zip(values, found, strict=True):
        refused(program, "--coordinator", value)
    (fine,) = run_all(cluster, [["check", "--coordinator", "[::1]:9"]])
    assert fine.exit_code == 4
    assert fine.out[-1].startswith("coordinator [::1]:9 not reached: ")


@pytest.mark.rule("G3")
def test_a_command_is_needed(cluster: Cluster) -> None:
    """C129: without a command, with and without a trailing `--`."""
    for program in run_all(cluster, [["join", *NOWHERE], ["join", *NOWHERE, "--"]]):
        refused(program, "no command", "-- python train.py")


@pytest.mark.rule("G3")
def test_a_stray_word_is_answered_with_the_line_as_meant(cluster: Cluster) -> None:
    """A command whose `--` was forgotten, or came late."""
    first, second = run_all(
        cluster, [["join", *NOWHERE, "python", "train.py"], ["join", *NOWHERE, "python", "--", "train.py", "-v"]]
    )
    refused(first, "'python'", "-- python train.py")
    refused(second, "'python'", "-- python train.py -v")


@pytest.mark.rule("G3")
def test_abbreviations_and_unknown_options_are_refused(cluster: Cluster) -> None:
    """`--nnode` is not `--nnodes`: tomorrow it could mean something else."""
    found = run_all(
        cluster,
        [
            ["join", *NOWHERE, "--nnode", "2", "--", "true"],
            ["join", *NOWHERE, "--nproc", "2", "--", "true"],
            ["join", "--coord", "127.0.0.1:9", "--", "true"],
            ["join", "--", "true"],
        ],
    )
    for program, option in zip(found, ("--nnode", "--nproc", "--coord", "--coordinator"), strict=True):
        refused(program, option)


@pytest.mark.rule("A4")
def test_a_coordinator_of_ones_own_is_for_one_node(cluster: Cluster) -> None:
    """C054: port 0 on loopback with several nodes: each would form a world of one."""
    hosts = ["localhost:0", "127.0.0.1:0", "[::1]:0"]
    commands = [["join", "--coordinator", host, "--nnodes", "2:2", "--", "true"] for host in hosts]
    commands.append(["join", "--coordinator", hosts[0], "--nnodes", "1:2", "--", "true"])
    for program in run_all(cluster, commands):
        refused(program, "one node only", "nvrx-coord serve")
    (far,) = run_all(cluster, [["join", "--coordinator", "far.example:0", "--", "true"]])
    refused(far, "far.example:0", "port 0")


@pytest.mark.rule("G2")
def test_a_loopback_coordinator_for_several_nodes_is_warned_of(cluster: Cluster) -> None:
    """C054: with a real port it may be meant, on one host."""
    cluster.serve()
    cluster.join("n0", "--nnodes", "2").said(f"warning .*{cluster.address} is reached from this host only")
    alone = cluster.join("n1", "--run-id", "alone")
    alone.said("joined run alone")
    assert not [line for line in alone.err if "warning" in line]


@pytest.mark.rule("B1", "J3")
def test_names_that_are_paths_are_refused(cluster: Cluster) -> None:
    """C143: nothing outside the log directory, and one line whatever the name holds."""
    names = ["a/b", "a\nb", "x" * 300, "\x1b[31mred", "../../x", "..", ""]
    logs = ["--log-dir", str(cluster.logs)]
    commands = [["join", *NOWHERE, *logs, "--node-id", name, "--", "true"] for name in names[:-1]]
    commands += [["join", *NOWHERE, *logs, "--run-id", name, "--", "true"] for name in names[:-1]]
    for program in run_all(cluster, commands):
        refused(program)
        assert program.err[0].isprintable()
    assert not list(cluster.logs.glob("*"))


@pytest.mark.rule("G3")
def test_help_of_every_command(cluster: Cluster) -> None:
    """C130: exit code 0 and text."""
    views = ["serve", "status", "nodes", "cycles", "rank-map", "lookup", "events"]
    found = run_all(cluster, [["--help"], ["-h"], ["join", "--help"], ["check", "-h"]])
    found += run_all(cluster, [["--help"], *([one, "--help"] for one in views)], COORDINATOR)
    for program in found:
        assert (program.exit_code, program.err) == (0, []), program.tail()
        assert len(program.out) > 5


@pytest.mark.rule("G3")
def test_commands_that_cannot_run_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    """Not found, a directory, not executable."""
    plain = tmp_path / "plain"
    plain.write_text("#!/bin/sh\n")
    words = ["no-such-program", str(tmp_path), str(plain), "no-such-script.py"]
    for word, program in zip(words, run_all(cluster, [["join", *NOWHERE, "--", word] for word in words]), strict=True):
        refused(program, word)


@pytest.mark.rule("G8")
def test_a_log_directory_that_cannot_be_written(cluster: Cluster, tmp_path: Path) -> None:
    """Said before anything is joined."""
    (tmp_path / "file").touch()
    (program,) = run_all(cluster, [["join", *NOWHERE, "--log-dir", str(tmp_path / "file" / "x"), "--", "true"]])
    refused(program, "--log-dir")


@pytest.mark.rule("G3")
def test_arguments_reach_the_worker_byte_for_byte(cluster: Cluster) -> None:
    """What stands after the first `--` is the worker's, without a shell; `localhost:0` needs nothing else."""
    words = ["a b", "", "--", "-h", "$HOME", "--nnodes", "*", "'", '"', "\\", "\udcff", "ü"]
    argv = [
        "join",
        "--coordinator",
        "localhost:0",
        "--log-dir",
        str(cluster.logs),
        "--",
        *worker_script("obey", *words),
    ]
    agent = cluster.start("agent", [*NODE, *argv])
    worker = cluster.worker(None)
    assert worker.argv == words
    assert worker.env["NVRX_RUN_ID"] == "default"
    worker.tell("exit", code=0)
    assert agent.ended() == 0


@pytest.mark.rule("A4", "D8")
@pytest.mark.parametrize("endpoint", ["localhost:0", "127.0.0.1:0", "[::1]:0"])
def test_one_node_alone(cluster: Cluster, endpoint: str) -> None:
    """Port 0 starts a coordinator below the agent, and both end with the run; a failing worker is restarted."""
    argv = ["join", "--coordinator", endpoint, "--log-dir", str(cluster.logs), "--max-restarts", "1"]
    agent = cluster.start("agent", [*NODE, *argv, "--", *OBEY])
    cluster.worker(None, 0).tell("exit", code=5)
    cluster.worker(None, 1).tell("exit", code=0)
    assert agent.ended() == 0
    cluster.board.until(lambda: not cluster.alive() or None, "all processes to be gone", 5.0)


@pytest.mark.rule("A4", "D5")
def test_one_node_alone_that_fails(cluster: Cluster) -> None:
    """The agent's exit code is the run's, and it says rank, node and exit code."""
    argv = ["join", "--coordinator", "localhost:0", "--log-dir", str(cluster.logs), "--max-restarts", "0"]
    agent = cluster.start("agent", [*NODE, *argv, "--node-id", "n0", "--", "sh", "-c", "echo oh dear >&2; exit 37"])
    assert agent.ended() == 1
    said = next(line for line in agent.err if "ending with exit code 1" in line)
    for part in ("rank 0", "n0", "exit 37", "oh dear", "max_restarts 0"):
        assert part in said


@pytest.mark.rule("G3")
def test_options_come_from_variables_and_the_command_line_wins(cluster: Cluster) -> None:
    """NVRX_<OPTION> for every option, in both programs' spelling."""
    cluster.serve()
    env = {
        "NVRX_COORDINATOR": cluster.address,
        "NVRX_RUN_ID": "other",
        "NVRX_NPROC_PER_NODE": "2",
        "NVRX_NODE_ID": "from-variable",
        "NVRX_LOG_DIR": str(cluster.logs),
        "NVRX_MAX_RESTARTS": "7",
        "NVRX_NNODES": "1:2",
        "NVRX_LAST_CALL": "0.1",
    }
    cluster.start("agent", [*NODE, "join", "--run-id", RUN_ID, "--nproc_per_node=1", "--", *OBEY], env)
    seen = cluster.worker("from-variable").env
    assert (seen["NVRX_RUN_ID"], seen["WORLD_SIZE"], seen["TORCHELASTIC_MAX_RESTARTS"]) == (RUN_ID, "1", "7")
    bad = cluster.start("bad", [*NODE, "join", "--", "true"], {**env, "NVRX_MAX_RESTARTS": "many"})
    bad.ended()
    refused(bad, "many", "NVRX_MAX_RESTARTS")


@pytest.mark.rule("A1", "E3")
def test_check(cluster: Cluster) -> None:
    """`nvrx-node check` says what join would do, reaches the coordinator and starts nothing."""
    cluster.serve()
    options = ["--node-id", "n7", "--nnodes", "2:3", "--nproc-per-node", "4", "--log-dir", str(cluster.logs)]
    good = cluster.start("good", [*NODE, "check", "--coordinator", cluster.address, *options, "--", "echo", "x"])
    bad = cluster.start("bad", [*NODE, "check", *NOWHERE, *options])
    odd = cluster.start("odd", [*NODE, "check", *NOWHERE, *options], {"SLURM_PROCID": "first"})
    assert good.ended() == 0
    said = "\n".join(good.out)
    for part in ("n7", "2:3 nodes, 4 workers each", "NODE_ID=n7", "echo x", f"coordinator {cluster.address} answers"):
        assert part in said
    assert bad.ended() == 4
    assert bad.out[-1] == "coordinator 127.0.0.1:9 not reached: connection refused"
    odd.ended()
    refused(odd, "SLURM_PROCID", "'first'")
    assert json.loads("\n".join(cluster.view("status", "--output", "json").out) or "null") is None


@pytest.mark.rule("J5", "J6")
def test_a_second_coordinator_fails_at_once(cluster: Cluster) -> None:
    """On the same port, and on the same state directory, with the pid of the first."""
    first = cluster.serve()
    other = str(cluster.directory / "other")
    port, state = run_all(
        cluster,
        [
            ["serve", "--listen", cluster.address, "--state-dir", other],
            ["serve", "--listen", "127.0.0.1:0", "--state-dir", str(cluster.directory / "state")],
        ],
        COORDINATOR,
    )
    refused(port, cluster.address, "--listen")
    refused(state, str(first.pid))


@pytest.mark.rule("J1")
def test_listening_beyond_loopback_needs_a_token(cluster: Cluster) -> None:
    """Or says aloud that it does without."""
    state = ["--state-dir", str(cluster.directory / "state")]
    (program,) = run_all(cluster, [["serve", "--listen", "0.0.0.0:0", *state]], COORDINATOR)
    refused(program, "--token-file", "--insecure")
    aloud = cluster.start("aloud", [*COORDINATOR, "serve", "--listen", "0.0.0.0:0", *state, "--insecure"])
    aloud.said("listening on 0.0.0.0:[1-9]")
    aloud.said("--insecure: everybody")
