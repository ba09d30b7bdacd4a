"""`nvrx-coord rank-map --diff` says who came for whom, also when a survivor took the lost node's place."""

from __future__ import annotations

import json

import pytest

from nvrx.server.views import _print_diff
from nvrx.v1 import common_pb2


def world(cycle: int, *names: str) -> common_pb2.RankMap:
    nodes = [
        common_pb2.RankMapNode(node_id=name, group_rank=place, first_rank=2 * place, local_world_size=2)
        for place, name in enumerate(names)
    ]
    return common_pb2.RankMap(run_id="r", cycle=cycle, nodes=nodes)


@pytest.mark.rule("H2")
def test_a_newcomer_is_paired_with_the_node_that_left(capsys: pytest.CaptureFixture[str]) -> None:
    _print_diff(world(0, "n0", "n1", "n2"), world(1, "n1", "n2", "n3"), "json")
    changes = [row["change"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert changes == ["moved from group rank 1", "moved from group rank 2", "came, for n0"]
