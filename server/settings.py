"""What `nvrx-coord serve` was asked to do, as values. Reads no option and no environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nvrx.core.endpoint import HostPort
from nvrx.core.ids import RunId
from nvrx.core.presence import StoreMode, Timing

from .etcd.address import EtcdAccess, EtcdAddress
from .store_host.ports import PortRange

DEFAULT_LEADER_TTL_S = 5.0


@dataclass(frozen=True)
class EtcdState:
    """A journal that several coordinators share. `leader_ttl_s`: how long a silent leader stays the leader."""

    address: EtcdAddress
    access: EtcdAccess = EtcdAccess()
    leader_ttl_s: float = DEFAULT_LEADER_TTL_S


@dataclass(frozen=True)
class ServeConfig:
    """What `nvrx-coord serve` was asked to do. Without `state_dir` and `etcd` facts are kept in memory only."""

    listen: HostPort
    state_dir: Path | None
    timing: Timing = Timing()
    store: StoreMode = StoreMode.BRIDGE
    store_port: int = 0
    store_ports: PortRange | None = None
    advertise_addr: str | None = None
    runtime_dir: str = ""
    run_id: RunId | None = None
    token: str | None = None
    once: bool = False
    allow_network_state: bool = False
    etcd: EtcdState | None = None

    @property
    def told_address(self) -> str:
        """What workers are told as the store's address; empty: where their node reaches this coordinator."""
        everywhere = self.listen.host in {"0.0.0.0", "::"}
        return self.advertise_addr or ("" if everywhere else self.listen.host)
