"""The worth of a set of nodes as one whole number: the greater is better, and the sum of the parts is the worth of
the whole.

From the top: nodes asked for, last resort, kept, then one bit per node in infra order. The bits are the set.
Knows no units and no segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NewType

from .units import Position, Worth

Value = NewType("Value", int)
FEW = 16
"""Bits that are quicker added one by one than written into a row."""


class Values:
    """Values over a fixed choice of nodes. Only sums with equally many nodes in all may be compared."""

    def __init__(self, positions: Iterable[Position]) -> None:
        self._positions: Sequence[Position] = sorted(positions, reverse=True)
        self._bit = {position: index for index, position in enumerate(self._positions)}
        self._base = len(self._positions) + 1

    def of(self, worth: Worth) -> Value:
        """No count exceeds the number of nodes, so a digit of this base holds each."""
        bits = self._bits(worth.positions)
        bad = (worth.unasked * self._base + worth.last_resort) * self._base + worth.fresh
        return Value((-bad << len(self._positions)) + bits)

    def _bits(self, positions: Sequence[Position]) -> int:
        if len(positions) <= FEW:
            return sum(1 << self._bit[position] for position in positions)
        row = bytearray(len(self._positions) // 8 + 1)
        for position in positions:
            bit = self._bit[position]
            row[bit >> 3] |= 1 << (bit & 7)
        return int.from_bytes(row, "little")

    def positions(self, value: Value) -> frozenset[Position]:
        """The nodes of a set from its value."""
        bits = bin(value & ((1 << len(self._positions)) - 1))[:1:-1]
        return frozenset(self._positions[index] for index, bit in enumerate(bits) if bit == "1")
