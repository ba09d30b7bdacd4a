"""The views of nvrx-coord on a run that went through all: tables, JSON, and errors of one line."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from nvrx.server.cli import main

from .coordination import RUN, SUCCEEDED, HandAgent, Remote, Served, exited, serving
from .programs import COMMAND, coordinator, environment, run
from .story import Story

VIEWS = ["status", "nodes", "cycles", "rank-map", "lookup", "events"]


class Said:
    """What a command printed, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.out.splitlines()]

    def refusal(self, code: int) -> str:
        assert self.code == code, self.err
        assert self.out == ""
        assert len(self.err.splitlines()) == 1, self.err
        assert self.err.startswith("nvrx-coord")
        return self.err


Command = Callable[..., Coroutine[Any, Any, Said]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command of nvrx-coord beside the coordinator in this process."""
    monkeypatch.setenv("NVRX_COORDINATOR", "")
    monkeypatch.setenv("NVRX_RUN_ID", "")

    async def call(served: Served | None, *arguments: str) -> Said:
        where = ["--coordinator", str(served.address)] if served is not None else []
        capsys.readouterr()
        code = await asyncio.to_thread(main, [*arguments, *where])
        printed = capsys.readouterr()
        return Said(code, printed.out, printed.err)

    return call


async def as_json(command: Command, served: Served, *arguments: str) -> Any:
    said = await command(served, *arguments, "--output", "json")
    assert (said.code, said.err) == (0, "")
    return json.loads(said.out)


@pytest.mark.rule("D5", "H4")
async def test_status(story: Story, command: Command) -> None:
    said = await command(story.served, "status")
    assert said.code == 0
    assert said.lines == [
        f"run       {RUN}: OPEN",
        "cycle     2: RUNNING",
        "nodes     2 active, 0 standby; 2:3 wanted",
        "workers   2 per node, world size 4",
        "restarts  1 of 3 used",
        "losses    1 (cycles ended by a lost or leaving node)",
    ]
    told = await as_json(command, story.served, "status")
    assert (told["run_id"], told["cycle"], told["standby_nodes"], told["waiting_reason"]) == (RUN, 2, 0, "")


@pytest.mark.rule("D9")
async def test_status_says_why_nothing_runs(command: Command) -> None:
    async with serving() as served:
        await HandAgent(served, "n0").join()
        said = await command(served, "status", "--run-id", RUN)
        assert "cycle     none yet; the first is being formed" in said.lines
        assert "1 of 2 joined: n0" in said.lines[-1]
        assert said.lines[-1].startswith("waiting   ")


@pytest.mark.rule("H1")
async def test_nodes(story: Story, command: Command) -> None:
    said = await command(story.served, "nodes")
    assert [line.split()[:4] for line in said.lines[1:]] == [
        ["n0", "ACTIVE", "0", "0"],
        ["n2", "ACTIVE", "1", "1"],
        ["n1", "LOST", "10.0.0.1", "1001"],
    ]
    assert "its stream broke" in said.lines[3]
    told = await as_json(command, story.served, "nodes")
    assert [(one["node_id"], one.get("group_rank")) for one in told["nodes"]] == [("n0", 0), ("n2", 1), ("n1", None)]


@pytest.mark.rule("H1", "H2")
async def test_cycles(story: Story, command: Command) -> None:
    said = await command(story.served, "cycles")
    assert [line.split()[:2] for line in said.lines[1:]] == [["2", "RUNNING"], ["1", "ENDED"], ["0", "ENDED"]]
    assert "n1 -> n2" in said.lines[1]
    assert "node lost on n1" in said.lines[2]
    assert "rank 0 (local rank 0) on n0 failed with exit 7: CUDA error" in said.lines[3]
    told = await as_json(command, story.served, "cycles")
    assert [(one["cycle"], one["cause"]) for one in told["cycles"]] == [
        (2, "CAUSE_UNSPECIFIED"),
        (1, "CAUSE_NODE_LOST"),
        (0, "CAUSE_WORKER_FAILED"),
    ]


@pytest.mark.rule("H1")
async def test_rank_map(story: Story, command: Command) -> None:
    said = await command(story.served, "rank-map", "--cycle", "0")
    assert said.lines[0] == f"run {RUN} cycle 0: ENDED, world size 4, ordered by NODE_ID"
    assert [line.split()[:3] for line in said.lines[2:4]] == [["0-1", "0", "n0"], ["2-3", "1", "n1"]]
    assert "FAILED (rank 0: exit 7)" in said.lines[2]
    assert "STOPPED_BY_AGENT" in said.lines[3]
    assert said.lines[4].split()[:2] == ["standby", "n2"]
    assert said.lines[5] == "ended by WORKER_FAILED on n0 rank 0 (local rank 0) exit 7: CUDA error"
    told = await as_json(command, story.served, "rank-map", "--cycle", "0")
    assert (told["cycle"], told["nodes"][0]["group_rank"], told["nodes"][0]["infra_rank"]) == (0, 0, 0)
    assert told["failure"]["rank"] == 0
    before = await as_json(command, story.served, "rank-map", "--cycle", "-1")
    assert before["cycle"] == 1
    assert (await as_json(command, story.served, "rank-map"))["cycle"] == 2


@pytest.mark.rule("H1")
async def test_diff_shows_who_came_for_whom(story: Story, command: Command) -> None:
    said = await command(story.served, "rank-map", "--diff", "-1")
    assert said.lines[0] == "cycle 1 -> cycle 2"
    assert [line.split() for line in said.lines[2:]] == [
        ["0-1", "0", "n0", "n0"],
        ["2-3", "1", "n1", "n2", "came,", "for", "n1"],
    ]
    told = await as_json(command, story.served, "rank-map", "--cycle", "2", "--diff", "0")
    assert (told["before"], told["after"]) == (0, 2)
    assert [one["change"] for one in told["rows"]] == ["", "came, for n1"]


@pytest.mark.rule("H2")
async def test_lookup(story: Story, command: Command) -> None:
    said = await command(story.served, "lookup", "--rank", "0", "--cycle", "0")
    assert said.lines[1].split() == ["0", "0", "n0", "0", "0", "10.0.0.0", "GPU-n0-0", "0", "ENDED"]
    assert len((await command(story.served, "lookup", "--node", "n1")).lines) == 5
    told = await as_json(command, story.served, "lookup", "--gpu", "GPU-n2-0")
    assert [(one["cycle"], one["rank"], one["local_rank"]) for one in told["matches"]] == [(2, 2, 0)]
    assert (await as_json(command, story.served, "lookup", "--gpu", "GPU-none")) == {"matches": []}


@pytest.mark.rule("H1")
async def test_events(story: Story, command: Command) -> None:
    said = await command(story.served, "events")
    facts = await story.served.facts()
    assert [int(line.split()[0]) for line in said.lines] == [one.revision for one in facts]
    assert said.lines[1].endswith(facts[1].text)
    later = await command(story.served, "events", "--from-revision", "4", "--output", "json")
    told = [json.loads(line) for line in later.lines]
    assert told[0]["revision"] == "4"
    assert len(told) == len(facts) - 3


@pytest.mark.rule("H1", "D8")
async def test_events_are_followed_until_the_run_closes(story: Story, command: Command) -> None:
    following = asyncio.create_task(command(story.served, "events", "--follow"))
    for agent in (story.agents[0], story.agents[2]):
        await agent.report(exited(0, 0), exited(1, 0), phase=SUCCEEDED)
    said = await following
    assert said.code == 0
    assert len(said.lines) == len(await story.served.facts())
    assert "SUCCEEDED" in said.lines[-1].upper()
    closed = await command(story.served, "status")
    assert closed.lines[0] == f"run       {RUN}: SUCCEEDED"
    assert closed.lines[-1] == "closed    all 4 workers of cycle 2 exited 0 (exit code 0)"


@pytest.mark.rule("H1")
@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["rank-map", "--cycle", "9"], 1, "does not have cycle 9; it has cycles 0 to 2"),
        (["rank-map", "--diff", "9"], 1, "does not have cycle 9"),
        (["status", "--run-id", "nowhere"], 1, "there is no run 'nowhere' here; known runs: run-1"),
        (["events", "--follow", "--run-id", "nowhere"], 1, "there is no run 'nowhere'"),
        (["lookup", "--node", "n9"], 1, "node 'n9' has never been a member"),
        (["lookup", "--rank", "4"], 1, "ranks are 0 to 3"),
        (["lookup"], 2, "give one of --rank, --gpu, --node"),
        (["lookup", "--rank", "0", "--gpu", "x"], 2, "give one of --rank, --gpu, --node"),
        (["lookup", "--rank", "-1"], 2, "--rank"),
        (["rank-map", "--cycle", "-2"], 2, "--cycle"),
        (["rank-map", "--cycl", "0"], 2, "--cycl"),
        (["events", "--from-revision", "0"], 2, "--from-revision"),
        (["status", "--output", "yaml"], 2, "yaml"),
        (["status", "--coordinator", "http://x:1"], 2, "is a URL"),
        (["status", "extra"], 2, "extra"),
        (["status", "--token-file", "/nowhere/token"], 2, "/nowhere/token"),
    ],
)
async def test_what_goes_wrong_is_one_line(
    story: Story, command: Command, arguments: list[str], code: int, told: str
) -> None:
    served = None if "--coordinator" in arguments else story.served
    assert told in (await command(served, *arguments)).refusal(code)


@pytest.mark.rule("H1")
@pytest.mark.parametrize("view", VIEWS)
async def test_no_coordinator_is_one_line(command: Command, view: str) -> None:
    async with serving() as served:
        gone = str(served.address)
    more = ["--rank", "0"] if view == "lookup" else []
    said = (await command(None, view, *more, "--coordinator", gone)).refusal(1)
    assert f"coordinator {gone} not reached" in said


@pytest.mark.rule("E7")
async def test_an_unknown_command_is_one_line(command: Command) -> None:
    assert "watch" in (await command(None, "watch")).refusal(2)


@pytest.mark.parametrize("arguments", [[], *([one] for one in ["serve", *VIEWS])], ids=lambda one: "".join(one) or "-")
@pytest.mark.parametrize("flag", ["--help", "-h"])
async def test_every_command_has_help(command: Command, arguments: list[str], flag: str) -> None:
    said = await command(None, *arguments, flag)
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("Usage: nvrx-coord")


@pytest.mark.rule("A0")
async def test_the_coordinator_comes_from_the_environment(
    story: Story, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVRX_COORDINATOR", str(story.served.address))
    monkeypatch.setenv("NVRX_TOKEN_FILE", "")
    monkeypatch.setenv("NVRX_OUTPUT", "json")
    monkeypatch.setenv("NVRX_CYCLE", "77")
    assert (await command(None, "rank-map")).lines[0].startswith(f"run {RUN} cycle 2")
    monkeypatch.setenv("NVRX_RUN_ID", "nowhere")
    assert "nowhere" in (await command(None, "status")).refusal(1)
    assert (await command(None, "status", "--run_id", RUN)).code == 0
    monkeypatch.setenv("NVRX_COORDINATOR", "")
    help_text = (await command(None, "status", "--help")).out
    assert "127.0.0.1:7700" in help_text


@pytest.mark.rule("J5")
def test_a_proxy_of_the_web_is_not_used() -> None:
    with coordinator() as program:
        proxies = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
        done = run("status", "--coordinator", program.address, **proxies)
        assert "there is no run" in done.stderr


@pytest.mark.rule("H1")
async def test_followed_events_come_as_they_happen_and_end_with_the_coordinator() -> None:
    with coordinator() as program:
        remote = Remote(program.address)
        await HandAgent(remote, "n0").join()
        following = await asyncio.create_subprocess_exec(
            *COMMAND,
            "events",
            "--follow",
            "--coordinator",
            program.address,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment(),
        )
        assert following.stdout is not None
        try:
            async with asyncio.timeout(30):
                lines = [await following.stdout.readline() for _ in range(2)]
                await HandAgent(remote, "n1").join()
                lines.append(await following.stdout.readline())
                assert [line.split()[0] for line in lines] == [b"1", b"2", b"3"]
                await asyncio.to_thread(program.end, signal.SIGTERM)
                out, err = await following.communicate()
            assert out == b""
            assert len(err.splitlines()) == 1
            assert following.returncode == 1
        finally:
            if following.returncode is None:
                following.kill()
        await remote.channel.close()
