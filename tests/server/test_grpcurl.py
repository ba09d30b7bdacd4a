"""A tool that knows nothing of nvrx finds and calls its services by reflection (buf curl, as grpcurl does)."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from .story import Story

BUF = Path(sys.executable).parent / "buf"
SERVICES = {f"nvrx.v1.{name}Service" for name in ("Join", "Heartbeat", "RankMap", "Promote", "Run", "Store")}

pytestmark = pytest.mark.skipif(not BUF.exists(), reason="buf is not installed beside this Python")


async def buf_curl(story: Story, *arguments: str, path: str = "") -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        BUF,
        "curl",
        "--http2-prior-knowledge",
        "--protocol",
        "grpc",
        *arguments,
        f"http://{story.served.address}{path}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(30):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.rule("H4")
@pytest.mark.parametrize("reflection", ["grpc-v1", "grpc-v1alpha"])
async def test_all_services_are_listed_and_described(story: Story, reflection: str) -> None:
    code, out, err = await buf_curl(story, "--reflect-protocol", reflection, "--list-services")
    assert code == 0, err
    assert set(out.split()) >= SERVICES
    code, out, err = await buf_curl(story, "--reflect-protocol", reflection, "--list-methods")
    assert code == 0, err
    assert "nvrx.v1.RankMapService/GetRankMap" in out.split()


@pytest.mark.rule("H1", "H4")
async def test_the_map_of_a_failed_cycle_is_printed_with_its_zeros(story: Story) -> None:
    code, out, err = await buf_curl(story, "-d", '{"cycle": 0}', path="/nvrx.v1.RankMapService/GetRankMap")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)["rankMap"]
    first = found["nodes"][0]
    assert (found["cycle"], first["groupRank"], first["firstRank"], first["infraRank"]) == (0, 0, 0, 0)
    assert found["state"] == "CYCLE_STATE_ENDED"
    assert first["outcome"]["state"] == "WORKER_OUTCOME_FAILED"
    assert first["outcome"]["exits"][0]["rank"] == 0
    assert first["outcome"]["exits"][0]["stoppedByAgent"] is False
    assert found["failure"]["rank"] == 0
    assert found["nodes"][1]["outcome"]["state"] == "WORKER_OUTCOME_STOPPED_BY_AGENT"


@pytest.mark.rule("H1")
async def test_an_unknown_cycle_is_not_found(story: Story) -> None:
    code, _, err = await buf_curl(story, "-d", '{"cycle": 99}', path="/nvrx.v1.RankMapService/GetRankMap")
    assert code != 0
    told = json.loads(err)
    assert told["code"] == "not_found"
    assert "Traceback" not in err


@pytest.mark.rule("B2")
async def test_an_unknown_node_may_not_speak(story: Story) -> None:
    words = '{"runId": "run-1", "nodeId": "n9", "incarnation": "x", "sequence": 1}'
    code, _, err = await buf_curl(story, "-d", words, path="/nvrx.v1.HeartbeatService/Heartbeat")
    assert code != 0
    assert json.loads(err)["code"] == "not_found"
