"""What the bridge's shell adds to a session: its log. Clients and sockets are tested with the store process."""

from __future__ import annotations

import logging

import pytest

from nvrx.server.store_host.bridge import MAX_COMPLAINTS, Complaints
from nvrx.store.codec import BadCommand


@pytest.mark.rule("J4")
def test_a_flood_of_bad_clients_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    complaints = Complaints(lambda: now)
    why = BadCommand("there is no command 71")
    with caplog.at_level(logging.WARNING, "nvrx.store"):
        for number in range(MAX_COMPLAINTS + 500):
            complaints.say(f"10.0.0.1:{number}", 29500, why)
        assert len(caplog.messages) == MAX_COMPLAINTS
        assert caplog.messages[0] == "cut off 10.0.0.1:0 on port 29500: there is no command 71"
        now = 60.0
        complaints.say("10.0.0.1:1", 29500, why)
        assert caplog.messages[MAX_COMPLAINTS:] == [
            "cut off 500 more clients before",
            "cut off 10.0.0.1:1 on port 29500: there is no command 71",
        ]
        now = 120.0
        complaints.say("10.0.0.1:2", 29500, why)
        assert len(caplog.messages) == MAX_COMPLAINTS + 3
