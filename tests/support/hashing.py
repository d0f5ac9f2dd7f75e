"""Computes the buckets of an id by the rule of docs/concepts/hash_table.md, in Python integers."""

from __future__ import annotations

_MASK = 2**64 - 1


def mix64(x: int) -> int:
    """Mixes 64 bits."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def buckets_of(id_: int, num_buckets: int) -> tuple[int, int]:
    """Returns the two candidate buckets of an id: the scaled halves of its mix."""
    x = mix64((id_ % 2**64) ^ 0x6A09E667F3BCC909)
    first, second = (half * num_buckets >> 32 for half in (x >> 32, x & 0xFFFFFFFF))
    if first == second and num_buckets > 1:
        second = (first + 1) % num_buckets
    return first, second
