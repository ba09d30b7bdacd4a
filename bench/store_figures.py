"""Medians, ratios and the tables of stores side by side. Knows nothing of how they were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .figures import Spread
from .store_load import KEYS_OF_MULTI_GET, OPERATIONS
from .store_measure import ANSWER_AFTER_S, BURST, CLIENTS, CONNECTIONS, KEYS, Sample

_LABEL_WIDTH = 22
_LONG_LABEL_WIDTH = 58
_CELL_WIDTH = 24
OURS, THEIRS = "bridge", "torch"


@dataclass(frozen=True)
class Measure:
    key: str
    label: str
    digits: int = 0


def _operation(name: str, unit: str) -> list[Measure]:
    what = f"{name}({KEYS_OF_MULTI_GET})" if name == "multi_get" else name
    digits = 0 if unit == "per_s" else 1
    return [
        Measure(f"{name}/{clients}/{unit}", f"{what}, {clients} client{'s' if clients > 1 else ''}", digits)
        for clients in CLIENTS
    ]


RATES = [measure for name in OPERATIONS for measure in _operation(name, "per_s")]
COSTS = [measure for name in OPERATIONS for measure in _operation(name, "cpu_us")]
OTHERS = [
    Measure("burst/per_s", f"{BURST:,} connect at once: accepted and answered per second"),
    Measure("burst/cpu_us", "  the server's CPU us per connection", 1),
    Measure("late/per_s", f"  per second where names are answered after {ANSWER_AFTER_S * 1e3:.0f} ms"),
    Measure("wake/ms", f"one SET -> {BURST:,} waiters told, ms", 1),
    Measure("wake/cpu_us", "  the server's CPU us per waiter", 1),
    Measure("empty/mb", "resident memory, empty, MB", 1),
    Measure("connections/mb", f"  with {CONNECTIONS:,} connections, MB", 1),
    Measure("connection/kb", "  per connection, kB", 2),
    Measure("key/bytes", f"  per key of {KEYS:,} with 64 bytes each, bytes"),
]


def spread(samples: Sequence[Sample], kind: str, measure: Measure) -> Spread | None:
    return Spread.of([one.value for one in samples if (one.kind, one.measure) == (kind, measure.key)])


def ratio(samples: Sequence[Sample], measure: Measure) -> Spread | None:
    """Ours to torch's, of each repetition: the two were measured one after the other, under the same load."""
    values = {(one.kind, one.rep): one.value for one in samples if one.measure == measure.key}
    reps = sorted({rep for _, rep in values})
    pairs = [(values.get((OURS, rep)), values.get((THEIRS, rep))) for rep in reps]
    return Spread.of([ours / theirs for ours, theirs in pairs if ours is not None and theirs])


def _cell(one: Spread | None, digits: int) -> str:
    if one is None:
        return "-"
    found, least, most = (f"{value:,.{digits}f}" for value in (one.median, one.least, one.most))
    return f"{found} ({least}-{most})"


def _row(label: str, width: int, cells: Sequence[str]) -> str:
    return (label.ljust(width) + "".join(cell.ljust(_CELL_WIDTH) for cell in cells)).rstrip()


def table(title: str, samples: Sequence[Sample], kinds: Sequence[str], measures: Sequence[Measure]) -> str:
    """One row for each measure that was taken; empty where none was."""
    width = _LABEL_WIDTH if max(len(one.label) for one in measures) < _LABEL_WIDTH else _LONG_LABEL_WIDTH
    lines = []
    for measure in measures:
        found = [spread(samples, kind, measure) for kind in kinds]
        if any(found):
            cells = [_cell(one, measure.digits) for one in found]
            lines.append(_row(measure.label, width, [*cells, _cell(ratio(samples, measure), 2)]))
    head = [title, _row("median (min-max)", width, [*kinds, f"{OURS} / {THEIRS}"])]
    return "\n".join([*head, *lines]) if lines else ""


def tables(samples: Sequence[Sample], kinds: Sequence[str]) -> str:
    parts = [
        table("Operations per second", samples, kinds, RATES),
        table("The server's CPU us per operation", samples, kinds, COSTS),
        table("Everything else", samples, kinds, OTHERS),
    ]
    return "\n\n".join(part for part in parts if part)


def summary(samples: Sequence[Sample], kinds: Sequence[str]) -> dict[str, object]:
    """The same for machines: {kind: {measure: {median, least, most, count} or None}}."""
    return {
        kind: {
            measure.key: None if (one := spread(samples, kind, measure)) is None else vars(one)
            for measure in (*RATES, *COSTS, *OTHERS)
        }
        for kind in kinds
    }
