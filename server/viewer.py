"""A connection to the coordinators for one command of `nvrx-coord`. Decides nothing, prints nothing.

Of several coordinators the one that leads is found: by its name where another tells it, else one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import Message

from nvrx.channel import CHANNEL_OPTIONS, Metadata, describe
from nvrx.commandline import Failed
from nvrx.core.endpoint import HostPort
from nvrx.core.refused import Reason
from nvrx.errors import leader_named_in, refused_from
from nvrx.v1 import common_pb2, promote_pb2_grpc, rank_map_pb2, rank_map_pb2_grpc, run_pb2_grpc

CALL_TIMEOUT_S = 10.0
ELECTION_TIMEOUT_S = 20.0
"""How long several coordinators may take to have a leader."""
_LOOK_AGAIN_S = 0.25
_ELSEWHERE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


class _Stub:
    """A service at whichever coordinator the viewer has turned to by the time of a call."""

    def __init__(self, viewer: Viewer, stub: Callable[[grpc.Channel], Any]) -> None:
        self._viewer = viewer
        self._stub = stub

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda request, **given: getattr(self._stub(self._viewer.channel), name)(request, **given)


class Viewer:
    """The coordinators at `endpoints`."""

    def __init__(self, endpoints: tuple[HostPort, ...], run_id: str, metadata: Metadata) -> None:
        self._endpoints = list(endpoints)
        self._index = 0
        self.endpoint = endpoints[0]
        self.run_id = run_id
        self._metadata = metadata
        self.channel = self._open()
        self.runs = _Stub(self, run_pb2_grpc.RunServiceStub)
        self.maps = _Stub(self, rank_map_pb2_grpc.RankMapServiceStub)
        self.promotes = _Stub(self, promote_pb2_grpc.PromoteServiceStub)

    def _open(self) -> grpc.Channel:
        return grpc.insecure_channel(str(self.endpoint), options=CHANNEL_OPTIONS)

    def call(self, method: Callable[..., Any], request: Message, *, timeout_s: float | None = CALL_TIMEOUT_S) -> Any:
        """Make a call, at the leader. Raises Failed with one line where it is refused or not answered.

        A new leader is waited for as long as some coordinator answers.
        """
        give_up_at = time.monotonic() + ELECTION_TIMEOUT_S
        tried: set[HostPort] = set()
        somebody_follows = False
        while True:
            tried.add(self.endpoint)
            try:
                return method(request, timeout=timeout_s, metadata=self._metadata)
            except grpc.RpcError as error:
                failed = self.failed(error)
                somebody_follows |= _is_from_follower(error)
                if not self.turn_from(error):
                    raise failed from error
                if self.endpoint in tried:
                    if time.monotonic() >= give_up_at or not somebody_follows:
                        raise failed from error
                    time.sleep(_LOOK_AGAIN_S)
                    tried, somebody_follows = set(), False

    def turn_from(self, error: grpc.RpcError) -> bool:
        """Turn to another coordinator after a call failed; false where none would answer otherwise."""
        assert isinstance(error, grpc.Call)
        if error.code() not in _ELSEWHERE:
            return False
        refused = refused_from(error)
        leader = leader_named_in(refused) if refused is not None else None
        if len(self._endpoints) == 1 and self.endpoint == self._endpoints[0] and not _is_from_follower(error):
            return False
        if leader is None:
            self._index = (self._index + 1) % len(self._endpoints)
        self.endpoint = leader or self._endpoints[self._index]
        self.channel.close()
        self.channel = self._open()
        return True

    def failed(self, error: grpc.RpcError) -> Failed:
        """What a call failed with, in one line."""
        assert isinstance(error, grpc.Call)
        if error.code() in _ELSEWHERE:
            return Failed(f"coordinator {self.endpoint} not reached: {describe(error)}; check --coordinator")
        return Failed(error.details() or error.code().name)

    def pages(self, method: Callable[..., Any], request: Any) -> Iterator[Any]:
        """Every page of a list, in order."""
        while True:
            response = self.call(method, request)
            yield response
            if not response.next_page_token:
                return
            request.page_token = response.next_page_token

    def rank_map(self, cycle: int | None) -> common_pb2.RankMap:
        """A cycle's whole map, all pages joined."""
        request = rank_map_pb2.GetRankMapRequest(run_id=self.run_id, cycle=cycle)
        pages = self.pages(self.maps.GetRankMap, request)
        whole: common_pb2.RankMap = next(pages).rank_map
        for page in pages:
            whole.nodes.extend(page.rank_map.nodes)
            whole.standbys.extend(page.rank_map.standbys)
        return whole


def _is_from_follower(error: grpc.RpcError) -> bool:
    assert isinstance(error, grpc.Call)
    refused = refused_from(error)
    return refused is not None and refused.reason is Reason.NOT_LEADER
