"""Gradients that are views of larger tensors, at any alignment."""

import pytest
import torch

from tests.support.batches import Bags, lookup, random_ids, rows_by_id
from torchrec_hkv.hash_table import RowWiseAdagrad, TableGroup, TableSpec, Uniform


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("dim", [8, 200])
def test_a_view_trains_as_a_copy_of_it(device_type, dim, first):
    bags = Bags.random(1, 60, random_ids(50)).to(device_type)
    values = torch.randn(first + 60 * dim, device=device_type)
    view = values[first:].view(60, dim)
    rows = []
    for grad in (view, view.clone()):
        spec = TableSpec("t", 256, dim, initializer=Uniform(-1, 1))
        group = TableGroup([spec], [0], RowWiseAdagrad(), device=device_type)
        lookup(group, bags).backward(grad)
        rows.append(rows_by_id(group))
    assert rows[0].keys() == rows[1].keys()
    assert all(torch.equal(rows[0][id_], row) for id_, row in rows[1].items())
