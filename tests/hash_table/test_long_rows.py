"""On a CPU all threads sum the gradients of a row with very many positions, bit for bit as one
thread."""

from __future__ import annotations

import pytest
import torch

from tests.support.batches import Bags, lookup
from tests.support.piece_sums import sums_in_pieces
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec, Uniform

IDS, HOT = 50, (3, 17)


def draw(dim: int) -> torch.Tensor:
    """Ids of which two take most positions, with others between."""
    minimum = (1 << 19) // (dim + 32)  # positions of a long row
    pool = torch.cat([torch.full((minimum + 100,), hot) for hot in HOT] + [torch.arange(IDS)] * 9)
    return pool[torch.randperm(len(pool))]


@pytest.mark.parametrize("dim", [1, 3, 20, 64, 132, 260])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_sums(set_threads, weighted, dim):
    torch.manual_seed(dim)
    ids = draw(dim)
    bags = Bags(ids, torch.arange(len(ids) + 1), len(ids))
    grad, weights = torch.randn(len(ids), dim), torch.rand(len(ids))
    rows = []
    for threads in (1, 2, 5):
        set_threads(threads)
        spec = TableSpec("t", 4 * IDS, dim, initializer=Uniform(-1, 1))
        group = TableGroup([spec], [0], SGD(), "cpu")
        out = lookup(group, bags, weights if weighted else None, learning_rate=1.0)
        start = out.detach().clone()
        out.backward(grad)
        table = group.export_table(0)
        order = table.ids[table.occupied].argsort()
        rows.append(table.rows[table.occupied][order])
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    if not weighted:  # outputs are the rows before the update
        set_threads(1)  # with one thread, index_add_ adds in index order
        first = torch.tensor([int((ids == id_).nonzero()[0]) for id_ in range(IDS)])
        assert torch.equal(rows[0], start[first] - sums_in_pieces(ids, grad, IDS))
