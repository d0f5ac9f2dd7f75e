"""Entries come in files by owner ranges. Blocks are written before all entries are there, and the
bytes equal those of a table built at once."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.table_bytes import LEVELS, table_bytes
from torchrec_hkv.serving import row_formats
from torchrec_hkv.serving.table_builder import OWNERS, TableBuilder, build_table
from torchrec_hkv.serving.tables import ReadOnlyTable, ReadOnlyTables

OPS = torch.ops.torchrec_hkv
MEMORY = 1 << 30
#: Ends of the files' owner ranges; one of them holds few ids or none.
ENDS = (9000, 9001, 30_000, 50_000, 65_530, OWNERS)


def files(n: int, dim: int) -> tuple[list[Tensor], list[Tensor], list[tuple[int, int]]]:
    """Ids and rows of each file, in random order, and the overall order."""
    generator = torch.Generator().manual_seed(n + dim)
    ids = torch.randint(-(1 << 63), (1 << 63) - 1, (n,), generator=generator)
    rows = torch.randn(n, dim, generator=generator)
    owners = OPS.serving_blocks(ids, OWNERS)
    chosen = [
        ((owners >= begin) & (owners < end)).nonzero().flatten()
        for begin, end in itertools.pairwise((0, *ENDS))
    ]
    counts = itertools.accumulate(its.numel() for its in chosen)
    return (
        [ids[its] for its in chosen],
        [rows[its] for its in chosen],
        list(zip(counts, ENDS, strict=True)),
    )


def built(ids, rows, order, row_format: str, path: Path, memory: int = MEMORY) -> bytes:
    def batches():
        for its, own in zip(ids, rows, strict=True):
            yield from zip(its.split(777), own.split(777), strict=True)

    table_file = build_table(batches, rows[0].shape[1], row_format, path, memory, order)
    table_file.verify(path.parent)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert table_file.num_bytes == path.stat().st_size
    return path.read_bytes()


@pytest.mark.parametrize("row_format", row_formats.ROW_FORMATS)
@pytest.mark.parametrize(("n", "dim"), [(0, 4), (1, 1), (2000, 3), (120_000, 9)])
def test_bytes(row_format, n, dim, tmp_path):
    ids, rows, order = files(n, dim)
    got = built(ids, rows, order, row_format, tmp_path / "table")
    assert got == table_bytes(torch.cat(ids), torch.cat(rows), row_format)


@pytest.mark.parametrize("row_format", LEVELS)
@pytest.mark.parametrize("first", [0.0, 1e-30, 0.01])
def test_larger_rows_later(row_format, first, tmp_path):
    """Rows in the file are requantised to a larger unit, or all rows are passed again."""
    ids, rows, order = files(120_000, 5)
    rows[0].mul_(first).add_(0.0)  # no zeros of both signs
    rows[1].mul_(first).add_(0.0)
    rows[3].mul_(50.0)
    got = built(ids, rows, order, row_format, tmp_path / "table")
    assert got == table_bytes(torch.cat(ids), torch.cat(rows), row_format)


@pytest.mark.parametrize("row_format", ["fp16", "int8"])
@pytest.mark.parametrize("memory", [250_000, 500_000])
def test_spilled(row_format, memory, tmp_path):
    """A file has more entries than fit in memory."""
    ids, rows, order = files(50_000, 6)
    tables = []
    for name, its_order, limit in (("by_files", order, memory), ("at_once", (), MEMORY)):
        batches = list(zip(ids, rows, strict=True))
        path = tmp_path / name
        table_file = build_table(lambda b=batches: b, 6, row_format, path, limit, its_order)
        table_file.verify(tmp_path)
        index, data = table_file.map(tmp_path)
        tables.append(
            ReadOnlyTables([ReadOnlyTable("t", 6, row_format, index, data, table_file.unit)])
        )
    assert {entry.name for entry in tmp_path.iterdir()} == {"by_files", "at_once"}
    got, want = (its.rows(0, torch.cat(ids)) for its in tables)
    assert torch.equal(got, want)
    assert tables[0].counters.tolist() == [[50_000, 0]]


def test_memory(tmp_path):
    """Memory holds the entries of one file, and of the blocks that it shares with the next one."""
    ids, rows, order = files(120_000, 4)
    largest = max(its.numel() for its in ids) + 30_000
    with TableBuilder(4, "fp32", tmp_path, 32 * largest, order=order) as builder:
        for its, own in zip(ids, rows, strict=True):
            builder.add(its, own)
        assert not list(tmp_path.rglob("entries"))  # nothing was spilled
        builder.finish(tmp_path / "table")
    assert (tmp_path / "table").read_bytes() == table_bytes(torch.cat(ids), torch.cat(rows), "fp32")


def test_other_order(tmp_path):
    """Refuses ids of other owners or a wrong number of ids; leaves no file."""
    ids, rows, order = files(120_000, 2)
    for wrong in (
        (
            [ids[3], ids[1], ids[2], ids[0], *ids[4:]],
            [rows[3], rows[1], rows[2], rows[0], *rows[4:]],
        ),
        (ids[:-2], rows[:-2]),
        ([*ids, torch.tensor([5])], [*rows, rows[0][:1]]),
    ):
        with pytest.raises(ValueError, match="ids are in files of other owners than their own"):
            built(*wrong, order, "fp32", tmp_path / "table")
        assert not list(tmp_path.iterdir())


def test_full_disk(disk):
    ids, rows, order = files(120_000, 64)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        built(ids, rows, order, "fp32", disk / "table")
    assert not list(disk.iterdir())
