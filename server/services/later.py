"""Services whose rpcs are part of the contract but not of this version: they answer UNIMPLEMENTED."""

from __future__ import annotations

from nvrx.v1 import promote_pb2_grpc

from .answering import answer_later


class PromoteService(promote_pb2_grpc.PromoteServiceServicer):
    """Promotion by hand."""

    Promote = Drain = Undrain = StopRun = answer_later
