"""If a save is killed at any point, the previous save stays whole."""

import os
import random
import sys
from pathlib import Path

import pytest
import torch

from tests.support.saved_tables import assert_same, filled, like, shard_files, snapshot
from torchrec_hkv.hash_table import files
from torchrec_hkv.hash_table.files import block_files, manifest, save_folder, table_save
from torchrec_hkv.hash_table.files import shard_files as shard_module

KILLS = 60
MODULES = (table_save, save_folder, manifest, shard_module, block_files)
SOURCES = {Path(module.__file__).name for module in MODULES}


def save_until(table, path, line):
    """Saves in a child that dies at the given line of the saving code. Returns whether it died."""
    child = os.fork()
    if child == 0:
        lines = 0

        def trace(frame, event, _):
            nonlocal lines
            if Path(frame.f_code.co_filename).name not in SOURCES:
                return None
            if event == "line":
                lines += 1
                if lines == line:
                    os._exit(9)
            return trace

        code = 1
        try:
            torch.set_num_threads(1)
            sys.settrace(trace)
            files.save(table._group, 0, path, epoch=table.epoch, shard_bytes=5000, batch_bytes=4000)
            sys.settrace(None)
            code = 0
        finally:
            os._exit(code)
    return {0: False, 9: True}[os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]


def lines_of_a_save(table, path):
    low, high = 1, 1
    while save_until(table, path, high):
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if save_until(table, path, middle) else (low, middle)
    return low


@pytest.fixture(scope="module")
def tables():
    torch.manual_seed(3)
    return [filled("cpu", 300, 500, eviction="lfu") for _ in range(2)]


@pytest.mark.slow
def test_killed_at_any_line(tmp_path, tables):
    path = tmp_path / "t"
    tables[1].save(tmp_path / "trial")
    lines = lines_of_a_save(tables[0], tmp_path / "trial")
    assert lines > 500
    tables[0].save(path)
    snapshots = [snapshot(table) for table in tables]
    saved = 0
    new = old = 0
    # The last lines make the new save current.
    for line in [*random.Random(5).sample(range(1, lines), KILLS), *range(lines - 60, lines + 1)]:
        other = 1 - saved
        died = save_until(tables[other], path, line)
        loaded = like(tables[0])
        loaded.load(path)
        if not died or torch.equal(snapshot(loaded)["ids"], snapshots[other]["ids"]):
            saved = other
            new += died
        else:
            old += 1
        assert_same(snapshots[saved], snapshot(loaded))
    assert old > KILLS / 2
    assert new > 5


def test_what_it_left_is_cleared(tmp_path, tables):
    tables[0].save(tmp_path)
    before = set(shard_files(tmp_path))
    assert save_until(tables[1], tmp_path, 700)
    assert set(shard_files(tmp_path)) > before
    tables[1].save(tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    loaded = like(tables[1])
    loaded.load(tmp_path)
    assert_same(snapshot(tables[1]), snapshot(loaded))


def test_a_first_save_that_is_killed(tmp_path, tables):
    path = tmp_path / "t"
    assert save_until(tables[0], path, 700)
    with pytest.raises(ValueError, match=r"no saved table at .*/t"):
        like(tables[0]).load(path)
    tables[0].save(path)
    loaded = like(tables[0])
    loaded.load(path)
    assert_same(snapshot(tables[0]), snapshot(loaded))
