"""Bags longer than a tile's chunk, among short and empty ones, are reduced as in float64, and their
gradients reach all rows."""

import pytest
import torch

from tests.support.batches import rows_by_id
from tests.support.filled_table import filled_table
from tests.support.pairwise import pairwise

#: Lengths around one and several chunks of 8, 16 and 32 positions.
LENGTHS = (0, 8, 1, 17, 16, 0, 33, 32, 0, 200, 3, 64, 7, 9, 31, 1000, 15, 24, 0, 25, 65, 500)
ROWS = 300
RATE = 0.1


@pytest.mark.parametrize(
    ("dim", "dtype", "reduction"),
    pairwise(
        (4, 16, 32, 60, 64, 100, 128, 132, 256, 516),
        [torch.float32, torch.float16, torch.bfloat16, torch.int8],
        ["sum", "mean", "weighted", "weighted mean"],
    ),
)
def test_equal_to_float64(device_type, dim, dtype, reduction):
    torch.manual_seed(dim)
    group, names, table = filled_table(ROWS, dim, dtype, device_type)
    lengths = torch.tensor(LENGTHS)[torch.randperm(len(LENGTHS))]
    batch, positions = len(lengths), int(lengths.sum())
    which = torch.randint(len(names), (positions,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    ids, ends = names[which].to(device_type), offsets.to(device_type)
    weights = torch.rand(positions) + 0.5 if "weighted" in reduction else None
    pin = group.pin()
    pooled = group.pooled_lookup(
        torch.empty(0, device=device_type, requires_grad=True),
        ids,
        ends,
        None if weights is None else weights.to(device_type),
        group.find_or_insert(ids, ends, batch, pin),
        batch,
        "mean" in reduction,
        pin,
        torch.tensor(RATE, device=device_type),
    )
    scale = torch.ones(positions, dtype=torch.double) if weights is None else weights.double()
    bag_of = torch.arange(batch).repeat_interleave(lengths)
    if "mean" in reduction:
        scale = scale / lengths[bag_of]
    terms = table[which] * scale[:, None]
    expected = torch.zeros(batch, dim, dtype=torch.double).index_add_(0, bag_of, terms)
    # A sum of 1,000 terms of about 1.
    torch.testing.assert_close(pooled.double().cpu(), expected, rtol=1e-5, atol=3e-4)

    grad = torch.randn(batch, dim)
    pooled.backward(grad.to(device_type))
    row_grads = torch.zeros_like(table)
    row_grads.index_add_(0, which, grad.double()[bag_of] * scale[:, None])
    wanted = table - RATE * row_grads
    updated = rows_by_id(group)
    got = torch.stack([updated[name] for name in names.tolist()]).double()
    largest = wanted.abs().amax(1, keepdim=True)
    # A row is rounded once; stochastic rounding of int8 may go up or down.
    steps = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
    assert ((got - wanted).abs() <= largest * steps.get(dtype, 1 / 126) + 1e-5).all()
