"""What the benchmark asks a running coordinator. Knows nothing of what is done with the answers."""

from __future__ import annotations

import grpc

from nvrx.channel import CHANNEL_OPTIONS
from nvrx.v1 import run_pb2, run_pb2_grpc

from .marks import NotRecovered, monotonic_s

_ANSWERS_WITHIN_S = 30.0


def first_answer_s(address: str, run_id: str) -> float:
    """When (monotonic, s) the coordinator's answer to GetRun was here."""
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = run_pb2_grpc.RunServiceStub(channel)
        stub.GetRun(run_pb2.GetRunRequest(run_id=run_id), timeout=_ANSWERS_WITHIN_S, wait_for_ready=True)
    return monotonic_s()


def last_heard_s(address: str, run_id: str, node: str) -> float:
    """When (monotonic, s) the coordinator last heard from a node."""
    with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = run_pb2_grpc.RunServiceStub(channel)
        for _ in range(2):  # the first call finds the way, the second is quick
            found = stub.ListNodes(run_pb2.ListNodesRequest(run_id=run_id), timeout=_ANSWERS_WITHIN_S)
            answered_s = monotonic_s()
    for one in found.nodes:
        if one.node_id == node and one.HasField("last_heard"):
            return float(answered_s - one.last_heard.ToNanoseconds() / 1e9)
    raise NotRecovered(f"the coordinator does not say when it last heard from {node}")
