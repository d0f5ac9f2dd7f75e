"""Batches of different kinds follow each other; the update path does not change any bit.

If previous batches had mostly ids with one position, a GPU updates such rows in batch order. It
links the positions of other ids in chains, and sorts only those of ids with more than a few.
"""

import pytest
import torch

from torchrec_hkv.hash_table import (
    SGD,
    Adam,
    RowWiseAdagrad,
    RowWiseAdam,
    TableGroup,
    TableSpec,
    Uniform,
)

BATCH = 2048
DIMS = (64, 128)
ROWS = 20_000
OPTIMIZERS = {
    "sgd": SGD(),
    "rowwise_adagrad": RowWiseAdagrad(eps=1e-8),
    "adam": Adam(),
    "rowwise_adam": RowWiseAdam(),  # has no specialised updater
}


def make_group(optimizer, device):
    """Two tables, three features, all ids inserted."""
    specs = [
        TableSpec(f"t{t}", 2 * ROWS, dim, initializer=Uniform(-1, 1)) for t, dim in enumerate(DIMS)
    ]
    group = TableGroup(specs, [0, 1, 0], OPTIMIZERS[optimizer], device=device)
    ids = torch.arange(ROWS, device=device)
    group.find_or_insert(ids.repeat(3), torch.arange(4, device=device) * ROWS, 1)
    return group


def step(group, ids, lengths, weights, grad, mean=False):
    """One forward and backward."""
    device = ids.device
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    anchor = torch.empty(0, device=device, requires_grad=True)
    rate = torch.full((), 0.1, device=device)
    pin = group.pin()
    slots = group.find_or_insert(ids, offsets, BATCH, pin)
    pooled = group.pooled_lookup(anchor, ids, offsets, weights, slots, BATCH, mean, pin, rate)
    pooled.backward(grad)
    if device.type == "cuda":
        torch.cuda.synchronize()  # now the host knows the batch when the next one begins


def rows_of(group, device):
    """Rows and states of both tables."""
    ids = torch.arange(ROWS, device=device)
    entries = []
    for table in range(len(DIMS)):
        state = group.export_table(table)
        found = state.ids[state.occupied]
        order = found.argsort()
        assert torch.equal(found[order], ids.to(found.device))
        entries += [
            state.rows[state.occupied][order].cpu(),
            state.states[state.occupied][order].cpu(),
        ]
    return entries


def draw(kind, lengths, device):
    """Ids of a batch."""
    n = int(lengths.sum())
    if kind == "alone":
        return torch.randperm(ROWS, device=device)[:n]
    if kind == "few repeated":
        ids = torch.randperm(ROWS, device=device)[:n]
        ids[torch.rand(n, device=device) < 0.03] = int(torch.randint(ROWS, ()))
        return ids
    if kind in ("pairs", "eights", "runs"):  # less than an eighth of the positions repeat
        ids = torch.randperm(ROWS, device=device)[:n]
        again = torch.randperm(n, device=device)[: n // (18 if kind == "pairs" else 10)]
        number = torch.arange(len(again), device=device)
        if kind == "eights":
            number = number // 7
        if kind == "runs":  # of 2 to 80 positions
            number = ((number + 1).double().log() * 20).long()
        ids[again] = ids[number]
        return ids
    if kind == "one id":
        return torch.full((n,), 7, device=device)
    return torch.randint(300, (n,), device=device)  # "repeated"


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["sum", "weighted mean"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "kind", ["alone", "few repeated", "pairs", "eights", "runs", "repeated", "one id"]
)
def test_order_of_updates_changes_no_bit(device_type, kind, optimizer, pooling):
    device = torch.device(device_type)
    groups = [make_group(optimizer, device) for _ in range(2)]
    lengths = torch.randint(6, (3 * BATCH,), device=device)
    lengths[5] = 300
    ids = draw(kind, lengths, device)
    mean = pooling == "weighted mean"
    weights = torch.rand(len(ids), device=device) if mean else None
    grad = torch.randn(BATCH, sum((DIMS[0], DIMS[1], DIMS[0])), device=device)
    # The previous batches decide the path: of unique ids in the first group, of repeated ids in the
    # second.
    for group, before in zip(groups, ("alone", "repeated"), strict=True):
        step(group, draw(before, lengths, device), lengths, None, torch.zeros_like(grad))
    for group in groups:
        step(group, ids, lengths, weights, grad, mean)
    for actual, other in zip(*(rows_of(group, device) for group in groups), strict=True):
        assert torch.equal(actual, other)  # zero gradients changed nothing


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
@pytest.mark.parametrize("kind", ["alone", "pairs", "eights", "runs", "repeated"])
def test_batches_after_one_of_which_a_part_was_sorted(device_type, kind, optimizer):
    """After a batch that sorted a part of its positions, the next one sorts on a stream of its
    own."""
    device = torch.device(device_type)
    groups = [make_group(optimizer, device) for _ in range(2)]
    lengths = torch.randint(6, (3 * BATCH,), device=device)
    ids = draw(kind, lengths, device)
    grad = torch.randn(BATCH, sum((DIMS[0], DIMS[1], DIMS[0])), device=device)
    for group, before in zip(groups, ("alone", "runs"), strict=True):
        for kind_before in ("alone", before):
            drawn = draw(kind_before, lengths, device)
            step(group, drawn, lengths, None, torch.zeros_like(grad))
    for group in groups:
        step(group, ids, lengths, None, grad)
    for actual, other in zip(*(rows_of(group, device) for group in groups), strict=True):
        assert torch.equal(actual, other)


@pytest.mark.parametrize("kind", ["few repeated", "pairs", "runs", "repeated", "one id"])
def test_batches_after_batches_of_rows_that_stand_alone(device_type, kind):
    """Equals the sum of gradients in double precision and the formula of row-wise Adagrad."""
    device = torch.device(device_type)
    group = make_group("rowwise_adagrad", device)
    lengths = torch.randint(1, 5, (3 * BATCH,), device=device)
    grad = torch.randn(BATCH, sum((DIMS[0], DIMS[1], DIMS[0])), device=device)
    step(group, draw("alone", lengths, device), lengths, None, torch.zeros_like(grad))
    before = [tensor.double() for tensor in rows_of(group, device)]
    ids = draw(kind, lengths, device)
    step(group, ids, lengths, None, grad)
    after = rows_of(group, device)
    bags = torch.arange(3 * BATCH, device=device).repeat_interleave(lengths).cpu()
    features, samples = bags // BATCH, bags % BATCH
    columns = (0, DIMS[0], DIMS[0] + DIMS[1])
    for table, dim in enumerate(DIMS):
        total = torch.zeros(ROWS, dim, dtype=torch.float64)
        for feature in (f for f, of in enumerate([0, 1, 0]) if of == table):
            mine = features == feature
            its = grad.cpu().double()[:, columns[feature] : columns[feature] + dim]
            total.index_add_(0, ids.cpu()[mine], its[samples[mine]])
        state = before[2 * table + 1][:, :1] + total.square().mean(1, keepdim=True)
        rows = before[2 * table] - torch.where(
            state > 0, 0.1 * total / (state.sqrt() + 1e-8), torch.zeros(())
        )
        torch.testing.assert_close(
            after[2 * table + 1][:, :1].double(), state, rtol=1e-4, atol=1e-6
        )
        torch.testing.assert_close(after[2 * table].double(), rows, rtol=1e-4, atol=1e-5)
