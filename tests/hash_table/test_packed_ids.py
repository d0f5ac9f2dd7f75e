"""A packed table stores only the part of an id that its digest does not determine; every id can be
restored."""

import pytest
import torch

from tests.support.batches import Bags, find, insert, random_ids, rows_by_id
from tests.support.gpu import needs_gpu
from tests.support.layouts import device_type
from torchrec_hkv import _C
from torchrec_hkv.hash_table import TableGroup, TableSpec

__all__ = ["device_type"]

_BITS = (1 << 64) - 1
_SEED = 0x6A09E667F3BCC909


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _unmixed(x: int) -> int:
    """The inverse of mix64."""
    x ^= x >> 31 ^ x >> 62
    x = x * pow(0x94D049BB133111EB, -1, 1 << 64) & _BITS
    x ^= x >> 27 ^ x >> 54
    x = x * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & _BITS
    return x ^ x >> 30 ^ x >> 60


def _ids_of_digest(raw: int, n: int) -> list[int]:
    """Ids that have this digest, before two digest values are replaced by others.

    Those of two digests differ in the lowest 16 bits of their hashes alone.
    """
    hashes = [_C.mix64(i) & ~0xFFFF for i in range(n)]
    return [_signed(_unmixed(h | (h >> 32 & 0xFFFF) ^ raw) ^ _SEED) for h in hashes]


_SPECIAL = [i for raw in (0, 1, 0xFFFE, 0xFFFF, 0x8000) for i in _ids_of_digest(raw, 20)]


def test_the_inverse_of_the_mix():
    for i in (0, 1, 12345, _BITS):
        assert _unmixed(_C.mix64(i)) == i


def test_ids_come_back():
    ends = [0, 1, -1, 2**63 - 1, -(2**63)]
    for id_ in [*ends, *_SPECIAL, *random_ids(10_000).tolist()]:
        assert _C.packed_again(id_) == id_


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_ids_of_one_digest_are_told_apart(device_type, eviction):
    group = TableGroup([TableSpec("t", 2000, 2, eviction)], [0], device=device_type)
    ids = torch.tensor(_SPECIAL).to(device_type)
    half = Bags.flat(ids[::2].contiguous())
    slots = insert(group, half)
    assert slots.unique().numel() == len(slots)
    found = find(group, Bags.flat(ids))
    assert torch.equal(found[::2], slots)
    assert (found[1::2] < 0).all()
    everything = insert(group, Bags.flat(ids))
    assert torch.equal(everything[::2], slots)
    assert everything.unique().numel() == len(ids)
    assert rows_by_id(group).keys() == set(_SPECIAL)
    state = group.export_table(0)
    other = TableGroup([TableSpec("t", 2000, 2, eviction)], [0], device=device_type)
    other.load_table(0, state)
    assert torch.equal(find(other, Bags.flat(ids)), everything)


@needs_gpu
def test_the_oldest_of_both_buckets_leaves():
    """Packed tables use the same slots as others for the same calls."""

    def run(packed_from: int) -> list[torch.Tensor]:
        before = _C.set_packed_from(packed_from)
        group = TableGroup([TableSpec("t", 1000, 2, "lru", deterministic=True)], [0], device="cuda")
        _C.set_packed_from(before)
        pool = random_ids(4000, torch.Generator().manual_seed(5)).to("cuda")
        generator = torch.Generator().manual_seed(1)
        slots = []
        for _ in range(300):
            at = torch.randint(len(pool), (16,), generator=generator)
            slots.append(insert(group, Bags.flat(pool[at.to("cuda")])))
        return slots

    for packed, apart in zip(run(0), run(1 << 40), strict=True):
        assert torch.equal(packed, apart)


@needs_gpu
def test_one_id_at_a_time_takes_the_same_places():
    """One id at a time leaves nothing to chance, also without the batch order."""

    def run(packed_from: int) -> list[int]:
        before = _C.set_packed_from(packed_from)
        group = TableGroup([TableSpec("t", 500, 2, "lru")], [0], device="cuda")
        _C.set_packed_from(before)
        pool = random_ids(1500, torch.Generator().manual_seed(6)).to("cuda")
        generator = torch.Generator().manual_seed(2)
        at = torch.randint(len(pool), (3000,), generator=generator).to("cuda")
        return torch.cat([insert(group, Bags.flat(id_)) for id_ in pool[at].split(1)]).tolist()

    assert run(0) == run(1 << 40)
