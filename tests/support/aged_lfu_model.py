"""LFU with aging in Python: the half-life and the ranks of a table, to the bit."""

from __future__ import annotations

import math

MOST_HALF_LIFE = 2**42 - 1
BEND = 22544  # of 65536: .344


def log2_of_count(count: int) -> int:
    """log2 with 16 bits of fraction."""
    count = min(max(count, 1), 2**52 - 1)
    exponent = count.bit_length() - 1
    f = (count << 16 >> exponent) - 65536
    return (exponent << 16) + f + (f * (65536 - f) // 65536 * BEND // 65536)


class AgedLFUModel:
    """What a table measures to compare counts.

    Args:
        c: lookups for each slot in a half-life.
    """

    def __init__(self, c: float) -> None:
        self.c = c
        self.restart()

    def restart(self) -> None:
        """The table was cleared or loaded: what was measured is of other steps."""
        self.lookups = self.steps = 0.0
        self.seen: tuple[int, int] | None = None
        self.half_life, self.unit = 0, 0.0

    def reload(self, now: int, counted: int) -> None:
        """The table was saved after call ``now`` and loaded again, which changes nothing."""
        if self.seen is not None:
            self.lookups += counted - self.seen[1]
            self.steps += now + 1 - self.seen[0]
        self.seen = None

    def begin_call(self, now: int, counted: int, slots: int) -> None:
        """A call with ids begins.

        Args:
            now: its number.
            counted: lookups of all calls before.
            slots: of the table.
        """
        if self.seen is not None:
            self.lookups += counted - self.seen[1]
            self.steps += now - self.seen[0]
        self.seen = (now, counted)
        while self.lookups > 8 * slots and self.steps > 1:
            self.lookups /= 2
            self.steps /= 2
        self.set_half_life(slots)

    def set_half_life(self, slots: int) -> None:
        """From what has been measured."""
        self.unit = slots * (self.steps / self.lookups if self.lookups else 0.0) * 65536
        if math.isfinite(self.c):
            self.half_life = self.half_life_of(self.c)

    def half_life_of(self, c: float) -> int:
        """With another c: steps, with 16 bits of fraction."""
        return int(min(c * self.unit, MOST_HALF_LIFE))

    def rank(self, count: int, touched: int) -> int:
        """The lowest leaves."""
        if math.isinf(self.c):
            return count
        return (touched << 16) + (self.half_life * log2_of_count(count) >> 16)

    def rank_of_new(self, now: int) -> int:
        """The highest rank that a new id replaces: it counts as looked up four times."""
        return self.rank(4, now)
