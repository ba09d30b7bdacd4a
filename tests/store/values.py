"""Values and errors as lines of JSON, between a test and the process that holds torch's clients. Knows neither."""

from __future__ import annotations

import base64
import json
from datetime import timedelta
from typing import Any


def to_plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, timedelta):
        return {"seconds": value.total_seconds()}
    if isinstance(value, list | tuple):
        return [to_plain(one) for one in value]
    return value


def from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [from_plain(one) for one in value]
    if isinstance(value, dict):
        return base64.b64decode(value["bytes"]) if "bytes" in value else timedelta(seconds=value["seconds"])
    return value


def to_line(words: dict[str, Any]) -> bytes:
    return json.dumps(words).encode() + b"\n"


def from_line(line: bytes) -> dict[str, Any]:
    words: dict[str, Any] = json.loads(line)
    return words
