"""A deterministic table of another size loads a file on a GPU as on a CPU."""

import pytest
import torch

from tests.support.gpu import NEEDS_GPU
from tests.support.table_states import assert_same_states
from tests.support.tables import distinct_ids
from torchrec_hkv.hash_table import HashTable, Uniform

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("capacity", [64, 700, 1000, 5000])
@pytest.mark.parametrize("policy", ["lru", "lfu", "customized"])
def test_as_on_cpu(tmp_path, policy, capacity):
    options = {"eviction": policy, "state_dim": 3, "initializer": Uniform(-1, 1)}
    saved = HashTable(5, 1500, **options)
    for _ in range(10):
        ids = distinct_ids(200, "cpu")
        scores = torch.randint(1, 20, (200,)) if policy != "lru" else None
        saved.find_or_insert(ids, scores)
    saved.save(tmp_path / "table")
    tables = [
        HashTable(5, capacity, device=device, deterministic=True, **options)
        for device in ("cuda", "cpu")
    ]
    lost = [table.load(tmp_path / "table", allow_loss=True) for table in tables]
    assert lost[0] == lost[1]
    assert (lost[0] > 0) == (capacity < 1500)
    assert_same_states(tables[0].group, tables[1].group)
