"""Sums of a row's gradients are nearly exact, even for very many equal gradients."""

import pytest
import torch

from tests.support.batches import Bags, lookup, random_ids, rows_by_id
from torchrec_hkv.hash_table import SGD, Constant, TableGroup, TableSpec

DIM = 8
# Worst-case rounding errors without cancellation: within a piece of 64 on a CPU, and within a
# warp's share of the pieces on a GPU.
WORST = {"cpu": 64 * 2.0**-24, "cuda": 1e-4}


# Around the ends of pieces, and many.
@pytest.mark.parametrize("positions", [2, 63, 64, 65, 127, 128, 129, 300_001])
@pytest.mark.parametrize("alike", [False, True])
def test_equal_to_float64(device_type, positions, alike):
    hot, *others = random_ids(100).unique().tolist()
    ids = torch.tensor([hot] * positions + others)
    order = torch.randperm(len(ids))
    grad = torch.full((len(ids), DIM), 0.1) if alike else torch.rand(len(ids), DIM)
    spec = TableSpec("t", 200, DIM, initializer=Constant(0.0))
    group = TableGroup([spec], [0], SGD(), device=device_type)
    bags = Bags(ids[order], torch.arange(len(ids) + 1), len(ids)).to(device_type)
    out = lookup(group, bags, learning_rate=1.0)
    out.backward(grad[order].to(device_type))
    rows = rows_by_id(group)
    total = grad[:positions].double().sum(0)
    assert float((-rows[hot].double() / total - 1).abs().max()) < WORST[device_type]
    assert torch.equal(torch.stack([rows[id_] for id_ in others]), -grad[positions:])
