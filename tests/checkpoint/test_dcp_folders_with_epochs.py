"""Tables with epochs that torch.distributed.checkpoint saved are loaded, and do not keep other
tables from being converted."""

from __future__ import annotations

import pytest
import torch.distributed.checkpoint as dcp

from tests.support.checkpoint_models import joined, make_tables, model_contents, train
from tests.support.conversions import entries_of
from torchrec_hkv import checkpoint, get_epoch, set_epoch
from torchrec_hkv.checkpoint.conversion.convert import ConversionOptions, convert
from torchrec_hkv.checkpoint.saved_checkpoint import SavedCheckpoint


def _make(world_size, device):
    return make_tables(world_size, device, "row_wise", eviction="epoch_lfu")


def _save(rank, world_size, device, path):
    model = _make(world_size, device)
    set_epoch(model, 7)
    train(model, rank, device, range(2))
    set_epoch(model, 8)
    train(model, rank, device, range(2, 4))
    dcp.save(model.state_dict(), checkpoint_id=path)
    return model_contents(model, "adam")


def _load(rank, world_size, device, path):
    model = _make(world_size, device)
    checkpoint.load(path, model)
    assert get_epoch(model) == 8
    return model_contents(model, "adam")


def test_loaded(run_ranks, tmp_path):
    saved = run_ranks(2, _save, tmp_path / "dcp")
    assert joined(saved) == joined(run_ranks(1, _load, tmp_path / "dcp"))
    with pytest.raises(ValueError, match=r"'ebc\.embedding_bags\.lfu' has an epoch"):
        convert(tmp_path / "dcp", tmp_path / "all", ConversionOptions())
    convert(tmp_path / "dcp", tmp_path / "all", ConversionOptions(without=["scores"]))
    entries = entries_of(SavedCheckpoint.open(tmp_path / "all"), "lfu")
    assert "scores" not in entries
    assert len(entries["last_steps"].unique()) == 1
    made = convert(tmp_path / "dcp", tmp_path / "lru", ConversionOptions(tables=["lru"]))
    assert list(made["tables"]) == ["ebc.embedding_bags.lru"]
