"""Files, states and copies keep int8 tables bit for bit."""

import copy

import pytest
import torch

from tests.support.saved_tables import assert_same, entries, filled, like, shard_files, snapshot
from torchrec_hkv.hash_table import HashTable, TableGroup, TableSpec


def int8_table(device, dim=30, **options):
    return filled(device, 3000, 4000, dim=dim, dtype=torch.int8, state_dim=2, **options)


@pytest.mark.parametrize("dim", [4, 30, 33])
def test_saved_and_loaded(device_type, tmp_path, dim):
    table = int8_table(device_type, dim, eviction="lfu")
    table.save(tmp_path)
    loaded = like(table)
    assert loaded.load(tmp_path) == 0
    assert_same(snapshot(table), snapshot(loaded))


def test_files_hold_a_byte_a_column(device_type, tmp_path):
    table = int8_table(device_type, dim=128)
    table.save(tmp_path)
    entry = sum(path.stat().st_size for path in shard_files(tmp_path)) / 3000
    assert 128 + 4 + 8 + 20 <= entry < 128 + 4 + 8 + 20 + 1  # scale, states, id, slot, last step


def test_another_capacity(device_type, tmp_path):
    table = int8_table(device_type)
    table.save(tmp_path)
    loaded = like(table, capacity=9000)
    assert loaded.load(tmp_path) == 0
    assert entries(loaded) == entries(table)


def test_other_device(device_type, tmp_path):
    table = int8_table("cpu")
    table.save(tmp_path)
    loaded = like(table, device_type)
    loaded.load(tmp_path)
    assert entries(loaded) == entries(table)


def test_made_from_files(device_type, tmp_path):
    table = int8_table(device_type)
    table.save(tmp_path)
    loaded = HashTable.from_file(tmp_path, device=device_type)
    assert loaded.dtype == torch.int8
    assert entries(loaded) == entries(table)


def test_another_dtype_is_refused(device_type, tmp_path):
    table = int8_table(device_type)
    table.save(tmp_path)
    with pytest.raises(ValueError, match=r"its dtype is 'int8', but that .* is 'float32'"):
        like(table, dtype=torch.float32).load(tmp_path)


def test_exported_state(device_type):
    table = int8_table(device_type)
    other = like(table)
    other.group.load_table(0, table.group.export_table(0))
    assert_same(snapshot(table), snapshot(other))


def test_copied(device_type):
    table = int8_table(device_type)
    assert entries(copy.deepcopy(table)) == entries(table)


def test_column_shards_are_refused(device_type):
    spec = TableSpec("t", 100, 8, column_offset=8, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"table 't': dtype is torch.int8 and column_offset 8, "):
        TableGroup([spec], [0], None, device_type)
