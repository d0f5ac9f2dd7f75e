"""Tables on a CPU load several files at once."""

from __future__ import annotations

import random

import pytest

from tests.hash_table.files.test_verified_while_loading import load
from tests.support.saved_tables import entries, filled, like, shard_files
from torchrec_hkv.hash_table.files import parallel_files, save


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    """Shortens pieces, because the files of these tests are short."""
    monkeypatch.setattr(parallel_files, "PIECE_BYTES", 64)


@pytest.mark.parametrize("eviction", ["lru", "lfu", "customized"])
@pytest.mark.parametrize("batch_bytes", [1_000, 20_000, 1 << 20])
def test_all_entries_come_back(tmp_path, eviction, batch_bytes):
    table = filled("cpu", 5000, 6000, eviction=eviction, state_dim=3)
    save(table._group, 0, tmp_path, shard_bytes=9_000)
    assert len(shard_files(tmp_path)) > parallel_files._FILES
    loaded = like(table)
    load(loaded, tmp_path, batch_bytes=batch_bytes)
    assert entries(loaded) == entries(table)


def test_files_of_very_different_sizes(tmp_path):
    table = filled("cpu", 5000, 6000)
    save(table._group, 0, tmp_path, shard_bytes=entry_bytes_of(table) * 4990)
    sizes = [path.stat().st_size for path in shard_files(tmp_path)]
    assert max(sizes) > 10 * min(sizes)
    loaded = like(table)
    load(loaded, tmp_path, batch_bytes=20_000)
    assert entries(loaded) == entries(table)


def test_a_short_file_does_not_make_rounds_long(tmp_path, monkeypatch):
    """The longest rounds decide the memory of a load."""
    table = filled("cpu", 5000, 6000)
    save(table._group, 0, tmp_path, shard_bytes=entry_bytes_of(table) * 4990)
    reserved = []

    class Recorded(parallel_files.Staging):
        def __init__(self, fields, entries, pin):
            reserved.append(entries * parallel_files.entry_bytes(fields))
            super().__init__(fields, entries, pin)

    monkeypatch.setattr(parallel_files, "Staging", Recorded)
    limit = 4_000
    load(like(table), tmp_path, batch_bytes=limit)
    assert 0 < sum(reserved) <= limit


@pytest.mark.parametrize("seed", range(10))
def test_any_bit_of_any_file(tmp_path, seed):
    choice = random.Random(seed)
    table = filled("cpu", 5000, 6000)
    save(table._group, 0, tmp_path, shard_bytes=60_000)
    path = choice.choice(shard_files(tmp_path))
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    bit = choice.randrange(8 * header, 8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    loaded = like(table)
    with pytest.raises(ValueError, match=f"{path.name} is damaged|slots occur twice"):
        load(loaded, tmp_path)
    assert loaded.size == 0


def entry_bytes_of(table):
    spec = table._group.tables[0]
    return spec.dim * spec.dtype.itemsize + 4 * table.state_dim + 8 + 8 + 4
