"""Values of a later version: what does not know them goes on without (rule A8)."""

from __future__ import annotations

import pytest

from nvrx.core.ranks import Action
from nvrx.server.views import print_rank_map
from nvrx.v1 import common_pb2, heartbeat_pb2
from nvrx.wire.membership import desired_of

LATER = 99


@pytest.mark.rule("A8")
def test_a_view_shows_a_state_that_it_does_not_know_by_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    found = common_pb2.RankMap(run_id="r", cycle=0, state=LATER, order_source=LATER)  # type: ignore[arg-type]
    found.failure.cause = LATER  # type: ignore[assignment]
    print_rank_map(found)
    shown = capsys.readouterr().out
    assert "run r cycle 0: 99, world size 0, ordered by 99" in shown
    assert "ended by 99" in shown


@pytest.mark.rule("A8")
def test_an_agent_passes_over_an_action_that_it_does_not_know() -> None:
    response = heartbeat_pb2.HeartbeatResponse()
    response.desired.action = LATER  # type: ignore[assignment]
    assert desired_of(response) is None
    response.desired.action = common_pb2.DESIRED_ACTION_WAIT
    wanted = desired_of(response)
    assert wanted is not None
    assert wanted.action is Action.WAIT
