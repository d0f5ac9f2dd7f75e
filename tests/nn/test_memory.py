"""Memory limits hold; capacities that do not fit are capped or refused."""

import gc
import os

import pytest
import torch

from tests.support.embeddings import make_embedding, make_tables
from torchrec_hkv import HKVAdamOptimizer, HKVOptimizer
from torchrec_hkv.hash_table import table_memory
from torchrec_hkv.nn.capacity import GIB, HbmLimits, TableShape, free_memory


@pytest.fixture(autouse=True)
def nothing_left_of_other_tests():
    """Free memory is measured, so tables that await garbage collection would count."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def test_a_capacity_beyond_the_memory_is_capped_and_said(device_type):
    with pytest.warns(
        UserWarning, match="max_capacity is 1,000,000,000,000, but the free or allowed memory"
    ):
        embedding = make_embedding(64, device_type, max_capacity=10**12)
    without = embedding.capacity
    assert 10**5 < without < 10**10
    with pytest.warns(UserWarning, match="it evicts from there on"):
        HKVAdamOptimizer(embedding)
    assert without / 4 < embedding.capacity < without / 2


def test_the_warning_names_the_users_line(device_type):
    with pytest.warns(UserWarning, match="max_capacity is") as seen:
        make_embedding(64, device_type, max_capacity=10**13, init_capacity=64)
    assert [os.path.basename(warning.filename) for warning in seen] == ["embeddings.py"]


def test_a_first_allocation_beyond_the_memory_is_refused(device_type):
    with pytest.raises(
        ValueError, match=r"init_capacity is 1,000,000,000,000, but the free or allowed memory"
    ):
        make_embedding(64, device_type, max_capacity=10**12, init_capacity=10**12)


def test_an_empty_table_makes_room_for_the_one_with_states(device_type):
    """The example of a billion ids needs this: its memory does not hold both tables."""
    hbm, host = free_memory(torch.device(device_type))
    rows = int(0.25 * (hbm or host) / (2048 * 4))  # 0.75 with Adam's states
    embedding = make_embedding(2048, device_type, max_capacity=rows, init_capacity=rows)
    optimizer = HKVAdamOptimizer(embedding, lr=0.5)
    before = embedding(torch.arange(3, device=device_type))
    before.sum().backward()
    optimizer.step()
    after = embedding(torch.arange(3, device=device_type)).detach()
    torch.testing.assert_close(after, before.detach() - 0.5, rtol=0, atol=1e-4)


@pytest.mark.parametrize("held", [0, 3])
def test_states_that_do_not_fit_are_refused_and_nothing_changes(held, device_type):
    hbm, host = free_memory(torch.device(device_type))
    rows = int(0.4 * (hbm or host) / (2048 * 4))  # three times as much with Adam's states
    embedding = make_embedding(2048, device_type, max_capacity=rows, init_capacity=rows)
    optimizer = HKVOptimizer(embedding, lr=0.5)
    embedding(torch.arange(held, device=device_type))
    with pytest.raises(ValueError, match=r"init_capacity is .*, but the free or allowed memory"):
        HKVAdamOptimizer(embedding)
    assert embedding.counters()["embedding"]["size"] == held
    before = embedding(torch.arange(3, device=device_type)).detach()
    embedding(torch.arange(3, device=device_type)).sum().backward()
    optimizer.step()
    after = embedding(torch.arange(3, device=device_type)).detach()
    torch.testing.assert_close(after, before - 0.5)


def test_capacity_is_all_that_is_asked_for_where_it_fits(device_type):
    assert make_embedding(device=device_type, max_capacity=5000).capacity == 5000


def test_memory_is_taken_as_rows_come(device_type):
    """Takes memory for ``init_capacity`` rows at first, and more before it would evict."""
    # A GPU allocates pages of 2 MiB to a growing table, so the table must be much larger.
    embedding = make_embedding(32, device_type, max_capacity=640_000, init_capacity=20_000)
    whole = make_embedding(32, device_type, max_capacity=640_000, init_capacity=640_000)

    def taken(module):
        return module.group.hbm_bytes(0) + module.group.host_bytes(0)

    at_first = taken(embedding)
    assert at_first < taken(whole) / 8
    for ids in torch.arange(500_000, device=device_type).split(50_000):
        embedding(ids)
    assert embedding.counters()["embedding"]["size"] == 500_000
    assert embedding.counters()["embedding"]["evicted"] == 0
    assert at_first < taken(embedding) <= 1.2 * taken(whole)


def test_hbm_limits_of_rows_and_states():
    memory = table_memory(1000, 16, 32, "lru")
    assert HbmLimits().hbm_bytes(memory, 32) is None
    assert HbmLimits(GIB).hbm_bytes(memory, 32) == GIB
    assert HbmLimits(GIB, 2 * GIB).hbm_bytes(memory, 32) == 3 * GIB
    assert HbmLimits(GIB, 2 * GIB).hbm_bytes(memory, 0) == GIB  # the optimizer has no states
    # As many rows as there is room for their states.
    assert HbmLimits(None, 100 * 128).hbm_bytes(memory, 32) == memory.index_bytes + 100 * 192


def test_the_largest_capacity_fits_and_a_larger_one_does_not():
    shape = TableShape(3, 16, 32, "lru", HbmLimits(), torch.device("cpu"), 64)
    maximum = shape.max_rows(10**9, 0, 1 << 30)
    assert 3 * shape.memory(maximum).bytes <= 0.9 * (1 << 30)
    # Capacities grow from 64 rows, and round up by a sixteenth at most.
    assert 3 * shape.memory(maximum).bytes > 0.9 * (1 << 30) * 15 / 16
    assert shape.max_rows(maximum // 2, 0, 1 << 30) == maximum // 2


def test_an_index_as_large_as_its_limit_is_rounded_down_not_refused():
    """A GPU with little memory beside large host memory: the index, which is always in HBM, is the
    limit."""
    for first in (64, 1000, 65_536, 1_000_000):
        device = torch.device("cuda", 0)
        shape = TableShape(1, 64, 128, "lru", HbmLimits(GIB), device, first)
        maximum = shape.max_rows(10**9, 1 << 40, 1 << 45)
        assert shape.memory(maximum).least_hbm_bytes <= GIB
        assert maximum > 0.9 * GIB / 14


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
