"""Wide rows with more gradients than a GPU's cache holds train as on a CPU.

A GPU has separate kernels for such a batch: it pools rows without asynchronous copies, updates them
in bag order, and computes long sums column by column.
"""

import pytest
import torch

from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.hash_table import (
    LAMB,
    SGD,
    Adam,
    RowWiseAdagrad,
    TableGroup,
    TableSpec,
    Uniform,
)

pytestmark = NEEDS_GPU

BATCH = 4096  # of 1024 columns: 16 MiB of gradients a table
IDS = 3000
NOWHERE = IDS + 1  # an id without a slot


def make(dims, features, optimizer, dtype, device):
    specs = [
        TableSpec(f"t{t}", 2 * IDS, dim, initializer=Uniform(-1, 1), dtype=dtype)
        for t, dim in enumerate(dims)
    ]
    group = TableGroup(specs, features, optimizer, device=device)
    ids = torch.arange(IDS, device=device).repeat(len(features))
    group.find_or_insert(ids, torch.arange(len(features) + 1, device=device) * IDS, 1)
    return group


def draw(features, hot):
    """Ids and lengths of bags, some of which are empty. A tenth of the ids get no slot."""
    lengths = torch.randint(11, (features, BATCH))
    lengths[:, 100:200] = 0
    ids = torch.randint(IDS, (int(lengths.sum()),))
    if hot:
        ids[torch.rand(len(ids)) < 0.3] = 7
        ids[torch.rand(len(ids)) < 0.02] = 8
    ids[torch.rand(len(ids)) < 0.1] = NOWHERE
    return ids, lengths.flatten()


def step(group, ids, lengths, weights, mean, grad):
    device = group.device
    ids, grad = ids.to(device), grad.to(device)
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.long, device=device)
    offsets[1:] = lengths.to(device).cumsum(0)
    weights = weights.to(device) if weights is not None else None
    anchor = torch.empty(0, device=device, requires_grad=True)
    pin = group.pin()
    slots = group.find_or_insert(ids, offsets, BATCH, pin)
    slots = slots.where(ids != NOWHERE, -1)
    rate = torch.full((), 0.01, device=device)
    out = group.pooled_lookup(anchor, ids, offsets, weights, slots, BATCH, mean, pin, rate)
    out.backward(grad)
    return out.detach().cpu()


def compare(dims, optimizer, *, hot=True, features=None, dtype=torch.float32, weighted=False):
    torch.manual_seed(len(dims) + int(hot))
    features = list(range(len(dims))) if features is None else features
    groups = [make(dims, features, optimizer, dtype, device) for device in ("cuda", "cpu")]
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for _ in range(3):
        ids, lengths = draw(len(features), hot)
        weights = torch.rand(len(ids)) if weighted else None
        grad = torch.randn(BATCH, sum(dims[t] for t in features)) * 0.1
        outs = [step(group, ids, lengths, weights, weighted, grad) for group in groups]
        torch.testing.assert_close(*outs, **close)
    for table in range(len(dims)):
        entries = []
        for group in groups:
            state = group.export_table(table)
            order = state.ids[state.occupied].argsort()
            entries.append(
                [part[state.occupied][order].float().cpu() for part in (state.rows, state.states)]
            )
        for actual, other in zip(*entries, strict=True):
            torch.testing.assert_close(actual, other, **close)


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("optimizer", [SGD(), RowWiseAdagrad(eps=1e-8), Adam(), LAMB()])
def test_optimizers(optimizer, hot):
    compare([1024, 1024], optimizer, hot=hot)


@pytest.mark.parametrize("dims", [[1100], [512, 1024], [388, 1024, 640]])
def test_other_columns(dims):
    compare(dims, RowWiseAdagrad(eps=1e-8))


def test_weighted_mean():
    compare([1024, 1024], RowWiseAdagrad(eps=1e-8), weighted=True)


def test_features_of_one_table():
    compare([1024], Adam(), features=[0, 0, 0])


def test_narrow_rows():
    compare([1024, 1024], RowWiseAdagrad(eps=1e-8), dtype=torch.float16)
