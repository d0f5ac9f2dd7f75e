"""Bags whose rows exceed a cache are summed as if row after row."""

from __future__ import annotations

import pytest
import torch

from torchrec_hkv.serving import row_formats
from torchrec_hkv.serving.table_file import build_layer
from torchrec_hkv.serving.tables import ReadOnlyTable, ReadOnlyTables

LENGTHS = (0, 1, 31, 32, 33, 700, 0, 2000)


@pytest.mark.parametrize("row_format", row_formats.ROW_FORMATS)
@pytest.mark.parametrize("dim", [3, 8, 56, 64, 65, 128, 203, 300])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums(row_format, dim, weighted):
    generator = torch.Generator().manual_seed(dim)
    held = torch.randn(500, dim, generator=generator)
    unit = row_formats.unit_for(float(held.abs().max()))
    index, rows = build_layer(torch.arange(500), row_formats.to_bytes(held, row_format, unit))
    default = torch.randn(dim, generator=generator)
    table = ReadOnlyTable("t", dim, row_format, index, rows, unit, default_row=default)
    tables = ReadOnlyTables([table])
    ids = torch.randint(0, 550, (sum(LENGTHS),), generator=generator)  # some ids are unknown
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    got = tables.pool([0], ids, torch.tensor([LENGTHS]), weights)
    looked_up = tables.rows(0, ids)
    if weighted:
        looked_up = looked_up * weights[:, None]  # rounded before it is added
    want, first = torch.zeros(len(LENGTHS), dim), 0
    for bag, length in enumerate(LENGTHS):
        for row in looked_up[first : first + length]:
            want[bag] += row
        first += length
    assert torch.equal(got, want)
