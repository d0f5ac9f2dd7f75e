"""Bounds on memory hold, and capacities that don't fit are capped or refused."""

import pytest
import torch

from tests.support.embeddings import make_embedding, make_tables
from torchrec_hkv import HKVAdamOptimizer, HKVOptimizer
from torchrec_hkv.hash_table import table_memory
from torchrec_hkv.nn.capacity import GIB, HbmLimits, Shape


def test_a_capacity_beyond_the_memory_is_capped_and_said(device_type):
    with pytest.warns(UserWarning, match="max_capacity is 1,000,000,000,000, but the memory"):
        embedding = make_embedding(64, device_type, max_capacity=10**12)
    without = embedding.capacity
    assert 10**5 < without < 10**10
    with pytest.warns(UserWarning, match="from there on it evicts"):
        HKVAdamOptimizer(embedding)
    assert without / 4 < embedding.capacity < without / 2


def test_a_first_allocation_beyond_the_memory_is_refused(device_type):
    with pytest.raises(ValueError, match=r"init_capacity is 1,000,000,000,000, but the memory"):
        make_embedding(64, device_type, max_capacity=10**12, init_capacity=10**12)


def test_states_that_do_not_fit_are_refused_and_nothing_changes(device_type, monkeypatch):
    embedding = make_embedding(64, device_type, max_capacity=4096, init_capacity=4096)
    optimizer = HKVOptimizer(embedding, lr=0.5)
    before = embedding(torch.arange(3, device=device_type)).detach()
    small = 4096 * 600 / 0.9  # rows fit, not with their states
    for name in ("host_memory", "gpu_memory"):
        monkeypatch.setattr(f"torchrec_hkv.nn.capacity.{name}", lambda *_: (small, 1 << 50))
    with pytest.raises(ValueError, match="init_capacity is 4,096, but the memory"):
        HKVAdamOptimizer(embedding)
    embedding(torch.arange(3, device=device_type)).sum().backward()
    optimizer.step()
    after = embedding(torch.arange(3, device=device_type)).detach()
    torch.testing.assert_close(after, before - 0.5)


def test_capacity_is_all_that_is_asked_for_where_it_fits(device_type):
    assert make_embedding(device=device_type, max_capacity=5000).capacity == 5000


def test_hbm_limits_of_rows_and_states():
    memory = table_memory(1000, 16, 32, "lru")
    assert HbmLimits().hbm_bytes(memory, 32) is None
    assert HbmLimits(GIB).hbm_bytes(memory, 32) == GIB
    assert HbmLimits(GIB, 2 * GIB).hbm_bytes(memory, 32) == 3 * GIB
    assert HbmLimits(GIB, 2 * GIB).hbm_bytes(memory, 0) == GIB  # no states to speak of
    # As many rows as their states have room for.
    assert HbmLimits(None, 100 * 128).hbm_bytes(memory, 32) == memory.index_bytes + 100 * 192


def test_the_largest_capacity_fits_and_a_larger_one_does_not(monkeypatch):
    monkeypatch.setattr("torchrec_hkv.nn.capacity.host_memory", lambda: (1 << 30, 1 << 40))
    shape = Shape(3, 16, 32, "lru", HbmLimits(), torch.device("cpu"))
    most = shape.most_rows(10**9)
    assert 3 * shape.memory(most).bytes <= 0.9 * (1 << 30)
    assert 3 * shape.memory(most + most // 500).bytes > 0.9 * (1 << 30)
    assert shape.most_rows(most // 2) == most // 2


@pytest.mark.gpu
@pytest.mark.parametrize("state_gb", [None, 0.002])
def test_tables_keep_within_their_hbm(state_gb):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    limit = 0.004
    tables = make_tables(2, 64, "cuda", max_capacity_per_table=100_000, max_hbm_gb_per_table=limit)
    optimizer = HKVAdamOptimizer(tables, state_hbm_gb_per_embedding=state_gb)
    for part in torch.arange(80_000, device="cuda").split(8192):
        sum(rows.sum() for rows in tables([part, part])).backward()
        optimizer.step()
    group = tables._tables.group
    for table in range(2):
        assert 0 < group.hbm_bytes(table) <= (limit + (state_gb or 0)) * GIB
        assert group.host_bytes(table) > 0
    assert all(counted["size"] == 80_000 for counted in tables.counters().values())
