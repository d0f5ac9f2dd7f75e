"""Counts of ids in the growing map equal those of a Counter."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from torchrec_hkv import _C

PLENTY = 1 << 30


@pytest.mark.parametrize("distinct", [1, 700, 20_000])
@pytest.mark.parametrize("max_in_step", [1, 50, 6000])
def test_counts_and_first_steps(distinct, max_in_step):
    generator = torch.Generator().manual_seed(distinct + max_in_step)
    counts, expected = _C.IdCounts(PLENTY), Counter()
    for _ in range(3):  # parts of a log
        sizes = torch.randint(0, max_in_step + 1, (12,), generator=generator)
        n = int(sizes.sum())
        ids = torch.randint(distinct, (n,), generator=generator) * 7919 - distinct
        found = counts.count(ids, sizes.cumsum(0))
        was_there = []
        for step in ids.split(sizes.tolist()):
            was_there += [ident in expected for ident in step.tolist()]
            expected.update(step.tolist())
        assert found.tolist() == was_there
    ids, numbers = counts.entries()
    assert dict(zip(ids.tolist(), numbers.tolist(), strict=True)) == expected
    assert counts.size == len(expected)
    assert not counts.overflowed


def test_too_little_memory():
    counts = _C.IdCounts(16 * 4096)
    ids = torch.arange(5000)
    found = counts.count(ids.repeat(2), torch.tensor([5000, 10_000]))
    assert counts.overflowed
    assert not found[:5000].any()
    assert int(found[5000:].sum()) == counts.size
    assert 500 < counts.size < 4096


def test_bad_input():
    counts = _C.IdCounts(PLENTY)
    with pytest.raises(TypeError, match="ids must be of dtype Long"):
        counts.count(torch.arange(3.0), torch.tensor([3]))
    with pytest.raises(ValueError, match="ends must rise up to 3, but have 4 behind 0"):
        counts.count(torch.arange(3), torch.tensor([4]))
    with pytest.raises(ValueError, match="ends must rise up to 3, but have 1 behind 2"):
        counts.count(torch.arange(3), torch.tensor([2, 1]))
    assert counts.size == 0
