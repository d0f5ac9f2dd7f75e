"""Converts hash tables from a state_dict of torch.distributed.checkpoint to a checkpoint."""

from __future__ import annotations

import pytest
import torch.distributed.checkpoint as dcp

from tests.support.checkpoint_models import joined, make_tables, model_contents, train
from tests.support.conversions import MEMORY
from torchrec_hkv import checkpoint
from torchrec_hkv.checkpoint.conversion.convert import ConversionOptions, convert


def _save(rank, world_size, device, path, optimizer):
    model = make_tables(world_size, device, "row_wise", optimizer)
    train(model, rank, device, range(6))
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    return model_contents(model, optimizer), checkpoint.digest(model)


def _load(rank, world_size, device, path, optimizer):
    model = make_tables(world_size, device, "column_wise", optimizer, rows=900)
    checkpoint.load(path, model)
    return model_contents(model, optimizer), checkpoint.digest(model)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_all_values(run_ranks, tmp_path, optimizer):
    before = run_ranks(2, _save, tmp_path / "dcp", optimizer)
    convert(
        tmp_path / "dcp",
        tmp_path / "hkv",
        ConversionOptions(tables=["lru", "lfu"], seeds={"lru": 3}, batch_bytes=MEMORY),
    )
    after = run_ranks(1, _load, tmp_path / "hkv", optimizer)
    assert joined([values for values, _ in before]) == joined([values for values, _ in after])
