"""Numbers of buckets and slots of a table, by the rule of docs/concepts/hash_table.md."""

from __future__ import annotations


def geometry(capacity: int, initial: int) -> tuple[int, int, int]:
    """Returns (initial buckets, final buckets, slots per bucket) by the documented rule."""
    minimum = -(-capacity // 64)
    for doublings in range(minimum.bit_length() - 1, -1, -1):
        first = -(-minimum // 2**doublings)
        slots = -(-capacity // (first * 2**doublings))
        fits = first * 2**doublings - minimum <= minimum // 16 and first * slots >= initial
        if fits or doublings == 0:
            return first, first * 2**doublings, slots
    raise AssertionError
