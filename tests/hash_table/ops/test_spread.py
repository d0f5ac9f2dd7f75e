"""Ids spread over buckets and over owner ranks as if at random, whatever their pattern."""

import pytest
import torch

from tests.support.id_streams import STREAMS, id_stream
from tests.support.tables import make
from torchrec_hkv.hash_table import owner_rank

CAPACITY = 65_536  # 1024 buckets of 64 slots


def excess(places: torch.Tensor, number: int) -> float:
    """Chi-square against equal shares, in standard deviations above its mean."""
    counts = torch.bincount(places.cpu(), minlength=number).double()
    assert len(counts) == number
    expected = counts.sum() / number
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = number - 1
    return float((chi_square - freedom) / (2 * freedom) ** 0.5)


def buckets(device: str, ids: torch.Tensor) -> torch.Tensor:
    """Each id's bucket in a table so empty that all find room in their first."""
    table = make(device, CAPACITY, dim=1)
    slots, _ = table.find_or_insert_slots(ids.to(device))
    return slots // 64


@pytest.mark.parametrize("stream", STREAMS)
def test_buckets(device_type, stream):
    """A quarter of the table: 16 ids a bucket."""
    assert excess(buckets(device_type, id_stream(stream, CAPACITY // 4)), 1024) < 5


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("world_size", [2, 3, 8, 100, 1024])
def test_owner_ranks(stream, world_size):
    assert excess(owner_rank(id_stream(stream, CAPACITY), world_size), world_size) < 5


@pytest.mark.parametrize("stream", STREAMS)
def test_a_ranks_ids_spread_over_all_buckets_of_its_table(device_type, stream):
    ids = id_stream(stream, CAPACITY)
    for rank in (0, 3, 7):
        mine = ids[owner_rank(ids, 8) == rank]
        assert excess(buckets(device_type, mine), 1024) < 5
