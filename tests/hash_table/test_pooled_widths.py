"""Bags of rows of every width and dtype are reduced as in float64; ids without a row count with
their initial rows."""

import pytest
import torch

from tests.support.filled_table import filled_table
from tests.support.pairwise import pairwise

#: Whole vectors of a CPU, partial ones, and widths that need several passes over a row.
WIDTHS = (
    1,
    3,
    4,
    7,
    8,
    9,
    12,
    16,
    20,
    29,
    32,
    36,
    56,
    60,
    63,
    64,
    68,
    100,
    128,
    132,
    192,
    256,
    260,
    512,
    516,
)
ROWS, BATCH = 60, 37


@pytest.mark.parametrize(
    ("dim", "dtype", "reduction"),
    pairwise(
        WIDTHS,
        [torch.float32, torch.float16, torch.bfloat16, torch.int8],
        ["sum", "mean", "weighted", "weighted mean"],
    ),
)
def test_equal_to_float64(device_type, dim, dtype, reduction):
    torch.manual_seed(dim)
    group, names, table = filled_table(ROWS, dim, dtype, device_type)
    # Five ids leave the table, and count with their initial rows.
    which = torch.randint(ROWS, (BATCH * 5,))
    lengths = torch.tensor([0, 9] * BATCH)[:BATCH]
    lengths[-1] = 5 * BATCH - int(lengths[:-1].sum())
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    group.erase(names[:5].to(device_type), None, 1)
    ids, ends = names[which].to(device_type), offsets.to(device_type)
    weights = torch.rand(len(which)) + 0.5 if "weighted" in reduction else None
    pooled = group.pooled_lookup(
        torch.empty(0, device=device_type),
        ids,
        ends,
        None if weights is None else weights.to(device_type),
        group.find(ids, ends, BATCH),
        BATCH,
        "mean" in reduction,
        None,
        torch.tensor(0.1, device=device_type),
    )
    terms = table[which] * (1.0 if weights is None else weights[:, None].double())
    bag_of = torch.arange(BATCH).repeat_interleave(lengths)
    expected = torch.zeros(BATCH, dim, dtype=torch.double).index_add_(0, bag_of, terms)
    if "mean" in reduction:
        expected /= lengths.clamp(min=1)[:, None]
    # An initial row is not rounded to the table's dtype.
    steps = {torch.float32: 0.0, torch.int8: 1 / 127}
    rounding = steps[dtype] if dtype in steps else float(torch.finfo(dtype).eps)
    error = (pooled.double().cpu() - expected).abs()
    lost = torch.isin(which, torch.arange(5)).double()
    of_lost = torch.zeros(BATCH, dtype=torch.double).index_add_(0, bag_of, lost)
    assert (error <= 1e-5 + (rounding * 1.5 * of_lost)[:, None]).all()
    assert (of_lost == 0).any()
    assert (of_lost > 0).any()
