"""A table's bytes depend on its rows alone, not on the size of the first ones."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.table_bytes import LEVELS, table_bytes
from torchrec_hkv import serving
from torchrec_hkv.serving import row_formats
from torchrec_hkv.serving.table_builder import TableBuilder, build_table

OPS = torch.ops.torchrec_hkv
MEMORY = 1 << 30


def entries(n: int, dim: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n + dim)
    ids = torch.randint(-(1 << 63), (1 << 63) - 1, (n,), generator=generator)
    return ids, torch.randn(n, dim, generator=generator)


def built(ids: Tensor, rows: Tensor, row_format: str, path: Path, memory: int) -> bytes:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        return zip(ids.split(777), rows.split(777), strict=True)

    table_file = build_table(batches, rows.shape[1], row_format, path, memory)
    table_file.verify(path.parent)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert table_file.num_bytes == path.stat().st_size
    return path.read_bytes()


@pytest.mark.parametrize("row_format", row_formats.ROW_FORMATS)
@pytest.mark.parametrize(("n", "dim"), [(0, 4), (1, 1), (5000, 3), (60_000, 9)])
def test_bytes(row_format, n, dim, tmp_path):
    ids, rows = entries(n, dim)
    got = built(ids, rows, row_format, tmp_path / "table", MEMORY)
    assert got == table_bytes(ids, rows, row_format)


@pytest.mark.parametrize("memory", [MEMORY, 100_000])
@pytest.mark.parametrize("row_format", LEVELS)
@pytest.mark.parametrize("first", [0.0, 1e-30, 0.01])
def test_larger_rows_later(row_format, memory, first, tmp_path):
    """The unit grows with the rows; if that would lose precision, all rows are passed again."""
    ids, rows = entries(30_000, 5)
    rows[:10_000] = first * rows[:10_000] + 0.0  # no zeros of both signs
    rows[20_000:] *= 50.0
    got = built(ids, rows, row_format, tmp_path / "table", memory)
    order = OPS.serving_split(ids, 1 if memory == MEMORY else 256)[0]
    assert got == table_bytes(ids[order], rows[order], row_format)


@pytest.mark.parametrize("row_format", row_formats.ROW_FORMATS)
def test_spilled(row_format, tmp_path):
    """Ids of a block are placed by parts, each in the order of insertion."""
    ids, rows = entries(60_000, 6)
    order = OPS.serving_split(ids, 256)[0]
    got = built(ids, rows, row_format, tmp_path / "table", 200_000)
    assert got == table_bytes(ids[order], rows[order], row_format)


def test_again(tmp_path):
    """Passes all rows again if their scales can't grow to a larger unit."""
    ids, rows = entries(2000, 4)
    rows[:1000] *= 1e-6
    rows[:1000] += 1.0
    with TableBuilder(4, "int8", tmp_path, MEMORY) as builder:
        builder.add(ids[:1000], rows[:1000])
        assert builder.largest_if_void is None
        builder.add(ids[1000:1500], 100.0 * rows[1000:1500])
        builder.add(ids[1500:], 900.0 * rows[1500:])
        largest = builder.largest_if_void
        assert largest == pytest.approx(900.0 * float(rows[1500:].abs().max()))
        with pytest.raises(ValueError, match="give all rows again"):
            builder.finish(tmp_path / "table")
        with pytest.raises(ValueError, match="is not finite"):
            builder.add(ids[:1], torch.full((1, 4), torch.nan))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("memory", [MEMORY, 50_000])
def test_not_finite(memory, tmp_path):
    ids, rows = entries(3000, 4)
    rows[2500, 1] = torch.inf
    with TableBuilder(4, "int4", tmp_path, memory) as builder:
        builder.add(ids[:2000], rows[:2000])
        with pytest.raises(ValueError, match=f"the row of id {int(ids[2500])} is not finite"):
            builder.add(ids[2000:], rows[2000:])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("memory", [MEMORY, 50_000])
def test_twice(memory, tmp_path):
    ids, rows = entries(3000, 4)
    ids[2900] = ids[7]
    with pytest.raises(ValueError, match=f"id {int(ids[7])} occurs twice"):
        built(ids, rows, "fp32", tmp_path / "table", memory)


@pytest.mark.parametrize("memory", [MEMORY, 1 << 20])
def test_full_disk(memory, disk):
    """The disk is full while rows are spilled, or while the table is written."""
    ids, rows = entries(40_000, 64)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        built(ids, rows, "fp32", disk / "table", memory)
    assert {entry.name for entry in disk.iterdir()} <= {"table"}


class Rows(nn.Module):
    """A table whose last rows are much larger than those of the first batch."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", embedding_dim=2, num_embeddings=70_000, feature_names=["f"]
        )
        self.tables = EmbeddingBagCollection(tables=[table])
        with torch.no_grad():
            weight = self.tables.embedding_bags["t"].weight
            weight.uniform_(1.0, 1.000001)
            weight[69_000:] *= 1000.0

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.tables(features).values()


def test_export(tmp_path):
    model = Rows()
    ones = torch.ones(3, dtype=torch.int64)
    batch = KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 9, 69_999]), lengths=ones)
    serving.export(model, tmp_path / "model", rows="int8", inputs=(batch,))
    serving.load(tmp_path / "model", verify=True)
    weight = model.tables.embedding_bags["t"].weight.detach()
    got = (tmp_path / "model" / "rows-0000.table").read_bytes()
    assert got == table_bytes(torch.arange(70_000), weight, "int8")
