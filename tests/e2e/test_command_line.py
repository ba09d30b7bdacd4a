"""What people type: refused before anything is joined, with one line that says what to do."""

from __future__ import annotations

import json
import time
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


@pytest.mark.rule("A1")
def test_a_task_per_gpu_is_refused_before_it_joins(cluster: Cluster) -> None:
    """C031, C033: within 2 s, with the value; the coordinator never hears of it, and a run goes on."""
    cluster.serve()
    cluster.join("n0", "--nnodes", "1:2")
    worker = cluster.worker("n0")
    refusals = []
    for value in ("8", "8(x4)", "2(x3),1", "1(x3),2"):
        env = {"SLURM_JOB_ID": "5", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": value}
        began = time.monotonic()
        program = cluster.join("n1", "--nnodes", "1:2", env=env)
        program.ended()
        refusals.append((program, value, time.monotonic() - began))
    checked = cluster.start(
        "checked", [*NODE, "check", "--coordinator", cluster.address], {**env, "SLURM_LOCALID": "1"}
    )
    checked.ended()
    refused(checked, "SLURM_STEP_TASKS_PER_NODE=1(x3),2", "--ntasks-per-node=1")
    for program, value, _ in refusals:
        refused(program, f"SLURM_STEP_TASKS_PER_NODE={value}", "srun --ntasks=<nodes> --ntasks-per-node=1")
    assert min(took_s for _, _, took_s in refusals) < 2  # the others may have waited for a processor
    worker.tell("exit", code=0)
    cluster.wait_for("RunClosed")
    assert {fact.node for fact in cluster.find("NodeJoined")} == {"n0"}


@pytest.mark.rule("A2")
def test_another_environment_is_refused_and_the_others_go_on(cluster: Cluster) -> None:
    """Command, a variable and one asked for; what is a node's own may differ, and no secret is told to anybody."""
    cluster.serve()

    def join(name: str, *options: str, lr: str = "1", **env: str) -> Program:
        own = {"SLURM_JOB_ID": f"70{name[1:]}", "SLURM_PROCID": name[1:], "NCCL_DEBUG_FILE": f"/x/70{name[1:]}/{name}"}
        command = worker_script("obey", "--lr", lr, "--out", f"/ckpt/{name}", "--token", "S3CRET")
        flags = ("--nnodes", "2:4", "--same-env", "HF_HOME", *options)
        return cluster.join(name, *flags, command=command, env={"HF_HOME": "/hf", **own, **env})

    join("n0").said("joined run")
    odd = join("n1", lr="2", NCCL_DEBUG="INFO", HF_HOME="/other")
    assert odd.ended() == 3
    for part in ("--lr 1", "--lr 2", "NCCL_DEBUG: run has (unset), this node gives INFO", "HF_HOME: run has /hf"):
        assert part in odd.err[-1]
    join("n2")
    assert [one.node for one in cluster.workers(0, 2)] == ["n0", "n2"]
    join("n3", "--no-env-check", lr="3", NCCL_DEBUG="WARN").said("joined run")
    told = cluster.view("events", "--output", "json").out
    assert "NodeJoined" in "\n".join(told)
    assert "S3CRET" not in "\n".join([*told, *odd.err])


@pytest.mark.rule("A6")
def test_a_world_that_does_not_divide_is_refused(cluster: Cluster) -> None:
    """From Megatron's own flags; an option of ours wins over them."""
    join = ["join", *NOWHERE, "--nnodes", "2", "--nproc-per-node", "8"]
    command = ["--", "true", "--tensor-model-parallel-size", "4", "--pipeline_model_parallel_size=6"]
    by_flags, by_option = run_all(cluster, [[*join, *command], [*join, "--tensor-parallel", "2", *command]])
    for program, tensor in ((by_flags, 4), (by_option, 2)):
        product = f"{tensor * 6} = tensor {tensor} x pipeline 6 x context 1"
        refused(program, f"world size 16 = 2 nodes x 8 workers is not a multiple of {product}")


@pytest.mark.rule("A1", "B6", "B7")
def test_check_says_what_the_node_would_tell(cluster: Cluster) -> None:
    """Group, domain, sizes and the names of what is compared."""
    env = {"SLURM_ARRAY_JOB_ID": "36", "SLURM_ARRAY_TASK_ID": "3", "SLURM_NNODES": "2", "SLURM_PROCID": "0"}
    env |= {"NVRX_DOMAIN_ID": "D1", "NVRX_SAME_ENV": "ONE TWO", "ONE": "1", "NVRX_SEGMENT_SIZE": "2"}
    check = [*NODE, "check", *NOWHERE, "--nnodes", "2", "--log-dir", str(cluster.logs)]
    program = cluster.start("check", [*check, "--context-parallel", "2"], env)
    assert program.ended() == 4
    said = "\n".join(program.out)
    for part in ("group     3 of array 36, 2 nodes", "domain    D1", "parallel  context_parallel=2", "ONE, command"):
        assert part in said
    unknown = cluster.start("unknown", check, env | {"NVRX_DOMAIN_ID": ""})
    unknown.ended()
    refused(unknown, "--segment-size", "NVRX_DOMAIN_ID")


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
