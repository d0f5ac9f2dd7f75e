"""A new checkpoint takes the place of the old one, wherever it is killed and on any file system."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from torchrec_hkv.checkpoint import place as place_module
from torchrec_hkv.checkpoint.exchange import exchange
from torchrec_hkv.checkpoint.place import Place
from torchrec_hkv.checkpoint.record import RECORD


def write(folder: Path, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / RECORD).write_text(text)


def kept(path: Path) -> str:
    return (Place(path).newest() / RECORD).read_text()


def commit(path: Path, text: str, line: int = -1) -> int:
    """Saves in a child, killed at a line of the commit. Returns how many lines it went through."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            place = Place(path)
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
    for text in ("0", "1", "2"):  # at first the link leads nowhere
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
