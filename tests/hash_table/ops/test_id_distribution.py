"""Ids spread over buckets and owner ranks as random ones do, whatever their pattern."""

import pytest
import torch

from tests.support.id_streams import STREAMS, id_stream
from tests.support.tables import make
from torchrec_hkv.hash_table import owner_rank

CAPACITY = 65_536  # 1024 buckets of 64 slots
MIN = 1e-5


def probability(places: torch.Tensor, number: int) -> float:
    """The probability of a chi-square against equal shares this large or larger, for random
    placement."""
    counts = torch.bincount(places.cpu(), minlength=number).double()
    assert len(counts) == number
    expected = counts.sum() / number
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(number - 1.0, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, chi_square / 2))


def buckets(device: str, ids: torch.Tensor) -> torch.Tensor:
    """Each id's bucket in a table so empty that all ids are in their first bucket."""
    table = make(device, CAPACITY, dim=1)
    slots, _ = table.find_or_insert_slots(ids.to(device))
    return slots // 64


@pytest.mark.parametrize("stream", STREAMS)
def test_buckets(device_type, stream):
    """A quarter of the table is full: 16 ids a bucket."""
    assert probability(buckets(device_type, id_stream(stream, CAPACITY // 4)), 1024) > MIN


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("world_size", [2, 3, 8, 100, 1024])
def test_owner_ranks(stream, world_size):
    assert probability(owner_rank(id_stream(stream, CAPACITY), world_size), world_size) > MIN


@pytest.mark.parametrize("stream", STREAMS)
def test_a_ranks_ids_spread_over_all_buckets_of_its_table(device_type, stream):
    ids = id_stream(stream, CAPACITY)
    for rank in (0, 3, 7):
        owned = ids[owner_rank(ids, 8) == rank]
        assert probability(buckets(device_type, owned), 1024) > MIN
