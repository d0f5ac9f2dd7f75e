"""Large batches of one id a bag on a GPU: the same outputs, rows and states as on a CPU.

Such batches have ways of their own: rows that are read once are pooled as what leaves the
second-level cache last, narrow rows that stand alone are updated from shared memory, and Adam's by
a warp each.
"""

import pytest
import torch

from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.hash_table import (
    SGD,
    Adagrad,
    Adam,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    Uniform,
)

pytestmark = NEEDS_GPU

OPTIMIZERS = [SGD(), RowWiseAdagrad(eps=1e-8), Adagrad(eps=1e-8), Adam()]


def step(group, ids, grad):
    """The output of one forward and backward."""
    device = ids.device
    offsets = torch.arange(len(ids) + 1, device=device)
    anchor = torch.empty(0, device=device, requires_grad=True)
    pin = group.pin()
    slots = group.find_or_insert(ids, offsets, len(ids), pin)
    rate = torch.full((), 0.1, device=device)
    out = group.pooled_lookup(anchor, ids, offsets, None, slots, len(ids), False, pin, rate)
    out.backward(grad)
    if device.type == "cuda":
        torch.cuda.synchronize()  # what the batch was like is known when the next begins
    return out.detach().cpu()


def contents(group):
    """Rows and states in the order of ids."""
    table = group.export_table(0)
    ids = table.ids[table.occupied]
    order = ids.argsort()
    assert torch.equal(ids[order].cpu(), torch.arange(len(ids)))
    return [part[table.occupied][order].cpu() for part in (table.rows, table.states)]


def compare(dim, n, optimizer, repeated, device="cuda"):
    rows = n * 5 // 4
    spec = TableSpec("t", 2 * rows, dim, initializer=Uniform(-1, 1))
    groups = [TableGroup([spec], [0], optimizer, device=at) for at in ("cpu", device)]
    for group in groups:
        ids = torch.arange(rows, device=group.device)
        group.find_or_insert(ids, torch.tensor([0, rows], device=group.device), 1)
    for _ in range(3):
        ids = torch.randperm(rows)[:n]
        ids[torch.randperm(n)[: int(n * repeated)]] = ids[: int(n * repeated)].clone()
        grad = torch.randn(n, dim)
        expected, out = (step(g, ids.to(g.device), grad.to(g.device)) for g in groups)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    for expected, found in zip(*(contents(group) for group in groups), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# Below and above 2^17.
@pytest.mark.parametrize("n", [100_003, 200_003])
@pytest.mark.parametrize("dim", [4, 64, 100, 128])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_updates(optimizer, dim, n):
    compare(dim, n, optimizer, repeated=0.05)


# Above where rows are read as what leaves the cache last.
@pytest.mark.parametrize("dim", [8, 64, 128])
@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(eps=1e-8), Adam()], ids=["rowwise", "adam"])
def test_pooling_of_many(optimizer, dim):
    compare(dim, (1 << 19) + 77, optimizer, repeated=0.05)
