"""What torchrun was asked for, as options of a node."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from nvrx.client.torchrun_launch import FLAGS, LISTS, VALUES, Launch, Rendezvous, command_of, conf_problem, join_options
from nvrx.commandline import Failed
from nvrx.core.shape import NodeCounts, RestartBudget

LAUNCH = Launch(8, ("python", "-u", "train.py"), 100)


def asked(endpoint: str = "head:7700", run_id: str = "r", local_addr: str | None = None, **conf: Any) -> Rendezvous:
    return Rendezvous(endpoint, run_id, 6, 8, local_addr, {"timeout": 900, **conf})


@pytest.mark.rule("A2", "A5")
def test_the_line_of_torchrun_becomes_that_of_a_node() -> None:
    found = join_options(
        asked(
            "h1:7700,[::1]:7701",
            local_addr="10.0.0.1",
            max_restarts="9",
            restart_budget="per-progress",
            same_env="A B",
            no_env_check="true",
            reopen="no",
            exit_when_excluded="false",
            log_dir="/tmp/x",
        ),
        LAUNCH,
    )
    assert [str(one) for one in found.coordinators] == ["h1:7700", "[::1]:7701"]
    assert (found.run_id, found.nnodes, found.nproc_per_node) == ("r", NodeCounts(6, 8), "8")
    assert (found.command, found.advertise_addr) == (LAUNCH.command, "10.0.0.1")
    assert (found.max_restarts, found.restart_budget) == (9, RestartBudget.PER_PROGRESS)
    assert (found.fingerprint.same_env, found.fingerprint.is_off) == (("A", "B"), True)
    assert (found.reopen, found.exit_when_excluded) == (False, False)
    assert (found.log_dir, found.stop_grace_s) == (Path("/tmp/x"), 30)


@pytest.mark.rule("A3")
@pytest.mark.parametrize("run_id", ["none", ""])
def test_a_run_id_that_torchrun_makes_up_is_none(run_id: str) -> None:
    assert join_options(asked(run_id=run_id), LAUNCH).run_id is None


def test_our_variables_count_and_the_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVRX_NODE_ID", "from-variable")
    monkeypatch.setenv("NVRX_MAX_RESTARTS", "5")
    found = join_options(asked(node_id="from-line"), LAUNCH)
    assert (found.node_id, found.max_restarts) == ("from-line", 5)
    assert join_options(asked(), LAUNCH).node_id == "from-variable"


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (asked(""), "--rdzv-endpoint is missing"),
        (asked("head"), "'head' has no port"),
        (asked("localhost:0"), "has port 0"),
        (asked(max_restarts="-1"), "--max-restarts"),
        (asked(rank_policy="any"), "--rank-policy"),
        (asked(token_file="/no/such/file"), "cannot read the token file /no/such/file"),
        (asked(stop_grace="5"), "--rdzv-conf stop_grace: not known to nvrx"),
        (asked(reopen="maybe"), "--rdzv-conf reopen=maybe: give true or false"),
    ],
)
@pytest.mark.rule("A4")
def test_what_cannot_be_meant_is_refused_in_one_line(wish: Rendezvous, words: str) -> None:
    with pytest.raises(Failed) as seen:
        join_options(wish, LAUNCH)
    assert words in str(seen.value)
    assert "\n" not in str(seen.value)


@pytest.mark.parametrize("key", [*VALUES, *LISTS, *FLAGS])
def test_every_key_that_is_said_to_be_known_is_an_option(key: str) -> None:
    """Where its value is one that the option does not take, the option says so."""
    assert conf_problem({key: "1"}) is None
    try:
        join_options(asked(**{key: "1"}), LAUNCH)
    except Failed as error:
        complaint = str(error)
    else:
        complaint = ""
    assert "No such option" not in complaint


def test_settings_of_torchs_own_backends_are_passed_over() -> None:
    assert conf_problem({"timeout": 900, "is_host": "1", "last_call_timeout": "5", "read_timeout": 60}) is None


def test_a_function_stands_in_the_command_by_its_name() -> None:
    assert command_of("python", ["-u", "x.py", 3]) == ("python", "-u", "x.py", "3")
    assert command_of(join_options, [1]) == (sys.executable, "nvrx.client.torchrun_launch:join_options", "1")
