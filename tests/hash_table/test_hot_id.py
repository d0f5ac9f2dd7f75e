"""Large batches with one id in half of the positions, on a GPU: the same outputs and rows as on a
CPU.

Tiles of the pooling then keep that id's row in registers, over several chunks of positions, and
the update passes over the positions of its run.
"""

import pytest
import torch

from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.hash_table import SGD, RowWiseAdagrad, TableGroup, TableSpec, Uniform

pytestmark = NEEDS_GPU

FEATURES = 26
ROWS = 2_000


def step(group, ids, offsets, batch_size, grad):
    """The output of one forward and backward."""
    device = group.device
    ids, offsets, grad = ids.to(device), offsets.to(device), grad.to(device)
    anchor = torch.empty(0, device=device, requires_grad=True)
    pin = group.pin()
    slots = group.find_or_insert(ids, offsets, batch_size, pin)
    rate = torch.full((), 0.1, device=device)
    out = group.pooled_lookup(anchor, ids, offsets, None, slots, batch_size, False, pin, rate)
    out.backward(grad)
    if device.type == "cuda":
        torch.cuda.synchronize()  # what the batch was like is known when the next begins
    return out.detach().cpu()


def rows_of(group):
    """The rows of all tables, in the order of ids."""
    parts = []
    for number in range(FEATURES):
        table = group.export_table(number)
        order = table.ids[table.occupied].argsort()
        parts.append(table.rows[table.occupied][order].cpu())
    return parts


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
        expected, out = (step(g, ids, offsets, batch_size, grad) for g in groups)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for expected, found in zip(*(rows_of(group) for group in groups), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


# Tiles of one chunk, of three and of six, on a GPU of 132 multiprocessors.
@pytest.mark.parametrize("batch_size", [2048, 4096, 8192])
@pytest.mark.parametrize("dim", [8, 128])
@pytest.mark.parametrize(
    "optimizer", [SGD(), RowWiseAdagrad(eps=1e-8)], ids=lambda optimizer: type(optimizer).__name__
)
def test_steps(optimizer, dim, batch_size):
    compare(dim, batch_size, optimizer)
