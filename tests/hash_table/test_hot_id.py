"""On a GPU, large batches with one id in half of the positions equal EmbeddingBags in float64.

Pooling tiles then keep that id's row in registers over several chunks of positions, and the update
skips to the end of its run. A CPU's tables are no reference: they sum the row's 40,000 gradients
sequentially in float32.
"""

import pytest
import torch

from tests.support.gpu import NEEDS_GPU
from tests.support.steps import contents, pooled_step
from torchrec_hkv.hash_table import SGD, RowWiseAdagrad, TableGroup, TableSpec, Uniform

pytestmark = NEEDS_GPU

FEATURES = 26
ROWS = 2_000
LEARNING_RATE = 0.1  # pooled_step's
EPS = 1e-8


class Float64Table:
    """A table and its optimizer: SGD or row-wise Adagrad."""

    def __init__(self, rows, adagrad):
        self.rows = rows.double().requires_grad_()
        self.states = torch.zeros(len(rows), int(adagrad), dtype=torch.float64)

    def step(self, ids, offsets, grad):
        out = torch.nn.functional.embedding_bag(
            ids, self.rows, offsets, mode="sum", include_last_offset=True
        )
        (grad,) = torch.autograd.grad(out, self.rows, grad.double())
        with torch.no_grad():
            self.states += grad.square().mean(1, keepdim=True)[:, : self.states.shape[1]]
            scale = self.states.sqrt() + EPS if self.states.numel() else 1.0
            self.rows -= LEARNING_RATE * grad / scale
        return out.detach()


def compare(dim, batch_size, optimizer, device="cuda"):
    specs = [TableSpec(f"t{i}", 2 * ROWS, dim, initializer=Uniform(-1, 1)) for i in range(FEATURES)]
    group = TableGroup(specs, list(range(FEATURES)), optimizer, device=device)
    all_ids = torch.arange(ROWS, device=device).repeat(FEATURES)
    group.find_or_insert(all_ids, torch.arange(FEATURES + 1, device=device) * ROWS, 1)
    tables = [
        Float64Table(rows, isinstance(optimizer, RowWiseAdagrad))
        for rows in contents(group, FEATURES)[::2]
    ]
    torch.manual_seed(dim)
    for _ in range(3):
        lengths = torch.randint(0, 21, (FEATURES * batch_size,))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = torch.randint(ROWS, (int(offsets[-1]),))
        ids[torch.rand(len(ids)) < 0.5] = 7
        grad = torch.randn(batch_size, FEATURES * dim) / len(ids)
        out = pooled_step(group, ids, offsets, batch_size, grad)
        for table, bags, found, own_grad in zip(
            tables,
            offsets.unfold(0, batch_size + 1, batch_size),
            out.split(dim, 1),
            grad.split(dim, 1),
            strict=True,
        ):
            own_ids = ids[bags[0] : bags[-1]]
            expected = table.step(own_ids, bags - bags[0], own_grad)
            torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    found = contents(group, FEATURES)
    for table, rows, states in zip(tables, found[::2], found[1::2], strict=True):
        torch.testing.assert_close(rows.double(), table.rows.detach(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(states.double(), table.states, rtol=1e-3, atol=1e-4)


# Tiles of one chunk, of three and of six, on a GPU of 132 multiprocessors.
@pytest.mark.parametrize("batch_size", [2048, 4096, 8192])
@pytest.mark.parametrize("dim", [8, 128])
@pytest.mark.parametrize(
    "optimizer",
    [SGD(), RowWiseAdagrad(eps=EPS)],
    ids=lambda optimizer: type(optimizer).__name__,
)
def test_steps(optimizer, dim, batch_size):
    compare(dim, batch_size, optimizer)
