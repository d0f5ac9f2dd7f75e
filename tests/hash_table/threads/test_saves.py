"""Saves and whole reads see one moment of a table that another thread changes."""

import copy

import torch

from tests.support.table_observation import joined
from tests.support.versioned_tables import changing, make_versioned, version_of
from torchrec_hkv.hash_table import HashTable
from torchrec_hkv.hash_table.files.digest import table_digest


def version_held(table: HashTable) -> int:
    entries = joined(table.export())
    return version_of(entries.ids, entries.rows)


def test_a_save_is_of_one_moment(device_type, tmp_path):
    table = make_versioned(device_type)
    versions = []
    with changing(table):
        for _ in range(12):
            table.save(tmp_path / "table", batch_bytes=1 << 17)
            versions.append(version_held(HashTable.from_file(tmp_path / "table")))
    assert versions == sorted(versions)
    assert versions[-1] > 0  # the table did change


def test_a_copy_is_of_one_moment(device_type):
    table = make_versioned(device_type)
    with changing(table):
        versions = [version_held(copy.deepcopy(table)) for _ in range(10)]
    assert versions == sorted(versions)
    assert versions[-1] > 0


def test_an_exported_state_is_of_one_moment(device_type):
    table = make_versioned(device_type)
    with changing(table):
        for _ in range(10):
            state = table.group.export_table(0)
            version_of(state.ids[state.occupied], state.rows[state.occupied])


def test_within_unchanged_all_is_of_one_moment(device_type):
    table = make_versioned(device_type)
    with changing(table):
        for _ in range(10):
            with table.group.unchanged():
                entries = joined(table.export(batch_size=100))
                digests = {table_digest(table.group, 0) for _ in range(3)}
                sizes = {table.size for _ in range(10)}
            version_of(entries.ids, entries.rows)
            assert sizes == {len(entries.ids)}
            assert len(digests) == 1


def test_a_digest_is_of_one_moment(device_type):
    """The digest of a version equals that of a table with the same content and no other thread."""
    table = make_versioned(device_type)
    with changing(table):
        for _ in range(10):
            with table.group.unchanged():
                expected = table_digest(copy.deepcopy(table).group, 0)
                assert table_digest(table.group, 0) == expected
            entries, _ = table_digest(table.group, 0, batch_bytes=1 << 15)
            assert (entries - 300) % 70 == 0


def test_a_load_comes_at_once(device_type, tmp_path):
    """Another thread sees the table before the load or after it."""
    saved = make_versioned(device_type)
    saved.save(tmp_path / "table")
    table = HashTable(3, saved.group.tables[0].capacity, device=device_type, initial_capacity=64)
    table.load(tmp_path / "table")
    ids = torch.arange(300, device=device_type)
    import threading

    stop, misses = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            if not table.contains(ids).all():
                misses.append(1)

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(30):
        table.load(tmp_path / "table", batch_bytes=1 << 15)
    stop.set()
    thread.join()
    assert not misses
