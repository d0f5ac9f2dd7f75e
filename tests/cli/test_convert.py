"""``torchrec-hkv convert``: its output, and its refusals in one sentence."""

from __future__ import annotations

import json
import sys

import numpy
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from torchrec_hkv import HashTable
from torchrec_hkv.cli import main

NAME = "ebc.embedding_bags.user"


def _stock(path):
    state = {f"{NAME}.weight": torch.randn(50, 4), "over.bias": torch.randn(3)}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return state


def test_there_and_back(capsys, tmp_path):
    state = _stock(tmp_path / "stock")
    assert main(["convert", str(tmp_path / "stock"), str(tmp_path / "hkv"), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["tables"] == {NAME: 50}
    assert (content["into"], content["tensors"]) == ("checkpoint", 1)
    assert main(["verify", str(tmp_path / "hkv")]) == 0
    arguments = ["--model-key", "", "--num-embeddings", "user=60", "--rename", "ebc=sparse"]
    assert main(["convert", str(tmp_path / "hkv"), str(tmp_path / "back"), *arguments]) == 0
    assert f"{NAME}: 50 ids" in capsys.readouterr().out
    back = {"sparse.embedding_bags.user.weight": torch.empty(60, 4), "over.bias": torch.empty(3)}
    dcp.load(back, checkpoint_id=tmp_path / "back", no_dist=True)
    assert back["sparse.embedding_bags.user.weight"][:50].equal(state[f"{NAME}.weight"])
    # The other rows are the table's initial rows.
    assert (back["sparse.embedding_bags.user.weight"][50:].abs() <= 50**-0.5).all()
    assert back["sparse.embedding_bags.user.weight"][50:].any(1).all()
    assert back["over.bias"].equal(state["over.bias"])


@pytest.fixture
def refused(capsys):
    def run(*arguments):
        with pytest.raises(SystemExit) as stopped:
            main(["convert", *map(str, arguments)])
        assert stopped.value.code == 2
        out, error = capsys.readouterr()
        assert out == ""
        assert error.count("\n") == 1
        return error

    return run


def test_bad_sources(refused, tmp_path, monkeypatch):
    into = tmp_path / "into"
    (tmp_path / "empty").mkdir()
    assert "There is no" in refused(tmp_path / "nothing", into)
    assert "can't be converted: name a checkpoint" in refused(tmp_path / "empty", into)
    _stock(tmp_path / "stock")
    assert "There is no folder" in refused(tmp_path / "stock", tmp_path / "no" / "where")
    assert "has no table 'item'" in refused(tmp_path / "stock", into, "--table", "item")
    assert "convert it to a checkpoint first" in refused(tmp_path / "stock", f"{into}.parquet")
    assert "begins with 'x.'" in refused(tmp_path / "stock", into, "--model-key", "x")
    assert "but must be OLD=NEW" in refused(tmp_path / "stock", into, "--rename", "x")
    assert "--seed is 'x'" in refused(tmp_path / "stock", into, "--seed", "x")
    assert "--seed names table 'x'" in refused(tmp_path / "stock", into, "--seed", "x=1")
    assert "not a checkpoint" in refused(tmp_path / "stock", tmp_path / "empty")
    (tmp_path / "stock" / ".metadata").write_bytes(b"x")
    assert "is damaged" in refused(tmp_path / "stock", into)
    assert not into.exists()


def test_bad_files_of_rows(refused, tmp_path, monkeypatch):
    into, name = tmp_path / "into", ("--table", NAME)
    columns = {"id": torch.arange(9), "row": torch.randn(9, 2)}

    def written(**more):
        safetensors.torch.save_file({**columns, **more}, tmp_path / "user.safetensors")
        return tmp_path / "user.safetensors"

    assert "has no name for its table" in refused(written(), into)
    assert "has id 3 more than once" in refused(written(id=torch.full((9,), 3)), into, *name)
    assert "different lengths" in refused(written(id=torch.arange(8)), into, *name)
    assert "must have 2 dimensions" in refused(written(row=torch.randn(9)), into, *name)
    assert "float32 is needed" in refused(written(row=torch.randn(9, 2).double()), into, *name)
    assert "but int64 is needed" in refused(written(id=torch.randn(9)), into, *name)
    assert "match no optimizer" in refused(written(state=torch.randn(9, 7)), into, *name)
    wide = written(state=torch.randn(9, 1))
    assert "but adam has 4" in refused(wide, into, *name, "--optimizer", "adam")
    path = written()
    path.write_bytes(path.read_bytes()[:-1])
    assert "is cut short" in refused(path, into, *name)
    path.write_bytes(b"\xff" * 100)
    assert "is not a .safetensors file" in refused(path, into, *name)
    (tmp_path / "npy").mkdir()
    numpy.save(tmp_path / "npy" / "row.npy", numpy.zeros((3, 2), dtype=numpy.float32))
    assert "has no column 'id'" in refused(tmp_path / "npy", into, *name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.parquet").touch()
    assert "pyarrow, which is not installed" in refused(tmp_path / "x.parquet", into, *name)
    assert not into.exists()


def test_ids_that_are_no_row_numbers(refused, tmp_path):
    table = HashTable(2, 100, name="user")
    table.insert_or_assign(torch.tensor([3, 90]), torch.randn(2, 2))
    table.save(tmp_path / "table")
    arguments = (tmp_path / "table", tmp_path / "dcp")
    assert "rows 0 to 89" in refused(*arguments, "--num-embeddings", "90")
    table.insert_or_assign(torch.tensor([-1]), torch.randn(1, 2))
    table.save(tmp_path / "table")
    assert "has ids -1 to 90" in refused(*arguments)
    assert not (tmp_path / "dcp").exists()
    (tmp_path / "dcp").mkdir()
    assert "exists already" in refused(*arguments)
