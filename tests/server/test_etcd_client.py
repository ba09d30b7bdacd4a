"""The way to etcd, its lease and its election, on real members: fail-over, authentication, TLS."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from aetcd import rpc

from nvrx.core.endpoint import HostPort
from nvrx.server.etcd.address import DEFAULT_PREFIX, EtcdAccess, EtcdAddress, parse_etcd
from nvrx.server.etcd.client import Etcd, EtcdDown, EtcdError, get, put
from nvrx.server.etcd.election import Election
from nvrx.server.etcd.lease import Lease, LeaseOver
from tests.etcd_cluster import EtcdCluster

from .etcd_term import TTL_S, WAIT_S, term

PASSWORD = "wonder:land"
NO_ADDRESSES = [
    *("", "h:1", "http://h:1", "etcd:h:1", "etcd://", "etcd:///x", "etcd://h:1,", "etcd://h:", "etcd://h:x"),
    *("etcd://h:99999", "etcd://::1:9", "etcd://h:1,h:1", "etcd://h,h:2379", "etcd://h/a//b", "etcd://h/ä"),
]


@contextlib.asynccontextmanager
async def connected(address: EtcdAddress, access: EtcdAccess | None = None) -> AsyncIterator[Etcd]:
    etcd = Etcd(address, access)
    try:
        yield etcd
    finally:
        await etcd.close()


@pytest.fixture
def own_etcd() -> Iterator[EtcdCluster]:
    """A member of a test's own."""
    cluster = EtcdCluster(1)
    yield cluster
    cluster.close()


@pytest.mark.rule("E6")
@pytest.mark.parametrize(
    ("text", "endpoints", "prefix"),
    [
        ("etcd://h1:2379,h2:2380", ["h1:2379", "h2:2380"], DEFAULT_PREFIX),
        ("etcd://h1", ["h1:2379"], DEFAULT_PREFIX),
        ("etcd://h1,[::1]:9,[::1]/", ["h1:2379", "[::1]:9", "[::1]:2379"], DEFAULT_PREFIX),
        ("etcd://10.0.0.1:1/team/a-b_c.d/", ["10.0.0.1:1"], "/team/a-b_c.d"),
    ],
)
def test_addresses_of_etcd(text: str, endpoints: list[str], prefix: str) -> None:
    found = parse_etcd(text)
    assert [str(one) for one in found.endpoints] == endpoints
    assert found.prefix == prefix
    assert parse_etcd(str(found)) == found


@pytest.mark.rule("E6")
@pytest.mark.parametrize("text", NO_ADDRESSES)
def test_what_is_no_address_of_etcd(text: str) -> None:
    with pytest.raises(ValueError, match="etcd") as seen:
        parse_etcd(text)
    assert len(str(seen.value).splitlines()) == 1


@pytest.mark.rule("E6")
@pytest.mark.parametrize("listens", [False, True])
async def test_a_member_that_does_not_answer_is_passed_over(one_etcd: EtcdCluster, listens: bool) -> None:
    """Whether it refuses connections, or takes them and never says a word, as one that is suspended."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        if not listens:
            silent.close()
            silent_port = 1
        else:
            silent_port = silent.getsockname()[1]
        address = parse_etcd(one_etcd.state("failover", [silent_port, one_etcd.members[0].port]))
        async with connected(address) as etcd:
            await etcd.transact([], [put("/failover/k", b"v")], within_s=WAIT_S)
            found = await etcd.transact([], [get("/failover/k")], within_s=WAIT_S)
            assert found.responses[0].response_range.kvs[0].value == b"v"


@pytest.mark.rule("E6")
async def test_nobody_answers(one_etcd: EtcdCluster) -> None:
    async with connected(parse_etcd("etcd://127.0.0.1:1,127.0.0.1:2")) as etcd:
        with pytest.raises(EtcdDown, match="connection refused") as seen:
            await etcd.range("x", within_s=0.3)
        assert len(str(seen.value).splitlines()) == 1
        with pytest.raises(EtcdDown, match="no time was left"):
            await etcd.range("x", within_s=0.0)


@pytest.mark.rule("E6")
async def test_a_change_ends_the_wait_for_it(prefix: EtcdAddress) -> None:
    key = f"{prefix.prefix}/k"
    async with connected(prefix) as etcd:
        before = (await etcd.range(key, within_s=WAIT_S)).header.revision
        waiting = asyncio.create_task(etcd.changed(key, after=before, within_s=WAIT_S))
        await etcd.transact([], [put(key, b"")], within_s=WAIT_S)
        async with asyncio.timeout(WAIT_S):
            await waiting
            await etcd.changed(key, after=before, within_s=WAIT_S)  # also where it has happened already
        await etcd.changed(f"{key}/other", after=before, within_s=0.05)


@pytest.mark.rule("E6")
async def test_a_lease_is_kept_until_it_is_taken_away(prefix: EtcdAddress) -> None:
    async with connected(prefix) as etcd:
        lease = await Lease.take(etcd, 2.0)
        first = lease.until
        keeping = asyncio.create_task(lease.keep())
        async with asyncio.timeout(WAIT_S):
            while lease.until == first:
                await etcd.range("x", within_s=WAIT_S)
        assert lease.is_good
        await etcd.revoke(lease.lease_id, within_s=WAIT_S)
        with pytest.raises(LeaseOver, match="etcd has ended it"):
            await keeping


@pytest.mark.rule("E6")
async def test_a_lease_that_cannot_be_renewed_is_over_before_etcd_ends_it(own_etcd: EtcdCluster) -> None:
    """The member is suspended: by its own clock the holder knows; the member, woken up, still has the lease."""
    member = own_etcd.members[0]
    async with connected(own_etcd.address("lease")) as etcd:
        lease = await Lease.take(etcd, 3.0)
        await etcd.transact([], [put("/lease/k", b"v", lease.lease_id)], within_s=WAIT_S)
        member.signal(signal.SIGSTOP)
        with pytest.raises(LeaseOver, match="not renewed in time"):
            await lease.keep()
        assert not lease.is_good
        member.signal(signal.SIGCONT)
        found = await etcd.range("/lease/k", within_s=WAIT_S)
        assert [one.value for one in found.kvs] == [b"v"]


@pytest.mark.rule("E6")
async def test_a_lease_given_back_is_over_at_once(prefix: EtcdAddress) -> None:
    key = f"{prefix.prefix}/k"
    async with connected(prefix) as etcd:
        lease = await Lease.take(etcd, TTL_S)
        await etcd.transact([], [put(key, b"v", lease.lease_id)], within_s=WAIT_S)
        await lease.give_back()
        assert not lease.is_good
        assert (await etcd.range(key, within_s=WAIT_S)).count == 0
        await lease.give_back()


@pytest.mark.rule("E6")
async def test_one_leads_at_a_time_in_rising_terms(prefix: EtcdAddress) -> None:
    async with connected(prefix) as etcd:
        elections = [Election(etcd, HostPort(f"h{number}", 7700)) for number in range(3)]
        leases = [await Lease.take(etcd, TTL_S) for _ in elections]
        won: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

        async def stand(place: int) -> None:
            won.put_nowait((place, await elections[place].win(leases[place])))

        standing = [asyncio.create_task(stand(place)) for place in range(3)]
        terms, leaders = [], set()
        async with asyncio.timeout(WAIT_S):
            for _ in elections:
                leader, number = await won.get()
                assert won.empty()
                assert elections[leader].leader == f"h{leader}:7700"
                terms.append(number)
                leaders.add(leader)
                await leases[leader].give_back()
            await asyncio.gather(*standing)
        assert terms == sorted(set(terms))
        assert leaders == {0, 1, 2}


@pytest.mark.rule("E6")
async def test_an_election_whose_answer_was_lost_is_won_all_the_same(prefix: EtcdAddress) -> None:
    async with term(prefix) as one:
        assert await one.election.win(one.lease) == one.number


@pytest.mark.rule("E6", "J2")
async def test_etcd_that_asks_for_a_user(own_etcd: EtcdCluster) -> None:
    """Also after its member was started again and has forgotten the token that it gave."""
    address, member = own_etcd.address("auth"), own_etcd.members[0]
    async with connected(address) as etcd:
        await etcd.range("x", within_s=WAIT_S)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{member.port}") as channel:
        auth = rpc.AuthStub(channel)
        await auth.UserAdd(rpc.AuthUserAddRequest(name="root", password=PASSWORD))
        await auth.RoleAdd(rpc.AuthRoleAddRequest(name="root"))
        await auth.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"))
        await auth.AuthEnable(rpc.AuthEnableRequest())
    async with connected(address) as stranger:
        with pytest.raises(EtcdError, match="refuses: etcdserver: user name is empty"):
            await stranger.range("x", within_s=WAIT_S)
    async with connected(address, EtcdAccess(user="root", password="wrong")) as stranger:
        with pytest.raises(EtcdError, match="refuses: etcdserver: authentication failed") as seen:
            await stranger.range("x", within_s=WAIT_S)
        assert "wrong" not in str(seen.value)
    access = EtcdAccess(user="root", password=PASSWORD)
    assert PASSWORD not in repr(access)
    async with connected(address, access) as etcd:
        lease = await Lease.take(etcd, TTL_S)
        assert await etcd.keep_alive(lease.lease_id, within_s=WAIT_S) > 0
        member.kill()
        member.start_again()
        await etcd.transact([], [put("/auth/k", b"v")], within_s=WAIT_S)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, and server and client .pem and .key that it signed."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed; try: apt-get install openssl")
    folder = tmp_path_factory.mktemp("certificates")

    def make(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "rsa:2048", "-nodes")
    make(*new, "-x509", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for name in ("server", "client"):
        make(*new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
        make("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)
    return folder


@pytest.mark.rule("E6", "J2")
async def test_etcd_over_tls(certificates: Path) -> None:
    """With a certificate of ours; without one, and in plain text, etcd does not answer."""
    ca, certificate, key = ((certificates / name).read_bytes() for name in ("ca.pem", "client.pem", "client.key"))
    options = ["--cert-file", str(certificates / "server.pem"), "--key-file", str(certificates / "server.key")]
    options += ["--client-cert-auth", "--trusted-ca-file", str(certificates / "ca.pem")]
    cluster = EtcdCluster(1, *options, scheme="https")
    try:
        address = cluster.address("tls")
        async with connected(address, EtcdAccess(ca, certificate, key)) as etcd:
            await etcd.transact([], [put("/tls/k", b"v")], within_s=WAIT_S)
            lease = await Lease.take(etcd, TTL_S)
            await lease.give_back()
        for access in (EtcdAccess(ca), EtcdAccess()):
            async with connected(address, access) as stranger:
                with pytest.raises(EtcdDown):
                    await stranger.range("/tls/k", within_s=1.0)
    finally:
        cluster.close()
