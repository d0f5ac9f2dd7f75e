"""A new checkpoint replaces the old one atomically, wherever it is killed and on any file
system."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from torchrec_hkv.checkpoint import atomic_folder as place_module
from torchrec_hkv.checkpoint.atomic_folder import AtomicFolder
from torchrec_hkv.checkpoint.exchange import exchange
from torchrec_hkv.checkpoint.record import RECORD


def write(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / RECORD).write_text(text)


def kept(path: Path) -> str:
    return (AtomicFolder(path).newest() / RECORD).read_text()


def commit(path: Path, text: str, line: int = -1) -> int:
    """Saves in a child that is killed at a line of the commit. Returns how many lines it ran."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            place = AtomicFolder(path)
            place.prepare()
            write(place.saving, text)
            lines = 0

            def trace(frame, event, _):
                nonlocal lines
                if event == "line" and "/torchrec_hkv/checkpoint/" in frame.f_code.co_filename:
                    lines += 1
                    if lines == line:
                        os.kill(os.getpid(), signal.SIGKILL)
                return trace

            sys.settrace(trace)
            place.commit()
            sys.settrace(None)
            os.write(writer, str(lines).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        lines = told.read()
    os.waitpid(child, 0)
    return int(lines or 0)


@pytest.fixture(params=[True, False], ids=["exchanged", "moved aside"])
def exchanges(request, monkeypatch, tmp_path):
    if not request.param:
        monkeypatch.setattr(place_module, "exchange", lambda first, second: False)
    else:
        (tmp_path / "1").mkdir()
        (tmp_path / "2").mkdir()
        if not exchange(tmp_path / "1", tmp_path / "2"):
            pytest.skip("this file system can't exchange folders")
        (tmp_path / "1").rmdir()
        (tmp_path / "2").rmdir()
    return request.param


def test_killed_at_each_line(tmp_path, exchanges):
    path = tmp_path / "checkpoint"
    assert commit(path, "0") > 0
    lines = commit(path, "1")
    found = "1"
    outcomes = set()
    for line in range(1, lines + 1):
        commit(path, f"line {line}", line)
        if exchanges:
            assert (path / RECORD).is_file(), f"line {line}"
        assert kept(path) in (found, f"line {line}")
        outcomes.add(kept(path) == found)
        found = kept(path)
    assert outcomes == {True, False}
    commit(path, "last")
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert kept(path) == "last"


def test_a_link_stays_and_what_it_names_is_replaced(tmp_path, exchanges):
    disk, link = tmp_path / "disk", tmp_path / "latest"
    disk.mkdir()
    link.symlink_to(disk / "checkpoint")
    for text in ("0", "1", "2"):  # at first the link's target does not exist
        commit(link, text)
        assert link.is_symlink()
        assert kept(link) == kept(disk / "checkpoint") == text
        assert sorted(os.listdir(tmp_path)) == ["disk", "latest"]
        assert os.listdir(disk) == ["checkpoint"]


def test_exchange(tmp_path):
    write(tmp_path / "first", "1")
    write(tmp_path / "second", "2")
    if not exchange(tmp_path / "first", tmp_path / "second"):
        pytest.skip("this file system can't exchange folders")
    assert [(tmp_path / name / RECORD).read_text() for name in ("first", "second")] == ["2", "1"]


def test_a_missing_folder_is_no_lack_of_the_file_system(tmp_path):
    write(tmp_path / "first", "1")
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "first", tmp_path / "second")
    assert (tmp_path / "first" / RECORD).read_text() == "1"


def _victim(folder: Path) -> Path:
    """A folder that must not change."""
    folder.mkdir()
    (folder / "kept").write_text("kept")
    write(folder, "kept")
    return folder


@pytest.mark.parametrize("name", [".checkpoint.saving", ".checkpoint.previous"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "file", "folder"])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_no_leftover_of_a_save_is_refused(tmp_path, name, kind, is_first):
    path, victim = tmp_path / "checkpoint", _victim(tmp_path / "victim")
    if not is_first:
        commit(path, "old")
    left = tmp_path / name
    if kind == "folder":
        _victim(left)
    elif kind == "file":
        left.write_text("kept")
    else:
        left.symlink_to(victim if kind == "link" else tmp_path / "none")
    before = sorted(os.listdir(tmp_path))
    what = {
        "link": f"a symbolic link to '{victim}'",
        "dangling link": f"a symbolic link to '{tmp_path}/none'",
        "file": "a file",
        "folder": "a folder that holds 'kept', which is not of a checkpoint",
    }[kind]
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 (compared below)
        AtomicFolder(path).prepare()
    assert str(refusal.value) == (
        f"{left} is {what}, but a save writes to that name before it replaces the "
        "checkpoint: move it away, or save to a path of another name."
    )
    assert sorted(os.listdir(tmp_path)) == before
    assert sorted(os.listdir(victim)) == ["checkpoint.json", "kept"]
    if not is_first:
        assert kept(path) == "old"
    elif "link" in kind:
        with pytest.raises(ValueError, match="There is no checkpoint at"):
            AtomicFolder(path).newest()


def test_links_within_what_a_killed_save_left_are_not_followed(tmp_path, exchanges):
    path, victim = tmp_path / "checkpoint", _victim(tmp_path / "victim")
    for name in (".checkpoint.saving", ".checkpoint.previous"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tables").symlink_to(victim)
        (tmp_path / name / RECORD).symlink_to(victim / RECORD)
    for text in ("0", "1"):
        commit(path, text)
        assert kept(path) == text
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "victim"]
    assert (victim / RECORD).read_text() == (victim / "kept").read_text() == "kept"


def test_a_killed_save_leaves_the_old_checkpoint_to_load(tmp_path):
    path = tmp_path / "checkpoint"
    commit(path, "old")
    place = AtomicFolder(path)
    place.prepare()
    write(place.saving, "whole, but not yet in its place")
    assert kept(path) == "old"
    path.rename(place.previous)  # for file systems that can't exchange folders
    assert kept(path) == "old"


def test_a_folder_that_a_rank_does_not_share(tmp_path):
    first = AtomicFolder(tmp_path / "first" / "checkpoint")
    second = AtomicFolder(tmp_path / "second" / "checkpoint")
    token = first.prepare()
    second.prepare()
    first.check_visible(token)
    with pytest.raises(ValueError, match=r"^A rank does not see .*/second/\.checkpoint\.saving, "):
        second.check_visible(token)
    first.remove_token(token)
    assert os.listdir(first.saving) == []
    first.discard()
    assert os.listdir(tmp_path / "first") == []


def test_a_link_that_leads_to_itself(tmp_path):
    link = tmp_path / "checkpoint"
    link.symlink_to(link)
    with pytest.raises(ValueError, match=r"^'.*/checkpoint' is a symbolic link that leads to itse"):
        AtomicFolder(link)
