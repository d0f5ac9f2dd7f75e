"""Mapped tables are read into the page cache, and give the same rows meanwhile."""

from __future__ import annotations

import os

import pytest
import torch

from torchrec_hkv.serving.page_cache import warm
from torchrec_hkv.serving.table_builder import build_table
from torchrec_hkv.serving.tables import ReadOnlyTable, ReadOnlyTables

OPS = torch.ops.torchrec_hkv


@pytest.mark.parametrize("huge_bytes", [0, 1 << 30])
@pytest.mark.parametrize("entries", [0, 1, 100_000])
def test_rows(entries, huge_bytes, tmp_path):
    ids, rows = torch.arange(entries) * 7, torch.rand(entries, 33)
    table_file = build_table(lambda: [(ids, rows)], 33, "fp32", tmp_path / "table")
    with open(tmp_path / "table", "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    opened = len(os.listdir("/proc/self/fd"))
    index, data = table_file.map(tmp_path)
    thread = warm(tmp_path, [(table_file, index)], huge_bytes=huge_bytes)
    tables = ReadOnlyTables([ReadOnlyTable("t", 33, "fp32", index, data)])
    assert torch.equal(tables.rows(0, ids), rows)
    thread.join()
    assert len(os.listdir("/proc/self/fd")) == opened
    assert torch.equal(tables.rows(0, ids), rows)


def test_not_read(tmp_path):
    """Pages are not read if memory is too small for all tables, or a file is gone."""
    ids, rows = torch.arange(10), torch.rand(10, 4)
    table_file = build_table(lambda: [(ids, rows)], 4, "fp32", tmp_path / "table")
    index, data = table_file.map(tmp_path)
    assert warm(tmp_path, [(table_file, index)], 2 * table_file.num_bytes - 2) is None
    thread = warm(tmp_path, [(table_file, index)], 2 * table_file.num_bytes)
    thread.join()
    opened = len(os.listdir("/proc/self/fd"))
    (tmp_path / "other").mkdir()
    assert warm(tmp_path / "other", [(table_file, index)]) is None
    assert len(os.listdir("/proc/self/fd")) == opened
    tables = ReadOnlyTables([ReadOnlyTable("t", 4, "fp32", index, data)])
    assert torch.equal(tables.rows(0, ids), rows)


def test_read_pages(tmp_path):
    """Reads all pages of the rows, whatever the alignment, and no others."""
    ids, rows = torch.arange(1000), torch.rand(1000, 5)
    table_file = build_table(lambda: [(ids, rows)], 5, "fp32", tmp_path / "table")
    index, data = table_file.map(tmp_path)
    for begin, end in ((0, 1), (5000, table_file.num_bytes), (4095, 4097)):
        assert isinstance(OPS.serving_read_pages(index, begin, end), bool)
    torch.library.opcheck(OPS.serving_expect_random, (index, True))
    # It returns whether the system took the advice, so it has no fake.
    checks = ("test_schema", "test_autograd_registration")
    torch.library.opcheck(OPS.serving_read_pages, (index, 0, 5000), test_utils=checks)
    for begin, end in ((-1, 5), (5, 5), (0, table_file.num_bytes + 1)):
        with pytest.raises(ValueError, match=rf"is \[{begin}, {end}\), but must be within"):
            OPS.serving_read_pages(index, begin, end)
    tables = ReadOnlyTables([ReadOnlyTable("t", 5, "fp32", index, data)])
    assert torch.equal(tables.rows(0, ids), rows)
