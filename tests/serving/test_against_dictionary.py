"""Read-only tables agree with a Python dictionary and float64 EmbeddingBag."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from torchrec_hkv.hash_table import Normal, Uniform, initial_rows, table_seed
from torchrec_hkv.hash_table.initializers import op_arguments
from torchrec_hkv.serving import row_formats
from torchrec_hkv.serving.table_file import build_layer
from torchrec_hkv.serving.tables import ReadOnlyTable, ReadOnlyTables

ANY_ID = st.one_of(
    st.integers(-5, 40),
    st.sampled_from([-(1 << 63), (1 << 63) - 1]),
    st.integers(-(1 << 63), (1 << 63) - 1),
)
DIMS = st.sampled_from([1, 3, 4, 7, 8, 12, 16, 63, 64, 72, 128, 131, 200])
DTYPES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Model:
    """A table and an equal dictionary."""

    def __init__(self, data: st.DataObject, name: str) -> None:
        self.dim = data.draw(DIMS)
        self.format = data.draw(st.sampled_from(row_formats.ROW_FORMATS))
        seed = data.draw(st.integers(0, 1 << 30))
        generator = torch.Generator().manual_seed(seed)

        def layer(ids: list[int]) -> tuple[Tensor, Tensor]:
            rows = torch.randn(len(ids), self.dim, generator=generator)
            stored = row_formats.to_bytes(rows, self.format, unit)
            held = row_formats.from_bytes(stored, self.format, self.dim, unit)
            return stored, held

        unit = row_formats.unit_for(6.0)
        base = data.draw(st.lists(ANY_ID, unique=True, max_size=60))
        stored, held = layer(base)
        self.rows = dict(zip(base, held, strict=True))
        index, rows = build_layer(torch.tensor(base, dtype=torch.int64), stored)
        changed = changed_rows = None
        if data.draw(st.booleans()):
            ids = data.draw(st.lists(st.one_of(ANY_ID, st.sampled_from(base or [0])), unique=True))
            stored, held = layer(ids)
            erased = [data.draw(st.booleans()) for _ in ids]
            changed, changed_rows = build_layer(
                torch.tensor(ids, dtype=torch.int64), stored, torch.tensor(erased, dtype=torch.bool)
            )
            for id_, row, is_erased in zip(ids, held, erased, strict=True):
                if is_erased:
                    self.rows.pop(id_, None)
                else:
                    self.rows[id_] = row
        self.default = torch.randn(self.dim) if data.draw(st.booleans()) else None
        self.initializer = data.draw(st.sampled_from([None, Uniform(-0.5, 1.0), Normal(1.0, 2.0)]))
        self.name = name
        self.table = ReadOnlyTable(
            name, self.dim, self.format, index, rows, unit, table_seed(seed, name),
            op_arguments(self.initializer), self.default, changed, changed_rows,
        )  # fmt: skip
        self.seed = seed

    def row(self, id_: int) -> Tensor:
        if id_ in self.rows:
            return self.rows[id_]
        if self.default is not None:
            return self.default
        return initial_rows(
            torch.tensor([id_]), self.dim, table=self.name, seed=self.seed,
            initializer=self.initializer,
        )[0]  # fmt: skip


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_rows(data):
    model = Model(data, "a")
    tables = ReadOnlyTables([model.table])
    ids = data.draw(st.lists(st.one_of(ANY_ID, st.sampled_from([*model.rows, 0])), max_size=200))
    got = tables.rows(0, torch.tensor(ids, dtype=torch.int64))
    want = [model.row(id_) for id_ in ids]
    assert got.shape == (len(ids), model.dim)
    if ids:  # bit for bit
        assert torch.equal(got.view(torch.int32), torch.stack(want).view(torch.int32))
    unknown = sum(id_ not in model.rows for id_ in ids)
    assert tables.counters.tolist() == [[len(ids), unknown]]


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_pooled(data):
    models = [Model(data, name) for name in "ab"]
    tables = ReadOnlyTables([model.table for model in models])
    order = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
    samples = data.draw(st.integers(0, 5))
    mean, dtype = data.draw(st.booleans()), data.draw(st.sampled_from(list(DTYPES)))
    bags = [
        [
            data.draw(
                st.lists(st.one_of(ANY_ID, st.sampled_from([*models[t].rows, 0])), max_size=9)
            )
            for _ in range(samples)
        ]
        for t in order
    ]
    ids = torch.tensor([id_ for its in bags for bag in its for id_ in bag], dtype=torch.int64)
    lengths = torch.tensor([[len(bag) for bag in its] for its in bags], dtype=torch.int64)
    lengths = lengths.view(len(order), samples)
    weights = torch.rand(ids.numel()) if data.draw(st.booleans()) else None
    got = tables.pool(order, ids, lengths, weights, mean=mean, dtype=dtype)
    assert got.dtype == dtype
    column = first = 0
    for t, its in zip(order, bags, strict=True):
        model = models[t]
        flat = [id_ for bag in its for id_ in bag]
        rows = torch.stack([model.row(id_) for id_ in flat] or [torch.zeros(model.dim)]).double()
        bag = nn.EmbeddingBag.from_pretrained(rows, mode="sum")
        offsets = torch.tensor([len(bag) for bag in its], dtype=torch.int64).cumsum(0)
        offsets -= torch.tensor([len(bag) for bag in its], dtype=torch.int64)
        own = None if weights is None else weights[first : first + len(flat)].double()
        want = bag(torch.arange(len(flat)), offsets, own)
        if mean:
            want /= torch.tensor([max(1, len(bag)) for bag in its]).view(-1, 1)
        part = got[:, column : column + model.dim].double()
        torch.testing.assert_close(part, want, rtol=DTYPES[dtype], atol=2e-5 + 4 * DTYPES[dtype])
        column += model.dim
        first += len(flat)
    assert column == got.shape[1]


@pytest.mark.parametrize("row_format", row_formats.ROW_FORMATS)
def test_many_ids(row_format, tmp_path: Path):
    """More ids than a block holds, in the file and spilled to parts."""
    from torchrec_hkv.serving.table_builder import TableBuilder

    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(-(1 << 63), (1 << 63) - 1, (70_000,), generator=generator).unique()
    rows = torch.randn(ids.numel(), 5, generator=generator)
    files = []
    for memory in (1 << 30, 1 << 18):
        builder = TableBuilder(5, row_format, tmp_path, memory)
        for part in torch.randperm(ids.numel(), generator=generator).split(9999):
            builder.add(ids[part], rows[part])
        table_file = builder.finish(tmp_path / f"{memory}.table")
        table_file.verify(tmp_path)
        assert table_file.entries == ids.numel()
        assert table_file.blocks > 1
        assert table_file.index_bytes <= 10 * ids.numel()
        files.append(table_file)
    assert not list(tmp_path.glob(".parts-*"))
    for table_file in files:
        index, held = table_file.map(tmp_path)
        tables = ReadOnlyTables([ReadOnlyTable("t", 5, row_format, index, held, table_file.unit)])
        stored = row_formats.to_bytes(rows, row_format, table_file.unit)
        want = row_formats.from_bytes(stored, row_format, 5, table_file.unit)
        assert torch.equal(tables.rows(0, ids), want)
        assert torch.equal(tables.rows(0, ids ^ 1), torch.zeros_like(want))  # but by a rare chance
        assert tables.counters.tolist() == [[2 * ids.numel(), ids.numel()]]
