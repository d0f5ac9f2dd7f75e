"""Large batches with one id in half of the positions, on a GPU: the same outputs and rows as on a
CPU.

Tiles of the pooling then keep that id's row in registers, over several chunks of positions, and
the update passes over the positions of its run.
"""

import pytest
import torch

from tests.support.gpu import NEEDS_GPU
from tests.support.steps import contents, pooled_step
from torchrec_hkv.hash_table import SGD, RowWiseAdagrad, TableGroup, TableSpec, Uniform

pytestmark = NEEDS_GPU

FEATURES = 26
ROWS = 2_000


def compare(dim, batch_size, optimizer, device="cuda"):
    specs = [TableSpec(f"t{i}", 2 * ROWS, dim, initializer=Uniform(-1, 1)) for i in range(FEATURES)]
    groups = [
        TableGroup(specs, list(range(FEATURES)), optimizer, device=at) for at in ("cpu", device)
    ]
    torch.manual_seed(dim)
    for _ in range(3):
        lengths = torch.randint(0, 21, (FEATURES * batch_size,))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = torch.randint(ROWS, (int(offsets[-1]),))
        ids[torch.rand(len(ids)) < 0.5] = 7
        grad = torch.randn(batch_size, FEATURES * dim) / len(ids)
        expected, out = (pooled_step(g, ids, offsets, batch_size, grad) for g in groups)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for expected, found in zip(*(contents(group, FEATURES) for group in groups), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


# Tiles of one chunk, of three and of six, on a GPU of 132 multiprocessors.
@pytest.mark.parametrize("batch_size", [2048, 4096, 8192])
@pytest.mark.parametrize("dim", [8, 128])
@pytest.mark.parametrize(
    "optimizer", [SGD(), RowWiseAdagrad(eps=1e-8)], ids=lambda optimizer: type(optimizer).__name__
)
def test_steps(optimizer, dim, batch_size):
    compare(dim, batch_size, optimizer)
