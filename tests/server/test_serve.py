"""`nvrx-coord serve` as a process: ready line, exit codes, refusals of one line, signals."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from nvrx.core.endpoint import parse_endpoint
from nvrx.server.cli import main
from nvrx.v1 import join_pb2, run_pb2, run_pb2_grpc

from .coordination import EXIT, SUCCEEDED, HandAgent, Remote, exited, info_of
from .programs import coordinator, run


def refusal(*arguments: str, code: int = 2, **changes: str) -> str:
    """The one line of a command that is refused."""
    done = run(*arguments, **changes)
    assert done.returncode == code, done
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("nvrx-coord")
    return lines[0]


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command said in this process."""
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    return said.err


async def to_the_end(watch: Any) -> None:
    """Read a stream until it ends."""
    while await watch.read() is not grpc.aio.EOF:
        pass


def can_be_reached(address: str) -> bool:
    where = parse_endpoint(address)
    with socket.socket() as trying:
        return trying.connect_ex((where.host, where.port)) == 0


@pytest.mark.rule("E7")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_and_ends_as_asked(signum: int) -> None:
    with coordinator() as program:
        assert program.out == [f"nvrx-coord listening on {program.address}"]
        assert parse_endpoint(program.address).port > 0
        assert can_be_reached(program.address)
        assert program.end(signum) == 0
        assert not can_be_reached(program.address)
        assert "Traceback" not in "\n".join(program.err)


@pytest.mark.rule("J5")
def test_a_taken_port_is_refused_and_nothing_half_started(tmp_path: Path) -> None:
    with coordinator() as program:
        line = refusal("serve", "--listen", program.address, "--state-dir", str(tmp_path / "state"))
        assert program.address in line
        assert "taken" in line
        with coordinator("--state-dir", str(tmp_path / "state")) as other:
            assert other.end() == 0
        assert can_be_reached(program.address)


@pytest.mark.rule("J5")
def test_an_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-long-secret\n")
    line = refusal("serve", "--listen", "198.51.100.7:0", "--state", "memory", "--token-file", str(token))
    assert "cannot listen on 198.51.100.7:0" in line


@pytest.mark.rule("J6")
def test_a_taken_state_directory_is_refused_by_pid(tmp_path: Path) -> None:
    with coordinator("--state-dir", str(tmp_path)) as program:
        line = refusal("serve", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path))
        assert f"pid {program.process.pid};" in line
        program.end(signal.SIGKILL)
    with coordinator("--state-dir", str(tmp_path)) as again:
        assert again.end() == 0


@pytest.mark.rule("J1")
@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
def test_beyond_loopback_it_wants_a_token_or_to_be_told(
    listen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--listen", listen, "--state", "memory"]) == 2
    line = one_line(capsys)
    assert "--token-file" in line
    assert "--insecure" in line
    token = tmp_path / "token"
    token.write_text("a-long-secret\n")
    with coordinator("--listen", listen, "--token-file", str(token)) as program:
        assert program.end() == 0
        assert not [one for one in program.err if "insecure" in one]


@pytest.mark.rule("J1")
def test_insecure_is_said_at_each_start() -> None:
    with coordinator("--listen", "0.0.0.0:0", "--insecure") as program:
        assert program.end() == 0
        assert len([one for one in program.err if "--insecure" in one]) == 1


@pytest.mark.rule("J1")
def test_it_listens_on_ipv6() -> None:
    with coordinator("--listen", "[::1]:0") as program:
        assert program.address.startswith("[::1]:")
        done = run("status", "--coordinator", program.address)
        assert done.returncode == 1
        assert "there is no run" in done.stderr
        assert program.end() == 0


@pytest.mark.rule("J2")
@pytest.mark.parametrize("content", [None, "", "short", "two words here", "ünïcödé-secret"])
def test_a_token_file_that_cannot_be_used_is_refused(
    tmp_path: Path, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_text(content)
    assert main(["serve", "--listen", "127.0.0.1:0", "--state", "memory", "--token-file", str(token)]) == 2
    line = one_line(capsys)
    assert str(token) in line
    assert not content or content not in line


@pytest.mark.rule("E7", "A0")
@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--listen", "nonsense"], "nonsense"),
        (["--listen", "::1:7700"], "[::1]:7700"),
        (["--listen", "127.0.0.1:99999"], "99999"),
        (["--lease-ttl", "1", "--heartbeat-interval", "1"], "--lease-ttl"),
        (["--heartbeat-interval", "soon"], "soon"),
        (["--heartbeat-interval", "nan"], "nan"),
        (["--run-id", "../x"], "--run-id"),
        (["--store", "abridged"], "abridged"),
        (["--lease", "5"], "--lease"),
        (["--stat", "memory"], "--stat"),
        (["extra"], "extra"),
        (["--log-level", "loud"], "loud"),
    ],
)
def test_a_bad_option_is_refused_in_one_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--state", "memory", *arguments]) == 2
    assert told in one_line(capsys)


@pytest.mark.rule("J6")
def test_a_state_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    line = refusal("serve", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "file" / "state"), code=1)
    assert str(tmp_path / "file" / "state") in line
    refusal("serve", "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "file"))


@pytest.mark.rule("A0")
def test_options_come_from_the_environment_and_the_command_line_wins(tmp_path: Path) -> None:
    with coordinator(NVRX_RUN_ID="from-env", NVRX_LOG_FORMAT="json", NVRX_TOKEN_FILE="", NVRX_ONCE="") as program:
        done = run("status", "--coordinator", program.address, "--run-id", "other")
        assert "serves run from-env only" in done.stderr
        program.end()
        assert all(line.startswith("{") for line in program.err), program.err
    with coordinator("--run-id", "given", NVRX_RUN_ID="from-env") as program:
        assert "serves run given only" in run("status", "--coordinator", program.address, "--run-id", "x").stderr


@pytest.mark.rule("E7")
async def test_open_streams_are_told_to_come_back_and_it_ends_within_five_seconds() -> None:
    with coordinator() as program:
        remote = Remote(program.address)
        agent = HandAgent(remote, "n0")
        await agent.enter()
        runs: Any = run_pb2_grpc.RunServiceStub(remote.channel)
        watch = runs.WatchFacts(run_pb2.WatchFactsRequest())
        await watch.read()
        program.process.terminate()
        error = await agent.ended()
        assert info_of(error).reason == "SHUTTING_DOWN"
        with pytest.raises(grpc.aio.AioRpcError) as seen:
            await to_the_end(watch)
        assert info_of(seen.value).reason == "SHUTTING_DOWN"
        assert await asyncio.to_thread(program.process.wait, 5) == 0
        await remote.channel.close()


@pytest.mark.rule("E5")
async def test_a_killed_coordinator_comes_back_with_its_run(tmp_path: Path) -> None:
    with coordinator("--state-dir", str(tmp_path)) as program:
        remote = Remote(program.address)
        agent = HandAgent(remote, "n0", nnodes=(1, 1))
        await agent.enter()
        given = await agent.started(0)
        await asyncio.to_thread(program.end, signal.SIGKILL)
        await remote.channel.close()
    with coordinator("--state-dir", str(tmp_path)) as program:
        remote = Remote(program.address)
        agent.served, agent.last = remote, None
        assert (await agent.open()).desired.assignment == given
        await remote.channel.close()


@pytest.mark.rule("D8", "D9")
async def test_once_ends_with_its_run_when_all_have_heard() -> None:
    with coordinator("--once") as program:
        remote = Remote(program.address)
        agents = [HandAgent(remote, f"n{one}", nnodes=(1, 2), workers=1) for one in range(2)]
        for agent in agents:
            await agent.enter()
        await agents[0].started(0)
        await agents[0].report(exited(0, 0), phase=SUCCEEDED)
        for agent in agents:
            assert (await agent.until(EXIT)).desired.exit_code == 0
        assert program.process.poll() is None
        for agent in agents:
            await agent.call.done_writing()
        assert await asyncio.to_thread(program.wait) == 0
        await remote.channel.close()


@pytest.mark.rule("G8")
async def test_one_event_is_one_line_of_the_log() -> None:
    with coordinator() as program:
        remote = Remote(program.address)
        agent = HandAgent(remote, "n0", nnodes=(1, 1))
        await agent.enter()
        await agent.started(0)
        before = len(program.err)
        await agent.report(exited(0, 1, message="boom\n\x1b[31mFORGED nvrx.coord: line\r\n"))
        with pytest.raises(grpc.aio.AioRpcError):
            await remote.joins.Join(join_pb2.JoinRequest(run_id="a\nb", node_id="n\x1b[0m"))
        await remote.channel.close()
        program.end()
        assert len(program.err) > before
        assert [line for line in program.err if not line[:4].isdigit()] == []
        assert "\x1b" not in "\n".join(program.err)
