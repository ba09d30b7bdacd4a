"""The commands of the installed torch are the ones we know: a new one in a later torch fails here first."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from .raw import MAGIC, Op

pytestmark = [pytest.mark.torch, pytest.mark.rule("I5")]


def _header() -> str:
    """torch's header that names the commands; it is looked for by what it holds, since it has moved before."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    headers = [
        text
        for path in (Path(found.origin).parent / "include").rglob("*TCPStore*")
        if "enum class QueryType" in (text := path.read_text())
    ]
    assert len(headers) == 1
    return headers[0]


def _enumerators(header: str, name: str) -> dict[str, int]:
    body = re.search(rf"enum class {name}\s*:\s*uint8_t\s*{{([^}}]*)}}", header)
    assert body is not None, f"torch's {name} is written in another way now"
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", body[1], flags=re.DOTALL)
    names = [one.strip() for one in text.split(",") if one.strip()]
    assert all(one.isidentifier() for one in names), f"torch numbers its {name} itself now: {names}"
    return {one: number for number, one in enumerate(names)}


def test_these_tests_know_all_commands_of_torch() -> None:
    assert _enumerators(_header(), "QueryType") == {one.name: one.value for one in Op}


def test_the_bridge_knows_all_commands_of_torch() -> None:
    opcodes = pytest.importorskip("nvrx.store.opcodes", exc_type=ModuleNotFoundError)
    assert {one.name: one.value for one in opcodes.Opcode} == _enumerators(_header(), "QueryType")


def test_answers_and_greeting_are_those_of_torch() -> None:
    header = _header()
    assert _enumerators(header, "CheckResponseType") == {"READY": 0, "NOT_READY": 1}
    assert _enumerators(header, "WaitResponseType") == {"STOP_WAITING": 0, "WAIT_CANCELED": 1}
    magic = re.search(r"validationMagicNumber\s*=\s*(0x[0-9A-Fa-f]+)", header)
    assert magic is not None
    assert int(magic[1], 16) == MAGIC
