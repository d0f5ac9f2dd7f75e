"""On a GPU positions are sorted table by table if each feature has its own table.

If two features share a table, a group sorts all positions at once. Rows must be equal bit for bit
either way. So must outputs, because another kernel pools hot slots that the sort has found.
"""

import pytest
import torch

from tests.support.gpu import NEEDS_GPU
from torchrec_hkv.hash_table import SGD, Adam, RowWiseAdagrad, TableGroup, TableSpec, Uniform

pytestmark = NEEDS_GPU

TABLES = 10
BATCH = 1024
IDS = 5000  # of each table
DIM = 8
NOWHERE = IDS + 3  # an id without a slot


def make(capacity, optimizer, shares, dim=DIM):
    specs = [TableSpec(f"t{t}", capacity, dim, initializer=Uniform(-1, 1)) for t in range(TABLES)]
    features = [*range(TABLES), 0] if shares else list(range(TABLES))
    group = TableGroup(specs, features, optimizer, device="cuda")
    ids = torch.arange(IDS, device="cuda").repeat(TABLES)
    ends = torch.arange(len(features) + 1, device="cuda").clamp_(max=TABLES) * IDS
    group.find_or_insert(ids, ends, 1)
    return group


def draw(kind):
    """Ids and lengths of bags. In "missing", a fifth of the positions get no slot."""
    lengths = torch.randint(21, (TABLES, BATCH), device="cuda")
    if kind == "one long feature":
        lengths[3] = 150
    if kind == "empty features":
        lengths[:2] = 0
        lengths[-1] = 0
    n = int(lengths.sum())
    ids = torch.randint(IDS, (n,), device="cuda")
    if kind == "hot":  # in one table a third of the positions, in others more
        ids[torch.rand(n, device="cuda") < torch.linspace(0.3, 1, n, device="cuda")] = 7
    if kind == "hot bags":  # most bags have few other ids; some are long, or empty
        lengths = torch.where(lengths < 4, 0, lengths * 3)
        n = int(lengths.sum())
        ids = torch.randint(IDS, (n,), device="cuda")
        ids[torch.rand(n, device="cuda") < 0.95] = 7
        ids[torch.rand(n, device="cuda") < 0.001] = NOWHERE
    if kind == "missing":
        ids[torch.rand(n, device="cuda") < 0.2] = NOWHERE
    return ids, lengths.flatten()


def step(group, ids, lengths, weights, mean, grad):
    bags = group.num_features * BATCH
    offsets = torch.zeros(bags + 1, dtype=torch.long, device="cuda")
    offsets[1 : len(lengths) + 1] = lengths.cumsum(0)
    offsets[len(lengths) + 1 :] = len(ids)
    anchor = torch.empty(0, device="cuda", requires_grad=True)
    rate = torch.full((), 0.1, device="cuda")
    pin = group.pin()
    slots = group.find_or_insert(ids, offsets, BATCH, pin)
    slots = slots.where(ids != NOWHERE, -1)
    out = group.pooled_lookup(anchor, ids, offsets, weights, slots, BATCH, mean, pin, rate)
    out.backward(grad[:, : out.shape[1]].contiguous())
    torch.cuda.synchronize()  # now the host knows the batch when the next one begins
    return out.detach()


def rows_of(group):
    entries = []
    for table in range(TABLES):
        state = group.export_table(table)
        order = state.ids[state.occupied].argsort()
        entries += [state.rows[state.occupied][order], state.states[state.occupied][order]]
    return entries


@pytest.mark.parametrize("kind", ["even", "hot", "missing", "one long feature", "empty features"])
@pytest.mark.parametrize("capacity", [2 * IDS, 1_000_000, 3_000_000])  # two passes, three, wider
def test_sort_by_table_changes_no_bit(capacity, kind):
    compare(capacity, kind, RowWiseAdagrad(eps=1e-8), None, False)


@pytest.mark.parametrize("pooling", ["sum", "weighted mean"])
@pytest.mark.parametrize("optimizer", [SGD(), Adam()])
def test_other_updates(optimizer, pooling):
    compare(1_000_000, "hot", optimizer, pooling != "sum", pooling != "sum")


@pytest.mark.parametrize("dim", [8, 40, 128])
@pytest.mark.parametrize("kind", ["hot", "hot bags"])
def test_pooling_of_hot_slots(kind, dim):
    compare(200_000, kind, RowWiseAdagrad(eps=1e-8), False, False, dim)


def compare(capacity, kind, optimizer, weighted, mean, dim=DIM):
    groups = [make(capacity, optimizer, shares, dim) for shares in (False, True)]
    for _ in range(3):
        ids, lengths = draw(kind)
        weights = torch.rand(len(ids), device="cuda") if weighted else None
        grad = torch.randn(BATCH, (TABLES + 1) * dim, device="cuda")
        outs = [step(group, ids, lengths, weights, mean, grad) for group in groups]
        assert torch.equal(outs[0], outs[1][:, : TABLES * dim])
    for actual, other in zip(*(rows_of(group) for group in groups), strict=True):
        assert torch.equal(actual, other)
