"""A refused call does not count: ages and LRU scores stay."""

import pytest
import torch

from tests.support.tables import contents, distinct_ids, make


@pytest.mark.parametrize("eviction", ["lru", "epoch_lru"])
def test_the_clock_stands(device_type, eviction):
    table = make(device_type, eviction=eviction)
    id_ = distinct_ids(1, device_type)
    table.find_or_insert(id_)
    for bad in (id_.float(), id_.view(1, 1), id_.tolist()):
        with pytest.raises((TypeError, ValueError)):
            table.find_or_insert(bad)
    table.find_or_insert(id_)
    assert contents(table)[int(id_)][1] == 2
    assert torch.equal(table.contains(id_), torch.ones_like(id_, dtype=torch.bool))
