"""`nvrx-coord`: the command line of the coordinator. Reads options, hands them on; no rule stands here."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

# gRPC's own lines on standard error are not for our users; what matters reaches them through our log.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import click

from nvrx import logs
from nvrx.commandline import (
    EXIT_USAGE,
    HELP_SETTINGS,
    EndpointType,
    Failed,
    Seconds,
    leave,
    open_standard_streams,
    option,
    program_version,
    run,
    token_in,
)
from nvrx.core.endpoint import MAX_PORT, HostPort
from nvrx.core.ids import RunId, name_problem
from nvrx.core.presence import (
    DEFAULT_HEARTBEAT_INTERVAL_S,
    DEFAULT_LEASE_TTL_S,
    DEFAULT_RECONNECT_GRACE_S,
    INTERVAL_MOST_S,
    LEASE_INTERVALS,
    StoreMode,
    Timing,
)
from nvrx.pid1 import be_below_process_1
from nvrx.runtime_dir import runtime_dir

from .app import serve
from .etcd.address import SCHEME, EtcdAccess, EtcdAddress, parse_etcd
from .journals import JournalError, StateTaken
from .listening import AddressTaken
from .operating import OPERATIONS
from .plan import plan
from .repairing import repair_command
from .settings import DEFAULT_LEADER_TTL_S, EtcdState, ServeConfig
from .store_host.host import StoreNotStarted
from .store_host.ports import PortRange
from .views import VIEWS

PROGRAM = "nvrx-coord"
MEMORY = "memory"


@click.group(context_settings=HELP_SETTINGS)
@click.version_option(package_name="nvrx", prog_name=PROGRAM)
def nvrx_coord() -> None:
    """The coordinator: keeps training worlds alive, and remembers every cycle's rank map."""


class PortRangeType(click.ParamType[PortRange]):
    """LO-HI."""

    name = "LO-HI"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> PortRange:
        low, dash, high = str(value).partition("-")
        if not (dash and low.isascii() and low.isdigit() and high.isascii() and high.isdigit()):
            self.fail(f"{value!a} is not a range of ports; give LO-HI, such as 29500-29599", param, ctx)
        found = PortRange(int(low), int(high))
        if not 0 < found.low <= found.high <= MAX_PORT:
            self.fail(f"{value!a} is not a range within 1-{MAX_PORT}, lower end first", param, ctx)
        return found


class StateType(click.ParamType[EtcdAddress | str]):
    """memory, or etcd://HOST:PORT,...[/PREFIX]."""

    name = "memory|etcd://..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> EtcdAddress | str:
        if isinstance(value, EtcdAddress) or value == MEMORY:
            return value  # type: ignore[no-any-return]
        if not str(value).startswith(SCHEME):
            self.fail(f"{value!a} is neither {MEMORY} nor {SCHEME}HOST:PORT[,HOST:PORT...]", param, ctx)
        try:
            return parse_etcd(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


_file = click.Path(path_type=Path)

_SERVE_EPILOG = """\b
Example:
  nvrx-coord serve --listen 0.0.0.0:7700 --token-file token --state-dir /var/lib/nvrx

Prints 'nvrx-coord listening on HOST:PORT' on standard output when ready.

\b
Exit codes: 0 ended as asked, 1 failure, 2 usage, or port or state directory taken.
"""


@nvrx_coord.command(
    "serve",
    epilog=_SERVE_EPILOG,
)
@option("--listen", type=EndpointType(), default="127.0.0.1:7700", show_default=True, help="Port 0 picks a free one.")
@option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("nvrx-state"),
    show_default=True,
    help="Where the journal is kept.",
)
@option(
    "--state",
    type=StateType(),
    help="memory: keep nothing on disk. etcd://HOST:PORT,...[/PREFIX]: several coordinators share a journal in "
    "etcd, one of them leads.",
)
@option(
    "--leader-ttl",
    type=Seconds(1.0),
    default=DEFAULT_LEADER_TTL_S,
    show_default=True,
    help="With etcd: how long a silent leader stays the leader.",
)
@option("--etcd-ca", type=_file, help="Certificates (PEM) that etcd's is signed with; turns TLS to etcd on.")
@option("--etcd-cert", type=_file, help="Certificate (PEM) to show to etcd.")
@option("--etcd-key", type=_file, help="Key (PEM) of --etcd-cert.")
@option("--etcd-user-file", type=_file, help="File with USER:PASSWORD for etcd.")
@option("--http", type=click.Choice(["off"]), default="off", show_default=True, help="This version has no page.")
@option(
    "--store",
    type=click.Choice([one.value for one in StoreMode]),
    default=StoreMode.BRIDGE.value,
    show_default=True,
    help="Who hosts the workers' TCPStore: a process beside the coordinator (bridge: ours, torch: torch's own server), "
    "rank 0's worker, or nobody (MASTER_ADDR and MASTER_PORT pass as they are).",
)
@option(
    "--store-port", type=click.IntRange(0, MAX_PORT), default=0, help="Port of the lasting store; 0 picks a free one."
)
@option("--store-ports", type=PortRangeType(), help="Ports for the stores of cycles; default: any free ones.")
@option("--advertise-addr", help="Address at which nodes reach this host; default: the one in --listen.")
@option(
    "--heartbeat-interval",
    type=Seconds(0.05),
    help=f"How often nodes are heard [default: {DEFAULT_HEARTBEAT_INTERVAL_S:g} up to 1000 members, then in proportion "
    f"up to {INTERVAL_MOST_S:g}].",
)
@option(
    "--lease-ttl",
    type=Seconds(0.5),
    help=f"How long a silent node stays a member [default: {DEFAULT_LEASE_TTL_S:g}, or {LEASE_INTERVALS:g} heartbeat "
    "intervals if that is longer].",
)
@option(
    "--reconnect-grace",
    type=Seconds(),
    default=DEFAULT_RECONNECT_GRACE_S,
    show_default=True,
    help="How long a node whose stream broke stays a member.",
)
@option("--run-id", help="Serve this run only.")
@option("--token-file", type=click.Path(path_type=Path), help="Require the token in this file for every call.")
@option("--insecure", is_flag=True, help="Listen beyond loopback without a token.")
@option("--once", is_flag=True, help="End with the run.")
@option("--allow-network-state", is_flag=True, help="Keep the journal on a network file system all the same.")
@option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True)
def serve_command(**given: Any) -> int:
    """Run the coordinator until SIGTERM."""
    config = _serve_config(given)
    logs.start(given["log_level"], given["log_format"])
    try:
        asyncio.run(serve(config, program_version()))
    except (StateTaken, AddressTaken, StoreNotStarted) as error:
        raise Failed(str(error), EXIT_USAGE) from error
    except JournalError as error:
        raise Failed(str(error)) from error
    finally:
        logs.finish()
    return 0


def _serve_config(given: dict[str, Any]) -> ServeConfig:
    listen: HostPort = given["listen"]
    interval_s, lease_s = given["heartbeat_interval"], given["lease_ttl"]
    timing = Timing(
        DEFAULT_HEARTBEAT_INTERVAL_S if interval_s is None else interval_s,
        DEFAULT_LEASE_TTL_S if lease_s is None else lease_s,
        given["reconnect_grace"],
        interval_grows=interval_s is None,
        lease_grows=lease_s is None,
    ).at_size(0)
    if timing.lease_ttl_s < 2 * timing.heartbeat_interval_s:
        raise Failed(
            f"--lease-ttl {timing.lease_ttl_s:g} is shorter than two heartbeats of {timing.heartbeat_interval_s:g} s; "
            "give a longer lease or a shorter --heartbeat-interval",
            EXIT_USAGE,
        )
    problem = name_problem("--run-id", given["run_id"]) if given["run_id"] else None
    if problem is not None:
        raise Failed(problem, EXIT_USAGE)
    etcd = _etcd_state(given, listen)
    token = token_in(given["token_file"])
    if not listen.is_loopback and token is None:
        if not given["insecure"]:
            raise Failed(
                f"--listen {listen} is reachable from other hosts and no token protects it; give --token-file, or "
                "--insecure if everybody there may control the run",
                EXIT_USAGE,
            )
        print(f"{PROGRAM}: --insecure: everybody who reaches {listen} may join and control runs", file=sys.stderr)
    return ServeConfig(
        listen=listen,
        state_dir=given["state_dir"] if given["state"] is None else None,
        timing=timing,
        store=StoreMode(given["store"]),
        store_port=given["store_port"],
        store_ports=given["store_ports"],
        advertise_addr=given["advertise_addr"],
        runtime_dir=runtime_dir(os.environ),
        run_id=RunId(given["run_id"]) if given["run_id"] else None,
        token=token,
        once=given["once"],
        allow_network_state=given["allow_network_state"],
        etcd=etcd,
    )


def _etcd_state(given: dict[str, Any], listen: HostPort) -> EtcdState | None:
    """What is to be known of etcd; None where the state is elsewhere. Raises Failed."""
    address = given["state"]
    if not isinstance(address, EtcdAddress):
        return None
    if listen.host in {"0.0.0.0", "::"} and given["advertise_addr"] is None:
        raise Failed(
            f"--listen {listen} is no address that nodes could be sent to; give --advertise-addr HOST",
            EXIT_USAGE,
        )
    ca, certificate, key = (_content(given, f"etcd_{one}") for one in ("ca", "cert", "key"))
    if (certificate is None) != (key is None) or (certificate is not None and ca is None):
        raise Failed("--etcd-cert and --etcd-key belong together, and need --etcd-ca; give all three", EXIT_USAGE)
    user = password = None
    login = _content(given, "etcd_user_file")
    if login is not None:
        user, colon, password = login.decode(errors="replace").strip().partition(":")
        if not (user and colon and password):
            raise Failed(f"--etcd-user-file {given['etcd_user_file']} does not hold USER:PASSWORD", EXIT_USAGE)
    return EtcdState(address, EtcdAccess(ca, certificate, key, user, password), given["leader_ttl"])


def _content(given: dict[str, Any], name: str) -> bytes | None:
    """A file's content; None where none was given. Raises Failed."""
    path: Path | None = given[name]
    try:
        return path.read_bytes() if path is not None else None
    except OSError as error:
        raise Failed(f"--{name.replace('_', '-')} {path}: {error.strerror}", EXIT_USAGE) from error


for command in (*VIEWS, *OPERATIONS, plan, repair_command):
    nvrx_coord.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program `nvrx-coord`."""
    return run(nvrx_coord, PROGRAM, sys.argv[1:] if arguments is None else arguments)


def program() -> NoReturn:
    """The process `nvrx-coord`."""
    be_below_process_1()
    open_standard_streams()
    leave(main())


if __name__ == "__main__":
    program()
