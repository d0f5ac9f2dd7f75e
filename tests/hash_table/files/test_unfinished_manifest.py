"""A save writes its manifest to a new file, even if a file of that name exists."""

from __future__ import annotations

import os

import pytest
import torch

from torchrec_hkv import HashTable

UNFINISHED = ".manifest.json.saving"


def _table() -> HashTable:
    table = HashTable(4, 100)
    table.find_or_insert(torch.arange(20))
    return table


@pytest.mark.parametrize("has_target", [True, False])
def test_a_link_is_not_followed(tmp_path, has_target):
    victim, folder = tmp_path / "victim", tmp_path / "t"
    if has_target:
        victim.write_text("kept")
    folder.mkdir()
    (folder / UNFINISHED).symlink_to(victim)
    _table().save(folder)
    assert not (folder / UNFINISHED).is_symlink()
    assert not (folder / "manifest.json").is_symlink()
    assert victim.exists() == has_target
    if has_target:
        assert victim.read_text() == "kept"
    assert HashTable.from_file(folder).size == 20


def test_what_a_killed_save_left_is_replaced(tmp_path):
    (tmp_path / UNFINISHED).write_text("{")
    _table().save(tmp_path)
    assert UNFINISHED not in os.listdir(tmp_path)
    assert HashTable.from_file(tmp_path).size == 20


@pytest.mark.parametrize("name", [UNFINISHED, "manifest.json"])
def test_a_folder_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "kept").write_text("kept")
    with pytest.raises(ValueError, match=r"is a folder, but a save writes a file of that name: mo"):
        _table().save(tmp_path)
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name / "kept").read_text() == "kept"
