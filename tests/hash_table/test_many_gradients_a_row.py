"""Large batches of narrow rows, each with several gradients, train as on a CPU.

A GPU's tile of lanes then takes 32 positions, several for each lane.
"""

import pytest
import torch
from torch import Tensor

from tests.support.batches import Bags, lookup
from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.hash_table import Adagrad, RowWiseAdagrad, TableGroup, TableSpec, Uniform

pytestmark = NEEDS_GPU

POSITIONS, BAG = 900_000, 10


def trained(spec: TableSpec, optimizer: object, bags: Bags, grad: Tensor, device: str) -> Tensor:
    """Rows after one step, ordered by id."""
    group = TableGroup([spec], [0], optimizer, device=device)
    lookup(group, bags.to(device), learning_rate=0.1).backward(grad.to(device))
    table = group.export_table(0)
    order = table.ids[table.occupied].argsort()
    return table.rows[table.occupied][order].float().cpu()


@pytest.mark.parametrize("dim", [20, 64])
@pytest.mark.parametrize("gradients", [3, 13, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
# With a small eps, Adagrad's first step depends on the sign of nearly zero sums.
@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(eps=1e-8), Adagrad(eps=1e-2)])
def test_rows(optimizer, dtype, gradients, dim):
    torch.manual_seed(gradients + dim)
    rows = POSITIONS // gradients
    offsets = torch.arange(0, POSITIONS + 1, BAG)
    bags = Bags(torch.randint(rows, (POSITIONS,)), offsets, len(offsets) - 1)
    grad = torch.randn(bags.batch_size, dim)
    spec = TableSpec("t", 2 * rows, dim, initializer=Uniform(-1, 1), dtype=dtype)
    actual, other = (trained(spec, optimizer, bags, grad, device) for device in ("cuda", "cpu"))
    close = 1e-4 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(actual, other, rtol=close, atol=close)
