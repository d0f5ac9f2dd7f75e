"""A load refuses a file that is truncated, too long or missing by name, before anything changes."""

import os

import pytest

from tests.support.saved_tables import assert_refused, filled, shard_files
from torchrec_hkv.hash_table import files


@pytest.fixture
def saved(tmp_path):
    table = filled("cpu", eviction="lfu", state_dim=1)
    files.save(table._group, 0, tmp_path, shard_bytes=8000)
    return tmp_path


@pytest.fixture
def target():
    return filled("cpu", 123, eviction="lfu", state_dim=1)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("left", [0, 1, 8, 100, 1000, -1000, -1])
def test_cut_short(saved, target, which, left):
    path = shard_files(saved)[which]
    os.truncate(path, left if left >= 0 else path.stat().st_size + left)
    assert_refused(lambda t: t.load(saved), target, f"{path.name} is cut short")


def test_too_long(saved, target):
    path = shard_files(saved)[1]
    path.write_bytes(path.read_bytes() + b"x")
    assert_refused(lambda t: t.load(saved), target, f"{path.name} is too long")


def test_missing(saved, target):
    path = shard_files(saved)[1]
    path.unlink()
    assert_refused(lambda t: t.load(saved), target, f"{path.name} can't be read: No such file")


@pytest.mark.parametrize("left", [0, 1, 50, -2, -1])
def test_a_manifest_cut_short(saved, target, left):
    path = saved / "manifest.json"
    text = path.read_bytes()
    path.write_bytes(text[:left])
    if left == -1:  # the newline at its end
        assert target.load(saved) == 0
    else:
        assert_refused(lambda t: t.load(saved), target, r"manifest\.json is damaged")


def test_swapped_shards(saved, target):
    first, second, *_ = shard_files(saved)
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    assert_refused(lambda t: t.load(saved), target, f"{first.name} is")


def test_a_shard_of_another_save(saved, tmp_path, target):
    """The files have equal sizes, so only the checksums differ."""
    other = tmp_path / "other"
    table = filled("cpu", eviction="lfu", state_dim=1)
    files.save(table._group, 0, other, shard_bytes=1 << 20)
    files.save(table._group, 0, tmp_path / "third", shard_bytes=1 << 20)
    table.insert_or_assign(*(lambda e: (e.ids, e.rows + 1))(next(table.export())))
    files.save(table._group, 0, other, shard_bytes=1 << 20)
    (mine,), (wrong,) = shard_files(tmp_path / "third"), shard_files(other)
    mine.write_bytes(wrong.read_bytes())
    assert_refused(lambda t: t.load(tmp_path / "third"), target, f"{mine.name} is damaged")


@pytest.mark.parametrize("what", ["nothing", "folder", "file"])
def test_no_table_there(tmp_path, target, what):
    path = tmp_path / "t"
    if what == "folder":
        path.mkdir()
    elif what == "file":
        path.write_text("table")
    assert_refused(lambda t: t.load(path), target, f"There is no saved table at {path}")
