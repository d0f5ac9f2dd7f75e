"""Properties of growing tables, computed without their code."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.support.geometry import geometry
from tests.support.initial_value import mix64
from tests.support.saved_tables import buckets_of
from torchrec_hkv.hash_table import HashTable


def slots_needed(table_capacity: int, initial: int, entries: int) -> int:
    """Returns the slots of a table that grew as little as possible, for its largest number of
    entries."""
    first, last, slots = geometry(table_capacity, initial)
    buckets = first
    while buckets < last and entries > buckets * slots - buckets * slots // 8:
        buckets *= 2
    return buckets * slots


def check_buckets(table: HashTable, slots: dict[int, int]) -> None:
    """Checks that every id is in one of its two buckets."""
    spec = table._group.tables[0]
    *_, bucket_slots = geometry(spec.capacity, spec.initial_capacity or spec.capacity)
    buckets = table.num_slots // bucket_slots
    for id_, slot in slots.items():
        assert slot // bucket_slots in buckets_of(id_, buckets)


def _unmix64(x: int) -> int:
    """Inverts mix64."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        y = x
        for _ in range(64 // shift):
            y = x ^ y >> shift
        x = y * pow(factor, -1, 2**64) % 2**64
    return x


def ids_of_one_bucket(buckets: int, bucket: int) -> Iterator[int]:
    """Yields ids whose two hashes give the same bucket, so that their second bucket is the next."""
    low = -(-(bucket << 32) // buckets)
    high = -(-((bucket + 1) << 32) // buckets)
    while True:
        hashed = random.randrange(low, high) << 32 | random.randrange(low, high)
        id_ = _unmix64(hashed) ^ 0x6A09E667F3BCC909
        assert mix64(id_ ^ 0x6A09E667F3BCC909) == hashed
        yield id_ - 2**64 if id_ >= 2**63 else id_
