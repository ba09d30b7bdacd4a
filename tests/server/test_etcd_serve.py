"""`nvrx-coord serve --state etcd://...` as a process: what it refuses, and views that find the leader."""

from __future__ import annotations

import contextlib
import json
import uuid
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.etcd import free_ports
from nvrx.server.etcd.client import Etcd, EtcdError, put
from nvrx.server.journals.etcd import MAX_BYTES
from tests.etcd_cluster import EtcdCluster

from .coordination import WAIT_S, HandAgent, Remote
from .programs import coordinator, run
from .standing import answers
from .test_serve import refusal

NOWHERE = "etcd://127.0.0.1:1"
QUOTA_BYTES = 16 * 1024 * 1024


@pytest.mark.rule("E6")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--state", "sqlite"], "'sqlite' is neither memory nor etcd://"),
        (["--state", "etcd://h:x"], "has the port 'x'"),
        (["--state", NOWHERE, "--listen", "0.0.0.0:0", "--insecure"], "give --advertise-addr HOST"),
        (["--state", NOWHERE, "--etcd-cert", "README.md"], "--etcd-cert and --etcd-key belong together"),
        (["--state", NOWHERE, "--etcd-cert", "README.md", "--etcd-key", "README.md"], "need --etcd-ca"),
        (["--state", NOWHERE, "--etcd-ca", "no-such-file"], "--etcd-ca no-such-file: No such file or directory"),
        (["--state", NOWHERE, "--etcd-user-file", "/dev/null"], "/dev/null does not hold USER:PASSWORD"),
        (["--state", NOWHERE, "--leader-ttl", "0"], "is not between 1 and"),
    ],
)
def test_what_is_refused_before_anything_starts(options: list[str], told: str) -> None:
    assert told in refusal("serve", *options)


@pytest.mark.rule("E6")
def test_etcd_that_cannot_be_reached_is_a_failure_of_one_line() -> None:
    said = refusal("serve", "--listen", "127.0.0.1:0", "--state", NOWHERE, code=1)
    assert "cannot open the journal etcd://127.0.0.1:1/nvrx: etcd not reached" in said


@pytest.mark.rule("E6")
def test_without_the_package_one_line_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "aetcd.py").write_text("raise ImportError('not here')\n")
    said = refusal("serve", "--listen", "127.0.0.1:0", "--state", NOWHERE, code=1, PYTHONPATH=str(tmp_path))
    assert "pip install 'nvrx[etcd]'" in said


@pytest.mark.rule("E6")
def test_a_taken_port_is_refused_and_leaves_nobody_standing(one_etcd: EtcdCluster) -> None:
    state = one_etcd.state(uuid.uuid4().hex)
    with coordinator("--state", state) as first:
        said = refusal("serve", "--listen", first.address, "--state", state)
        assert f"cannot listen on {first.address}" in said


@pytest.mark.rule("E6")
async def test_views_and_commands_find_the_leader(one_etcd: EtcdCluster, tmp_path: Path) -> None:
    """Named by one that follows, after one that is not there, and after the leader has changed."""
    state = one_etcd.state(uuid.uuid4().hex)
    options = ("--state", state, "--store", "off", "--leader-ttl", "60")
    with coordinator(*options, XDG_RUNTIME_DIR=str(tmp_path)) as first:
        remote = Remote(first.address)
        await until_it_leads(remote)
        await HandAgent(remote, "n0").join()
        with coordinator(*options, XDG_RUNTIME_DIR=str(tmp_path)) as second:
            dead = f"127.0.0.1:{free_ports(1)[0]}"
            for where in (first.address, second.address, f"{dead},{second.address}", f"{dead},{first.address}"):
                done = run("status", "--coordinator", where, "--output", "json")
                assert done.returncode == 0, done.stderr
                assert json.loads(done.stdout)["run_id"] == "run-1"
            assert run("events", "--coordinator", second.address).stdout.count("\n") == 2
            both = f"{first.address},{second.address}"
            assert first.end() == 0
            done = run("nodes", "--coordinator", both, "--output", "json")
            assert done.returncode == 0, done.stderr
            assert [one["node_id"] for one in json.loads(done.stdout)["nodes"]] == ["n0"]
            assert run("stop", "--coordinator", both).returncode == 0
            assert "STOPPED" in run("status", "--coordinator", both).stdout
            followed = run("events", "--follow", "--coordinator", both)
            assert followed.returncode == 0
            assert len(followed.stdout.splitlines()) >= 3
        await remote.channel.close()


@pytest.mark.rule("E6")
def test_where_no_coordinator_answers_a_view_ends_after_one_round() -> None:
    done = run("status", "--coordinator", "127.0.0.1:1,127.0.0.1:2")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "not reached: connection refused" in done.stderr


async def until_it_leads(remote: Remote) -> None:
    watch = health_pb2_grpc.HealthStub(remote.channel).Watch(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
    async for answer in watch:
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            watch.cancel()
            return


@pytest.mark.rule("E6")
async def test_an_etcd_that_is_full_ends_the_leader_rather_than_have_it_forget(tmp_path: Path) -> None:
    """As a full disk ends one that has its journal there."""
    full = EtcdCluster(1, "--quota-backend-bytes", str(QUOTA_BYTES))
    try:
        options = ("--state", full.state("full"), "--store", "off", "--leader-ttl", "60")
        with coordinator(*options, XDG_RUNTIME_DIR=str(tmp_path)) as first:
            remote = Remote(first.address)
            await until_it_leads(remote)
            await HandAgent(remote, "n0").join()
            await fill(full)
            assert await answers(HandAgent(remote, "n1").join()) is grpc.StatusCode.UNAVAILABLE
            assert first.wait() == 1
            assert "database space exceeded" in first.err[-1]
            await remote.channel.close()
    finally:
        full.close()


async def fill(cluster: EtcdCluster) -> None:
    """Write until etcd has no more room."""
    etcd = Etcd(cluster.address("fill"))
    with contextlib.suppress(EtcdError):
        for number in range(QUOTA_BYTES // MAX_BYTES * 4):
            await etcd.transact([], [put(f"/fill/{number}", bytes(MAX_BYTES))], within_s=WAIT_S)
    with pytest.raises(EtcdError, match="database space exceeded"):
        await etcd.transact([], [put("/fill/last", b"")], within_s=WAIT_S)
    await etcd.close()
