"""A file is replaced atomically by a new one; links stay."""

from __future__ import annotations

import os

import pytest

from torchrec_hkv.text_files import replace_text


def test_a_file_is_made_and_replaced(tmp_path):
    path = tmp_path / "a.json"
    for text in ("one\n", "two\r\n"):
        replace_text(path, text)
        assert path.read_bytes() == text.encode()
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    path, link = tmp_path / "disk" / "a.json", tmp_path / "link.json"
    link.symlink_to(path)
    for text in ("one", "two"):  # at first the link's target does not exist
        replace_text(link, text)
        assert link.is_symlink()
        assert path.read_text() == text
    assert os.listdir(tmp_path / "disk") == ["a.json"]


def test_a_link_of_a_name_that_may_be_expected_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / f".a.json.{os.getpid()}").symlink_to(victim)
    replace_text(tmp_path / "a.json", "text")
    assert victim.read_text() == "kept"
    assert not (tmp_path / "a.json").is_symlink()


def test_nothing_is_left_where_writing_fails(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_text(tmp_path / "a.json", "text")
    assert os.listdir(tmp_path) == ["a.json"]
