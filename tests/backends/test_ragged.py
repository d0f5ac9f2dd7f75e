"""Features with different numbers of bags are looked up as if all had the same number."""

from __future__ import annotations

import pytest
import torch

from torchrec_hkv.backends.ragged import ragged_lookup

DIMS = [3, 2, 5]


@pytest.mark.parametrize("bags", [[4, 1, 6], [0, 3, 0], [2, 2, 2], [0, 0, 0], [1, 0, 9]], ids=str)
def test_as_feature_by_feature(bags):
    torch.manual_seed(sum(bags))
    tables = [torch.randn(20, dim, dtype=torch.float64, requires_grad=True) for dim in DIMS]
    lengths = torch.randint(0, 4, (sum(bags),))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, 20, (int(offsets[-1]),))

    def lookup(uniform, batch_size):
        assert uniform.numel() == 3 * batch_size + 1
        pooled = [
            torch.stack(
                [
                    table[ids[uniform[bag] : uniform[bag + 1]]].sum(0)
                    for bag in range(feature * batch_size, (feature + 1) * batch_size)
                ]
            )
            if batch_size
            else table[:0]
            for feature, table in enumerate(tables)
        ]
        return torch.cat(pooled, dim=1)

    flat = ragged_lookup(lookup, offsets, bags, DIMS)
    expected, bag = [], 0
    for table, count in zip(tables, bags, strict=True):
        for _ in range(count):
            expected.append(table[ids[offsets[bag] : offsets[bag + 1]]].sum(0))
            bag += 1
    wanted = torch.cat([*expected, torch.empty(0, dtype=torch.float64)])
    torch.testing.assert_close(flat, wanted, rtol=0, atol=0)
    if not expected:
        return
    weights = torch.randn_like(flat)
    grads = torch.autograd.grad((flat * weights).sum(), tables)
    wanted_grads = torch.autograd.grad((wanted * weights).sum(), tables, allow_unused=True)
    for got, want in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want)
