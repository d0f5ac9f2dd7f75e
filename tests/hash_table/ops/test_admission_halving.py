"""Counts are halved every few calls."""

import pytest
import torch

from tests.support.tables import distinct_ids, make
from torchrec_hkv.hash_table import MinFrequency

WHERE = [{"entries": 512}, {"sketch_bytes": 1 << 12}]


@pytest.mark.parametrize("where", WHERE, ids=["cells", "sketch"])
@pytest.mark.parametrize("count", [8, 300])
def test_halved_in_every_fourth_call(device_type, where, count):
    """After 2, 3, 4 calls of n occurrences each: 2 n, 3 n, and 3 n / 2 + n."""
    table = make(device_type, admission=MinFrequency(count, halve_every=4, **where))
    one, other = distinct_ids(2, device_type).split(1)
    n = 2 * count // 5  # 3 n reaches the threshold, 5 n / 2 just reaches or just misses it
    table.find_or_insert(one[:0])
    for _ in range(2):
        assert (table.find_or_insert_slots(one.repeat(n))[0] == -1).all()
    missing = count - 2 * n // 2
    slots, _ = table.find_or_insert_slots(
        torch.cat([one.repeat(missing - 1), other.repeat(count - 1)])
    )
    assert (slots == -1).all()
    slots, _ = table.find_or_insert_slots(torch.cat([one, other]))
    assert (slots >= 0).all()


@pytest.mark.parametrize("where", WHERE, ids=["cells", "sketch"])
def test_old_counts_fade(device_type, where):
    """An id that is looked up rarely is never admitted."""
    table = make(device_type, admission=MinFrequency(3, halve_every=2, **where))
    ids = distinct_ids(20, device_type)
    for _ in range(20):
        table.find_or_insert(ids)
        table.find_or_insert(ids[:0])
        table.find_or_insert(ids[:0])
        table.find_or_insert(ids[:0])
    assert table.size == 0


def test_counts_of_one_leave_their_cells(device_type):
    table = make(device_type, 512, admission=MinFrequency(2, entries=8, halve_every=2))
    for part in distinct_ids(64, device_type).split(8):
        table.find_or_insert(part)  # an odd call; the next call halves its counts
        assert (table.find_or_insert_slots(part)[0] == -1).all()


@pytest.mark.parametrize("count", [200, 30_000])
def test_neighbours_in_a_word_are_halved_apart(device_type, count):
    """Halving does not mix cells of a word: all cells of a small sketch, odd counts too."""
    table = make(
        device_type, 4096, admission=MinFrequency(count, sketch_bytes=1 << 14, halve_every=2)
    )
    ids = distinct_ids(60, device_type)
    times = torch.arange(1, 61, device=device_type)
    table.find_or_insert(ids.repeat_interleave(times))
    rest = count - times // 2
    slots, _ = table.find_or_insert_slots(ids.repeat_interleave(rest - 1))
    assert (slots == -1).all()
    table.clear()
    table.find_or_insert(ids.repeat_interleave(times))
    slots, _ = table.find_or_insert_slots(ids.repeat_interleave(rest))
    assert (slots >= 0).all()
