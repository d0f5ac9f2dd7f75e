"""On a CPU, calls give the same slots and evict the same ids on any number of threads."""

import pytest
import torch

from torchrec_hkv.hash_table import HashTable, Uniform

THREADS = [1, 2, 3, 8]


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("capacity", [64, 1000, 20_000])
def test_slots_and_leavers_do_not_depend_on_threads(set_threads, policy, capacity):
    """Batches from empty to overfull, with repeated ids; results must have the same order."""
    generator = torch.Generator().manual_seed(capacity)
    batches = [
        torch.randint(-3 * capacity, 3 * capacity, (n,), generator=generator)
        for n in (capacity // 2, capacity, 4 * capacity, capacity // 3, 4 * capacity)
    ]
    outcomes = []
    for threads in THREADS:
        set_threads(threads)
        table = HashTable(3, capacity, eviction=policy, initializer=Uniform(-1, 1))
        outcome = []
        for ids in batches:
            slots, found = table.find_or_insert_slots(ids)
            rows = ids.unsqueeze(1).expand(-1, 3).float()
            back = table.insert_and_evict(ids.flip(0), rows.flip(0))
            outcome += [slots, found, back.ids, back.scores, back.rows]
        entries = next(table.export(batch_size=1 << 30))
        outcomes.append([*outcome, entries.ids, entries.rows, entries.scores])
    assert any(part.numel() for part in outcomes[0][2::5])  # something was evicted
    for outcome in outcomes[1:]:
        for part, first in zip(outcome, outcomes[0], strict=True):
            assert torch.equal(part, first)
