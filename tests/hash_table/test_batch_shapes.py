"""Lookups and updates with any number of tables, widths, features and bags equal EmbeddingBag in
float64."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.batches import rows_by_id
from tests.support.gpu import NEEDS_GPU
from tests.support.ragged_batches import RaggedBatch, look_up, reference_step
from torchrec_hkv.hash_table import SGD, TableGroup, TableSpec, Uniform


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@settings(max_examples=60, deadline=None)
@given(
    bags=st.lists(st.integers(0, 40), min_size=1, max_size=70),
    dims=st.lists(
        st.sampled_from([1, 2, 4, 8, 20, 64, 128, 130]) | st.integers(1, 1024),
        min_size=1,
        max_size=64,
    ),
    ragged=st.booleans(),
    mean=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(bags=[0, 3] * 35, dims=[1, 1024] * 32, ragged=True, mean=False, seed=0)
@example(bags=[5] * 70, dims=[128, 36, 3] * 21, ragged=False, mean=True, seed=1)
@example(bags=[0], dims=[8], ragged=False, mean=False, seed=2)
def test_one_step(device, bags, dims, ragged, mean, seed):
    if not ragged:  # all features have equal numbers of bags
        bags = bags[:1] * len(bags)
    torch.manual_seed(seed)
    specs = [TableSpec(f"t{i}", 200, dim, initializer=Uniform(-1, 1)) for i, dim in enumerate(dims)]
    features = [index % len(dims) for index in range(len(bags))]
    group = TableGroup(specs, features, SGD(), device)
    batch = RaggedBatch(bags, torch.arange(30), device)
    weights = batch.weights.clone().requires_grad_()
    if ragged:
        out = look_up(group, batch.ids, batch.offsets, weights, mean, bags)
    else:
        out = look_up(group, batch.ids, batch.offsets, weights, mean, batch_size=bags[0])
        columns = out.split([dims[table] for table in features], dim=1)
        out = torch.cat([part.flatten() for part in columns])
    names = [rows_by_id(group, table) for table in range(len(dims))]
    rows = [
        torch.stack([held.get(i, torch.zeros(dim)) for i in range(30)]).double()
        for held, dim in zip(names, dims, strict=True)
    ]
    grad = torch.randn_like(out)
    wanted, row_grads, weight_grad = reference_step(
        rows, batch, features, weights.detach(), mean, lambda _, g=grad: g.double().cpu()
    )
    torch.testing.assert_close(out.detach().double().cpu(), wanted, rtol=1e-5, atol=1e-5)
    out.backward(grad)
    if weight_grad is not None:
        got = weights.grad.double().cpu()
        torch.testing.assert_close(got, weight_grad, rtol=1e-4, atol=1e-4)
    for table, row_grad in enumerate(row_grads):
        for id_, row in rows_by_id(group, table).items():
            step = 0.0 if row_grad is None else 0.1 * row_grad[id_]
            torch.testing.assert_close(row.double(), rows[table][id_] - step, rtol=1e-4, atol=1e-4)
