"""A table may be saved to a new folder, or over an earlier save; a save touches nothing else."""

import os
from pathlib import Path

import pytest

from tests.support.saved_tables import assert_same, filled, like, shard_files, snapshot
from torchrec_hkv.hash_table import files


def test_folders_are_made(tmp_path):
    table = filled("cpu")
    path = tmp_path / "a" / "b"
    table.save(str(path))
    loaded = like(table)
    loaded.load(str(path))
    assert_same(snapshot(table), snapshot(loaded))


def test_a_relative_path(tmp_path):
    table = filled("cpu")
    relative = Path(os.path.relpath(tmp_path)) / "t"
    table.save(relative)
    assert like(table).load(relative) == 0


def test_an_earlier_save_is_replaced(tmp_path):
    table = filled("cpu")
    files.save(table._group, 0, tmp_path, shard_bytes=2000)
    assert len(shard_files(tmp_path)) > 1
    other = filled("cpu", 99, 120, dim=9)
    other.save(tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    loaded = like(other)
    loaded.load(tmp_path)
    assert_same(snapshot(other), snapshot(loaded))


def test_a_damaged_save_is_replaced(tmp_path):
    table = filled("cpu")
    table.save(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    table.save(tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    assert like(table).load(tmp_path) == 0


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(
        ValueError, match=r"holds 'notes\.txt', which does not belong to a saved table"
    ):
        filled("cpu").save(tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]


def test_a_file_is_refused(tmp_path):
    path = tmp_path / "t"
    path.write_text("mine")
    with pytest.raises(ValueError, match="is a file, but a table is saved to a folder"):
        filled("cpu").save(path)
    assert path.read_text() == "mine"


def test_a_link_to_nothing_is_refused(tmp_path):
    path = tmp_path / "t"
    path.symlink_to("unmounted/t")
    with pytest.raises(ValueError, match="is a link to 'unmounted/t', which does not exist"):
        filled("cpu").save(path)
    assert os.listdir(tmp_path) == ["t"]
