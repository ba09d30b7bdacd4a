"""Mappings and records that are never changed: cheap ways to another one that differs a little and shares the rest.

Replay takes a step for each row of a journal, and would else copy everything at each. Knows nothing of what is kept.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")
Record = TypeVar("Record")

_LEAST_TOP = 16


class Grown(Mapping[K, V]):
    """A large dict that many share below a small one of its own: a step copies about the root of n entries.

    Entries keep the place in which their keys first came, as in a dict.
    """

    __slots__ = ("_base", "_top", "_whole")

    def __init__(self, base: Mapping[K, V], top: Mapping[K, V] | None = None) -> None:
        self._base = base
        self._top = top or {}
        self._whole: Mapping[K, V] | None = base if not top else None

    def plus(self, key: K, value: V) -> Grown[K, V]:
        """The mapping with one more entry, or with another value of a key."""
        top = {**self._top, key: value}
        if len(top) > _LEAST_TOP and len(top) ** 2 > len(self._base):
            return Grown({**self._base, **top})
        return Grown(self._base, top)

    def _all(self) -> Mapping[K, V]:
        if self._whole is None:
            self._whole = {**self._base, **self._top}
        return self._whole

    def __getitem__(self, key: K) -> V:
        return self._top[key] if key in self._top else self._base[key]

    def __contains__(self, key: object) -> bool:
        return key in self._top or key in self._base

    def __iter__(self) -> Iterator[K]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._base) + sum(1 for key in self._top if key not in self._base)

    def items(self) -> ItemsView[K, V]:
        return self._all().items()

    def values(self) -> ValuesView[V]:
        return self._all().values()

    def __repr__(self) -> str:
        return f"Grown({dict(self._all())!r})"


def plus(mapping: Mapping[K, V], key: K, value: V) -> Grown[K, V]:
    """`mapping` with one more entry, or with another value of a key; `mapping` stays as it is."""
    return (mapping if isinstance(mapping, Grown) else Grown(mapping)).plus(key, value)


def changed(record: Record, **changes: Any) -> Record:
    """A frozen dataclass with other values in some fields.

    What `dataclasses.replace` gives, in a tenth of its time. Not for one that checks its fields when it is made; and
    what it keeps worked out (a `cached_property`) must follow from fields that are not among those changed.
    """
    values = record.__dict__
    assert changes.keys() <= values.keys(), f"{type(record).__name__} has no {changes.keys() - values.keys()}"
    new = object.__new__(type(record))
    new.__dict__.update(values)
    new.__dict__.update(changes)
    return new
