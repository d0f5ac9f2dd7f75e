"""Counts of the frequency policies are exact if one id takes most of a batch."""

import pytest
import torch

from tests.support.tables import make, scores_of

IDS = 3000
BATCH = 50_000


def hot_batch(share: float) -> torch.Tensor:
    ids = torch.randint(1, IDS, (BATCH,))
    return ids.where(torch.rand(BATCH) >= share, 0)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("policy", ["lfu", "epoch_lfu"])
def test_counts_are_exact(device_type, policy, given, share):
    table = make(device_type, 2 * IDS, dim=3, eviction=policy)
    expected = torch.zeros(IDS, dtype=torch.long)
    seen: set[int] = set()
    for _ in range(4):
        ids = hot_batch(share)
        counts = torch.randint(0, 7, (BATCH,)) if given else torch.ones(BATCH, dtype=torch.long)
        expected.index_add_(0, ids, counts)
        seen.update(ids.tolist())
        table.find_or_insert(ids.to(device_type), counts.to(device_type) if given else None)
    assert scores_of(table) == {i: int(expected[i]) for i in seen}
