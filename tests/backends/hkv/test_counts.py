"""Counts in a ``state_dict`` take equal bytes on any number of ranks, and up to 8 shards fit."""

from __future__ import annotations

import pytest
import torch

from tests.support.shards import table_shard
from torchrec_hkv import HKVOptions
from torchrec_hkv.backends.hkv.counts import MAX_SHARDS, CountsLoad, counts_spec
from torchrec_hkv.hash_table import MinFrequency, Probability, RowWiseAdagrad, TableGroup, TableSpec
from torchrec_hkv.hash_table.admission import admission_bytes
from torchrec_hkv.sharding.tables import balanced_rows

CELLS = MinFrequency(4, entries=100)
SKETCHES = [MinFrequency(4, sketch_bytes=256), MinFrequency(300, sketch_bytes=256)]


def make_shard(rows, capacity, offset):
    return table_shard(
        capacity, 4, HKVOptions(), num_embeddings=rows, row_offset=offset, init_range=(-1, 1)
    )


def sizes(rows, world_size, admission):
    capacities, offsets = balanced_rows(rows, world_size)
    specs = [
        counts_spec(make_shard(rows, n, at), admission)
        for n, at in zip(capacities, offsets, strict=True)
    ]
    return [next(iter(spec.values())).shape[0] if spec else 0 for spec in specs]


@pytest.mark.parametrize("rows", [1000, 1001, 1007, 999_983])
@pytest.mark.parametrize("admission", [CELLS, *SKETCHES])
def test_every_number_of_ranks_has_the_same_bytes(rows, admission):
    room = admission_bytes(admission)
    for world_size in range(1, MAX_SHARDS + 1):
        found = sizes(rows, world_size, admission)
        assert sum(found) == MAX_SHARDS * room
        assert all(size >= room and size % room == 0 for size in found)
    assert sum(sizes(rows, 16, admission)) == MAX_SHARDS * room


@pytest.mark.parametrize("admission", [None, Probability(0.5)])
def test_what_counts_nothing_has_none(admission):
    assert sizes(1000, 2, admission) == [0, 0]


@pytest.mark.parametrize(("admission", "number"), [(SKETCHES[0], 200), (SKETCHES[1], 40_000)])
def test_sketches_are_added_up_to_the_largest_number(admission, number):
    """The sum of two counts is capped at the cell's maximum; zeros stay zero."""
    spec = TableSpec("t", 64, 4, admission=admission)
    group = TableGroup([spec], [0], RowWiseAdagrad(), device="cpu")
    load = CountsLoad(group, 0, (0, 1 << 16))
    cell = torch.uint8 if number < 256 else torch.uint16
    numbers = torch.zeros(256 // torch.empty(0, dtype=cell).element_size(), dtype=torch.int64)
    numbers[3], numbers[5] = number, 7
    room = numbers.to(cell).view(torch.uint8)
    # One shard's counts come twice, in pieces; another shard's are zero.
    load.put(0, torch.cat([room, room[:128]]))
    load.put(384, room[128:])
    load.put(0, torch.zeros(256, dtype=torch.uint8))
    load.finish()
    counts = group.read_admission(0, 0, 256).view(cell).long()
    expected = numbers * 2
    expected[3] = torch.iinfo(cell).max
    assert counts.tolist() == expected.tolist()
