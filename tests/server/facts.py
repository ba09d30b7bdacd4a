"""One made-up fact of every kind, all fields filled and all at their defaults; and strategies for any."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st

from nvrx.core.facts import (
    Cause,
    CauseRevised,
    CheckSuspected,
    CheckTrusted,
    CycleEnded,
    CycleRunning,
    Device,
    Endpoint,
    Fact,
    Failure,
    NodeFailedCheck,
    NodeInfo,
    NodeJoined,
    NodeLeft,
    NodeLost,
    NodeQuarantined,
    NodeRecovered,
    NodesDrained,
    NodesPromoted,
    NodeStopped,
    NodesUndrained,
    Placed,
    ProgressMade,
    QuarantineEnded,
    RunClosed,
    RunOpened,
    RunReopened,
    RunState,
    Seat,
    Standby,
    WorkerExit,
    WorkersExited,
    WorldChosen,
)
from nvrx.core.ids import (
    ArrayRank,
    CycleNumber,
    DomainId,
    GroupId,
    GroupRank,
    Incarnation,
    InfraRank,
    LocalRank,
    NodeId,
    RunId,
)
from nvrx.core.parallel import ParallelSizes
from nvrx.core.shape import Settings, Shape
from nvrx.core.topology import OrderSource

KINDS: tuple[type[Fact], ...] = get_args(Fact)

_DEVICES = (Device(LocalRank(0), "GPU-1", "0000:3b:00.0", 1), Device(LocalRank(1)))
_NODE = NodeInfo(
    NodeId("n0"),
    Incarnation("life"),
    "10.0.0.1",
    4242,
    version="1.2",
    order_sources={OrderSource.PROCID: "0", OrderSource.NODE_ID: "n0"},
    array_rank=ArrayRank(0),
    replacement_group_id=GroupId("g0"),
    domain_id=DomainId("d0"),
    devices=_DEVICES,
    restart_count=2,
    last_cycle=CycleNumber(0),
    group_array_job_id="7001",
)
_PLACED = Placed(
    NodeId("n0"), Incarnation("life"), "10.0.0.1", InfraRank(0), "0", GroupId("g0"), DomainId("d0"), _DEVICES
)
_BARE = Placed(NodeId("n1"), Incarnation("life"), "10.0.0.2", InfraRank(1), "n1")
_FAILURE = Failure(
    Cause.WORKER_FAILED, NodeId("n0"), GroupRank(0), LocalRank(0), -9, "SIGKILL", 'say "ü"\n', "tail\x00\x1b[0m", 4.5
)
_SHAPE = Shape(2, 3, 8, "/ckpt/é", {"NCCL_DEBUG": "INFO", "": ""}, parallel=ParallelSizes(2, micro_batch_size=4))

EXAMPLES: list[Fact] = [
    RunOpened(0.0, RunId("r"), _SHAPE, Settings(0, 0, 1.5, 0.0), time=1.7e9),
    RunOpened(0.0, RunId("r"), Shape(1, 1, 1), Settings()),
    RunReopened(1e-9, Settings(), _SHAPE, 3),
    NodeJoined(1.0, _NODE),
    NodeJoined(1.0, NodeInfo(NodeId("n1"), Incarnation("x"), "::1", 0)),
    NodeLeft(2.0, NodeId("n0"), Incarnation("life"), "asked to", 4.25),
    NodeLeft(2.0, NodeId("n0"), Incarnation("life"), ""),
    NodeStopped(3.0, NodeId("n0"), Incarnation("life")),
    NodeLost(3.0, NodeId("n0"), Incarnation("life"), "silent for 10.0 s"),
    WorldChosen(
        3.0,
        CycleNumber(0),
        OrderSource.PROCID,
        (Seat(_PLACED, GroupRank(0)),),
        (Standby(_BARE, "not needed"),),
        Endpoint("10.0.0.1", 29500),
    ),
    WorldChosen(3.0, CycleNumber(7), OrderSource.NODE_ID, (Seat(_BARE, GroupRank(0)),), (), None),
    CycleRunning(4.0, CycleNumber(0)),
    WorkersExited(
        4.0,
        CycleNumber(0),
        NodeId("n0"),
        (
            WorkerExit(LocalRank(0), 0),
            WorkerExit(LocalRank(1), None, "signal 40", "text", True, "tail"),
            WorkerExit(LocalRank(2)),
            WorkerExit(LocalRank(3), message="no heartbeat for 30.0 s", hung=True),
            WorkerExit(LocalRank(4), None, "SIGKILL", "no heartbeat for 30.0 s", True, hung=True),
        ),
    ),
    WorkersExited(4.0, CycleNumber(0), NodeId("n0"), ()),
    CycleEnded(5.0, CycleNumber(0), _FAILURE),
    CycleEnded(5.0, CycleNumber(0), Failure(Cause.SUCCEEDED)),
    CycleEnded(5.0, CycleNumber(0), Failure(Cause.HANG, NodeId("n0"), GroupRank(0), LocalRank(1), message="silent")),
    CauseRevised(6.0, CycleNumber(0), Failure(Cause.NODE_LOST, NodeId("n0"), GroupRank(0), at=5.5)),
    NodesPromoted(6.5, (NodeId("n2"), NodeId("n3")), (NodeId("n0"),)),
    NodesDrained(6.5, (NodeId("n1"),)),
    NodesUndrained(6.5, (NodeId("n1"),)),
    ProgressMade(6.5, CycleNumber(0), 1200),
    NodeQuarantined(6.5, NodeId("n1"), "its workers failed first in 3 cycles in a row", None),
    NodeQuarantined(6.5, NodeId("n1"), "its workers failed first in 3 cycles in a row", 66.5),
    QuarantineEnded(66.5, NodeId("n1")),
    NodeFailedCheck(6.5, NodeId("n1"), Incarnation("i1"), "gpu", "GPU 3 fell off the bus"),
    NodeRecovered(6.6, NodeId("n1")),
    CheckSuspected(6.7, "health-check", (NodeId("n1"), NodeId("n2")), 4),
    CheckTrusted(66.7, "health-check"),
    RunClosed(7.0, RunState.FAILED, "max_restarts 3 is used up", 1),
    RunClosed(7.0, RunState.SUCCEEDED, "", 0),
]


def any_fact() -> st.SearchStrategy[Fact]:
    """Facts of every kind with any values that their types have."""
    st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
    st.register_type_strategy(str, st.text(st.characters(exclude_categories=["Cs"]), max_size=8))
    return st.one_of([st.from_type(kind) for kind in KINDS])
