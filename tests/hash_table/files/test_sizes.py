"""Unusual sizes: empty tables, one entry, batches and shards of a few bytes, narrow and wide
rows."""

import itertools

import pytest
import torch

from tests.support.saved_tables import assert_same, filled, like, shard_files, snapshot
from torchrec_hkv.hash_table import files
from torchrec_hkv.hash_table.files.shard_plan import plan_shards


def test_an_empty_table(device_type, tmp_path):
    table = filled(device_type, 0)
    table.save(tmp_path)
    assert shard_files(tmp_path) == []
    loaded = filled(device_type, 100)
    assert loaded.load(tmp_path) == 0
    assert loaded.size == 0
    assert loaded._group.clock == table._group.clock


def test_an_empty_table_into_another_capacity(device_type, tmp_path):
    table = filled(device_type, 0)
    table.save(tmp_path)
    loaded = filled(device_type, 100, capacity=120)
    assert loaded.load(tmp_path) == 0
    assert loaded.size == 0


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 1000])
@pytest.mark.parametrize("batch_bytes", [1, 333, 4096])
def test_batches(device_type, tmp_path, n, batch_bytes):
    table = filled(device_type, n, 1100, dim=3, eviction="lfu")
    table.save(tmp_path, batch_bytes=max(batch_bytes, 500))
    loaded = like(table)
    loaded.load(tmp_path, batch_bytes=batch_bytes)
    assert_same(snapshot(table), snapshot(loaded))


@pytest.mark.parametrize("dim", [1, 2, 7, 128, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dims(device_type, tmp_path, dim, dtype):
    table = filled(device_type, 50, 64, dim=dim, dtype=dtype, state_dim=dim % 5)
    table.save(tmp_path, batch_bytes=1 << 14)
    loaded = like(table)
    loaded.load(tmp_path, batch_bytes=1 << 14)
    assert_same(snapshot(table), snapshot(loaded))


@pytest.mark.parametrize("shard_bytes", [1, 40, 1000, 9999])
def test_many_shards(device_type, tmp_path, shard_bytes):
    table = filled(device_type, 40, 64, dim=1)
    files.save(table._group, 0, tmp_path, epoch=table.epoch, shard_bytes=shard_bytes)
    assert len(shard_files(tmp_path)) > 40 * 24 // max(24, shard_bytes) - 1
    loaded = like(table)
    loaded.load(tmp_path)
    assert_same(snapshot(table), snapshot(loaded))


@pytest.mark.parametrize("bytes_", [0, -1])
def test_sizes_that_make_no_sense(tmp_path, bytes_):
    table = filled("cpu")
    with pytest.raises(ValueError, match=f"batch_bytes is {bytes_}, but must be at least 1"):
        table.save(tmp_path / "t", batch_bytes=bytes_)
    assert not (tmp_path / "t").exists()
    table.save(tmp_path)
    with pytest.raises(ValueError, match=f"batch_bytes is {bytes_}, but must be at least 1"):
        table.load(tmp_path, batch_bytes=bytes_)


def test_ranges_of_owner_buckets():
    """plan_shards keeps its documented promises."""
    generator = torch.Generator().manual_seed(1)
    for maximum in (1, 3, 10, 1000):
        counts = torch.randint(0, 6, (200,), generator=generator)
        counts[50:60] = 0
        counts[70] = 25
        plan = plan_shards(counts, maximum)
        assert sum(entries for _, _, entries in plan) == int(counts.sum())
        assert all(1 <= entries <= maximum for _, _, entries in plan)
        for begin, end in {(begin, end) for begin, end, _ in plan}:
            held = sum(entries for first, _, entries in plan if first == begin)
            assert held == int(counts[begin:end].sum())
        ranges = sorted({(begin, end) for begin, end, _ in plan})
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    assert plan_shards(torch.zeros(9, dtype=torch.int64), 5) == []
