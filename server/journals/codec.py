"""Facts as JSON, for journals and for the list of facts. Knows the shape of a row, not its meaning."""

from __future__ import annotations

import json
from typing import Any, cast, get_args

import cattrs
from cattrs.preconf.json import make_converter

from nvrx.core.facts import Fact

_converter = make_converter(forbid_extra_keys=False)
_KINDS: dict[str, type] = {kind.__name__: kind for kind in get_args(Fact)}


class UnreadableFact(ValueError):
    """A row that is not a fact this version knows."""


def kind_of(fact: Fact) -> str:
    """The name of a fact's kind, as rows carry it."""
    return type(fact).__name__


def to_plain(fact: Fact) -> dict[str, Any]:
    """A fact as values that JSON has."""
    return cast(dict[str, Any], _converter.unstructure(fact))


def encode(fact: Fact) -> str:
    """A fact as one line of JSON."""
    return json.dumps(to_plain(fact), separators=(",", ":"))


def decode(kind: str, body: str) -> Fact:
    """The fact in a row. Raises UnreadableFact with what is wrong."""
    known = _KINDS.get(kind)
    if known is None:
        raise UnreadableFact(f"unknown kind of fact {kind!a}")
    try:
        return cast(Fact, _converter.structure(json.loads(body), known))
    except (ValueError, KeyError, TypeError, cattrs.BaseValidationError) as error:
        raise UnreadableFact(f"{kind}: {error}") from error
