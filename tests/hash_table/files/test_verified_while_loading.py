"""A load that verifies files while reading them finds the same errors as a separate
verification."""

from __future__ import annotations

import random
import zlib

import pytest

from tests.support.rewritten_tables import rewrite
from tests.support.saved_tables import buckets_of, entries, filled, like, shard_files
from torchrec_hkv.hash_table.files import save
from torchrec_hkv.hash_table.files.manifest import OWNERS, Manifest
from torchrec_hkv.hash_table.files.parts_load import PartsLoad
from torchrec_hkv.hash_table.files.read_checks import combined_crc32
from torchrec_hkv.hash_table.files.saved_part import SavedPart


def load(table, folder, owners=(0, OWNERS), **options):
    part = SavedPart(folder, owners, Manifest.read(folder))
    options = {"batch_bytes": 20_000, "threads": 3, "verify": True, **options}
    group = table._group
    PartsLoad(group, 0, 0, [part], owners, **options).run()


def assert_refused(folder, message, **options):
    table = like(filled("cpu"), **options)
    with pytest.raises(ValueError, match=message):
        load(table, folder)
    assert table.size == 0


@pytest.fixture
def saved(tmp_path):
    filled("cpu").save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("sizes", [(0, 0), (0, 9), (9, 0), (1, 1), (100, 3), (7, 70_000)])
def test_checksums_of_pieces(sizes):
    first, second = (random.randbytes(size) for size in sizes)
    joined = combined_crc32(zlib.crc32(first), zlib.crc32(second), len(second))
    assert joined == zlib.crc32(first + second)


@pytest.mark.parametrize("capacity", [700, 2000])  # each entry at its own slot, or at any
@pytest.mark.parametrize("batch_bytes", [4_000, 1 << 20])
@pytest.mark.parametrize("eviction", ["lru", "customized"])
def test_what_is_sound_loads(tmp_path, device_type, capacity, batch_bytes, eviction):
    table = filled(device_type, eviction=eviction)
    save(table._group, 0, tmp_path, shard_bytes=9_000)
    loaded = like(table, capacity=capacity)
    load(loaded, tmp_path, batch_bytes=batch_bytes)
    if capacity == table.capacity:
        assert entries(loaded) == entries(table)
    else:
        assert loaded.size == table.size


@pytest.mark.parametrize("seed", range(20))
def test_any_bit(saved, seed):
    choice = random.Random(seed)
    (path,) = shard_files(saved)
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    bit = choice.randrange(8 * header, 8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    assert_refused(saved, f"{path.name} is damaged|slots occur twice", capacity=700)
    assert_refused(saved, f"{path.name} is damaged", capacity=2000)


@pytest.mark.parametrize("capacity", [700, 2000])
def test_slots_that_do_not_ascend(saved, capacity):
    def change(memory):
        for name in ("ids", "slots"):
            memory[name][[10, 300]] = memory[name][[300, 10]]

    rewrite(saved, change)
    assert_refused(saved, "is inconsistent", capacity=capacity)


def test_ids_of_other_owners(saved):
    rewrite(saved, lambda memory: (0, 1 << 15))
    assert_refused(saved, "is inconsistent")


@pytest.mark.parametrize("capacity", [700, 2000])
def test_an_id_in_both_of_its_buckets(saved, capacity):
    def change(memory):
        slots, ids = memory["slots"].tolist(), memory["ids"].tolist()
        manifest = Manifest.read(saved)
        for at, id_ in enumerate(ids):
            other = buckets_of(id_, manifest.buckets) - {slots[at] // manifest.bucket_slots}
            there = [k for k, slot in enumerate(slots) if {slot // manifest.bucket_slots} == other]
            if there:
                memory["ids"][there[0]] = id_
                return

    rewrite(saved, change)
    assert_refused(saved, "holds an id more than once", capacity=capacity)


def test_many_slots_at_a_time(tmp_path):
    """The verification looks ids up in parts of the table."""
    table = filled("cpu", 5000, 6000)
    table.save(tmp_path)
    loaded = like(table)
    load(loaded, tmp_path, batch_bytes=3_000)
    assert entries(loaded) == entries(table)
