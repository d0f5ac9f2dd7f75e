"""LFU with aging in Python: bit-exact half-life and ranks of a table."""

from __future__ import annotations

import math

MAX_HALF_LIFE = 2**42 - 1
BEND = 22544  # of 65536: .344


def log2_of_count(count: int) -> int:
    """Computes log2 with 16 fractional bits."""
    count = min(max(count, 1), 2**52 - 1)
    exponent = count.bit_length() - 1
    f = (count << 16 >> exponent) - 65536
    return (exponent << 16) + f + (f * (65536 - f) // 65536 * BEND // 65536)


class AgedLFUModel:
    """A table's measurements for aging counts.

    Args:
        c: number of lookups per slot in a half-life.
    """

    def __init__(self, c: float) -> None:
        self.c = c
        self.restart()

    def restart(self) -> None:
        """Resets measurements, because the table was cleared or loaded."""
        self.lookups = self.steps = 0.0
        self.seen: tuple[int, int] | None = None
        self.half_life, self.unit = 0, 0.0

    def reload(self, now: int, counted: int) -> None:
        """Applies saving the table after call ``now`` and loading it; measurements are kept."""
        if self.seen is not None:
            self.lookups += counted - self.seen[1]
            self.steps += now + 1 - self.seen[0]
        self.seen = None

    def begin_call(self, now: int, counted: int, slots: int) -> None:
        """Begins a call with ids.

        Args:
            now: number of the call.
            counted: lookups of all earlier calls.
            slots: number of slots of the table.
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
        """Sets the half-life from the measurements."""
        self.unit = slots * (self.steps / self.lookups if self.lookups else 0.0) * 65536
        if math.isfinite(self.c):
            self.half_life = self.half_life_of(self.c)

    def half_life_of(self, c: float) -> int:
        """Returns the half-life for another c, in steps with 16 fractional bits."""
        return int(min(c * self.unit, MAX_HALF_LIFE))

    def rank(self, count: int, touched: int) -> int:
        """Returns the rank of an entry. The entry with the lowest rank is evicted."""
        if math.isinf(self.c):
            return count
        return (touched << 16) + (self.half_life * log2_of_count(count) >> 16)

    def rank_of_new(self, now: int) -> int:
        """Returns the highest rank that a new id replaces: it counts as looked up four times."""
        return self.rank(4, now)
