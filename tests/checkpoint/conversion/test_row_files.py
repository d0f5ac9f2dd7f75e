"""Files of ids and rows convert to a checkpoint and back, with states, scores and steps."""

from __future__ import annotations

import numpy
import pytest
import safetensors.torch
import torch

from tests.support.conversions import converted, entries_of
from torchrec_hkv import HashTable
from torchrec_hkv.checkpoint.conversion.convert import ConversionOptions, convert

NAME = "ebc.embedding_bags.user"
N, DIM = 150, 3


def _columns(dtype=torch.float32, width=1):
    return {
        "id": torch.randperm(N) * 0x9E3779B97F4A7C1 - 2**62,
        "row": torch.randn(N, DIM).to(dtype),
        "state": torch.rand(N, width),
        "score": torch.randint(1, 2**40, (N,)),
        "last_step": torch.randint(1, 100, (N,)).int(),
    }


def _write(kind, columns, path):
    if kind == "safetensors":
        safetensors.torch.save_file(columns, path.with_suffix(".safetensors"))
        return path.with_suffix(".safetensors")
    if kind == "npy":
        path.mkdir()
        for name, tensor in columns.items():
            numpy.save(path / f"{name}.npy", tensor.numpy())
        return path
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({name: tensor.tolist() for name, tensor in columns.items()})
    table = table.set_column(1, "row", table["row"].cast(pyarrow.list_(pyarrow.float32())))
    parquet.write_table(table, path.with_suffix(".parquet"), row_group_size=40)
    return path.with_suffix(".parquet")


@pytest.mark.parametrize("kind", ["safetensors", "npy", "parquet"])
@pytest.mark.parametrize(("optimizer", "width"), [("rowwise_adagrad", 1), ("adam", 2 * DIM)])
def test_all_is_kept(tmp_path, kind, optimizer, width):
    columns = _columns(width=width)
    path = _write(kind, columns, tmp_path / "user")
    saved = converted(path, tmp_path / "hkv", tables=[NAME], optimizer=optimizer)
    found = entries_of(saved, "user")
    assert saved.tables[NAME].identity["optimizer"] == optimizer
    assert len(saved.tables[NAME].parts) > 1
    order = columns["id"].argsort()
    assert found["ids"].equal(columns["id"][order])
    assert found["rows"].equal(columns["row"][order])
    assert found["states"][:, :width].equal(columns["state"][order])
    assert found["scores"].equal(columns["score"][order])
    clock = saved.tables[NAME].parts[0].manifest.clock
    assert clock == columns["last_step"].max()
    assert found["last_steps"].equal(columns["last_step"][order])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_back_to_a_file(tmp_path, dtype):
    columns = _columns(dtype)
    path = _write("safetensors", columns, tmp_path / "user")
    converted(path, tmp_path / "hkv", tables=[NAME])
    back = tmp_path / "back.safetensors"
    convert(tmp_path / "hkv", back, ConversionOptions())
    found, order = safetensors.torch.load_file(back), columns["id"].argsort()
    mine = found["id"].argsort()
    for name in ("id", "row", "score", "last_step"):
        value = found[name][mine]
        value = value.view(torch.int32) if value.dtype == torch.uint32 else value
        assert value.equal(columns[name][order])
    assert found["state"][mine][:, :1].equal(columns["state"][order])


def test_a_table_loads_it(tmp_path):
    columns = _columns()
    del columns["state"]
    path = _write("safetensors", columns, tmp_path / "user")
    convert(path, tmp_path / "hkv", ConversionOptions(tables=[NAME], eviction="lru"))
    (folder,) = (tmp_path / "hkv" / "tables").glob("*/00000")
    table = HashTable.from_file(folder)
    rows, there = table.find(columns["id"])
    assert there.all()
    assert rows.equal(columns["row"])


@pytest.mark.parametrize("left_out", ["states", "scores"])
def test_left_out(tmp_path, left_out):
    path = _write("safetensors", _columns(), tmp_path / "user")
    saved = converted(path, tmp_path / "hkv", tables=[NAME], without=[left_out])
    found = entries_of(saved, "user")
    assert ("states" in found) == (left_out == "scores")
    assert ("scores" in found) == (left_out == "states")
