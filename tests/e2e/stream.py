"""The facts of a run as they happen: a thread that watches the coordinator, and watches anew when that was away."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import json_format

from nvrx.channel import CHANNEL_OPTIONS
from nvrx.v1 import run_pb2, run_pb2_grpc

from .board import Board

_AGAIN_S = 0.05
_ANEW_S = 5.0
"""A coordinator that is suspended keeps its streams open and says nothing: another may lead by then."""


@dataclass(frozen=True)
class Fact:
    """One fact of a run."""

    revision: int
    kind: str
    cycle: int | None
    node: str
    text: str
    detail: dict[str, Any]


class FactStream:
    """All facts of one run so far, in order of revision; from whichever of several coordinators tells them."""

    def __init__(self, board: Board, addresses: Iterable[str], run_id: str) -> None:
        self.facts: list[Fact] = []
        self._board = board
        self._addresses = itertools.cycle(addresses)
        self._run_id = run_id
        self._over = threading.Event()
        self._call: Any = None
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        board.describe_with(self.describe)

    def describe(self) -> str:
        return "\n".join(["--- facts", *(f"{one.revision}: {one.kind}: {one.text}" for one in self.facts)])

    def _watch(self) -> None:
        while not self._over.is_set():
            with grpc.insecure_channel(next(self._addresses), options=CHANNEL_OPTIONS) as channel:
                stub = run_pb2_grpc.RunServiceStub(channel)
                try:
                    request = run_pb2.WatchFactsRequest(run_id=self._run_id, from_revision=len(self.facts) + 1)
                    self._call = stub.WatchFacts(request, timeout=_ANEW_S)
                    for response in self._call:
                        self._take(response.fact)
                except grpc.RpcError:
                    pass  # the run is not there yet, or the coordinator is away
            self._over.wait(_AGAIN_S)

    def _take(self, fact: run_pb2.Fact) -> None:
        assert fact.revision == len(self.facts) + 1, f"revision {fact.revision} after {len(self.facts)} facts"
        self.facts.append(
            Fact(
                fact.revision,
                fact.kind,
                fact.cycle if fact.HasField("cycle") else None,
                fact.node_id,
                fact.text,
                json_format.MessageToDict(fact.detail),
            )
        )
        self._board.announce()

    def close(self) -> None:
        self._over.set()
        if self._call is not None:
            self._call.cancel()
        self._thread.join(5.0)
