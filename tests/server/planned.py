"""Runs `nvrx-coord plan` in this process on files and on nodes made here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nvrx.server.cli import main

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples" / "plan"
BLOCK = {"SLURM_TOPOLOGY_ADDR_PATTERN": "block.node"}


@dataclass(frozen=True)
class Planned:
    """What the command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.err == ""
        return json.loads(self.out)

    @property
    def order(self) -> list[str]:
        """Nodes of the world in group-rank order."""
        assert self.code == 0, self.out + self.err
        rows = self.json["nodes"]
        assert [one["group_rank"] for one in rows] == [*range(len(rows))]
        return [one["node_id"] for one in rows]

    @property
    def standbys(self) -> dict[str, str]:
        assert self.code == 0, self.out + self.err
        return {one["node_id"]: one["reason"] for one in self.json["standbys"]}

    @property
    def refused(self) -> tuple[str, str]:
        assert self.code == 3, self.out + self.err
        assert self.json.keys() == {"refused"}
        assert self.json["refused"].keys() == {"node_id", "reason", "message"}
        assert "\n" not in self.json["refused"]["message"]
        return self.json["refused"]["node_id"], self.json["refused"]["reason"]

    @property
    def message(self) -> str:
        return str(self.json["refused"]["message"])

    @property
    def shortage(self) -> str:
        assert self.code == 1, self.out + self.err
        assert self.json.keys() == {"shortage"}
        return str(self.json["shortage"])

    @property
    def usage(self) -> str:
        assert self.code == 2, self.out
        assert self.out == ""
        assert len(self.err.splitlines()) == 1, self.err
        assert self.err.startswith("nvrx-coord")
        return self.err


class Planner:
    """The command, with somewhere to put files."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = folder / "plan.yaml"
        """The file that was made last."""
        self._capsys = capsys

    def call(self, *arguments: object) -> Planned:
        self._capsys.readouterr()
        code = main(["plan", *map(str, arguments)])
        printed = self._capsys.readouterr()
        return Planned(code, printed.out, printed.err)

    def example(self, name: str, *arguments: object) -> Planned:
        return self.call("--nodes", EXAMPLES / name, "--output", "json", *arguments)

    def text(self, text: str | bytes, *arguments: object) -> Planned:
        """A file as it stands here."""
        self.path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return self.call("--nodes", self.path, "--output", "json", *arguments)

    def nodes(self, shape: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], *arguments: object) -> Planned:
        return self.text(json.dumps({"shape": shape, "nodes": nodes}), *arguments)


def node(name: str, env: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"node_id": name, "env": dict(env or {}), **more}


def procs(count: int, **more: Any) -> list[dict[str, Any]]:
    """n0, n1, ... numbered by SLURM_PROCID."""
    return [node(f"n{number}", {"SLURM_PROCID": number}, **more) for number in range(count)]


def grouped(count: int, size: int = 2) -> list[dict[str, Any]]:
    return [{**one, "replacement_group_id": f"g{number // size}"} for number, one in enumerate(procs(count))]
