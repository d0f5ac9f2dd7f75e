"""Counts in a count-min sketch are never too low, and too high within the documented bound."""

import collections
import math

import pytest
import torch

from tests.support.admission_model import SketchedIds
from tests.support.tables import distinct_ids, make
from torchrec_hkv.hash_table import MinFrequency


def skewed(pool: torch.Tensor, n: int) -> torch.Tensor:
    """Ids from a pool, with skewed frequencies."""
    return pool[(len(pool) * torch.rand(n) ** 4).long()]


@pytest.mark.parametrize(
    ("count", "sketch_bytes"), [(2, 16), (5, 1000), (255, 2048), (256, 2048), (300, 1 << 16)]
)
def test_admits_what_the_model_admits(device_type, count, sketch_bytes):
    """Cells of 8 and 16 bits, sizes that are no multiple of 16, counts up to the cells' limits."""
    admission = MinFrequency(count, sketch_bytes=sketch_bytes)
    table, model = make(device_type, 4096, admission=admission), SketchedIds(admission)
    pool = distinct_ids(1500, device_type)
    inside: set[int] = set()
    for call in range(1, 13):
        ids = skewed(pool, 2000)
        slots, found = table.find_or_insert_slots(ids)
        missing = [id_ for id_ in ids.tolist() if id_ not in inside]
        assert (~found).sum() == len(missing)
        model.begin_call(call)
        inside |= model.admitted(missing)
        assert (slots >= 0).tolist() == [id_ in inside for id_ in ids.tolist()]
    assert table.size == len(inside) > 0
    assert table.counters()["evicted"] == 0


@pytest.mark.parametrize("count", [2, 10, 400])
def test_never_too_low(device_type, count):
    """An id with enough lookups is admitted, however small the sketch."""
    table = make(device_type, 4096, admission=MinFrequency(count, sketch_bytes=256))
    pool = distinct_ids(800, device_type)
    requested: collections.Counter[int] = collections.Counter()
    for _ in range(10):
        ids = skewed(pool, 3000)
        requested.update(ids.tolist())
        slots, _ = table.find_or_insert_slots(ids)
        there = set(ids[slots >= 0].tolist())
        assert there >= {id_ for id_ in set(ids.tolist()) if requested[id_] >= count}


@pytest.mark.parametrize("sketch_bytes", [1 << 12, 1 << 14])
def test_too_high_within_the_bound(device_type, sketch_bytes):
    """Ids with one lookup are admitted at most as often as the documented bound allows."""
    width = sketch_bytes // 4
    requested = 2 * width
    count = 1 + math.ceil(math.e * requested / width)  # too high by more than e * asked / width
    table = make(device_type, 1 << 16, admission=MinFrequency(count, sketch_bytes=sketch_bytes))
    ids = distinct_ids(requested, device_type)
    slots, _ = table.find_or_insert_slots(ids)
    share = float((slots >= 0).double().mean())
    assert share <= math.exp(-4)
    # A sketch that is twice as full exceeds this bound.
    slots, _ = table.find_or_insert_slots(distinct_ids(3 * requested, device_type))
    assert float((slots >= 0).double().mean()) > math.exp(-4)


def test_clear_forgets_counts(device_type):
    table = make(device_type, admission=MinFrequency(2, sketch_bytes=1 << 12))
    ids = distinct_ids(5, device_type)
    table.find_or_insert(ids)
    table.clear()
    table.find_or_insert(ids)
    assert table.size == 0
    table.find_or_insert(ids)
    assert table.size == 5


def test_a_hot_id_does_not_overflow_its_cells(device_type):
    """A full cell does not overflow into its neighbours in the word."""
    table = make(device_type, 4096, admission=MinFrequency(250, sketch_bytes=1 << 14))
    ids = distinct_ids(200, device_type)
    table.find_or_insert(ids[:100].repeat(249))
    assert table.size < 10
    hot = ids[100:101].expand(100_000)
    assert (table.find_or_insert_slots(hot)[0] >= 0).all()
    table.find_or_insert(ids[101:].repeat(249))
    assert table.size < 20
    assert (table.find_or_insert_slots(ids)[0] >= 0).all()
