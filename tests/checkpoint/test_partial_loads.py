"""strict=False loads a checkpoint that has some of the tables, and leaves all others unchanged."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from tests.support.checkpoint_models import features, make_tables, train
from torchrec_hkv import checkpoint
from torchrec_hkv.checkpoint.conversion.convert import ConversionOptions, convert

NAME = "ebc.embedding_bags.lru"


@torch.no_grad()
def _others(model, device):
    """Outputs of all tables but ``lru``: the first and last columns."""
    outputs = model(features(device, 5))
    return torch.cat([outputs[:, :8], outputs[:, 20:]], dim=1)


def _load(rank, world_size, device, path):
    model = make_tables(world_size, device, "row_wise", "adagrad", seed=0)
    train(model, rank, device, range(3))
    before = checkpoint.digest(model)
    with pytest.raises(ValueError, match=r"has no table 'ebc\.embedding_bags\.lfu'"):
        checkpoint.load(path, model)
    assert checkpoint.digest(model) == before
    others = _others(model, device)
    with pytest.warns(UserWarning, match="were saved without optimizer states"):
        assert checkpoint.load(path, model, strict=False) == 0
    assert _others(model, device).equal(others)
    after = checkpoint.digest(model)
    assert after[NAME].startswith("50-")
    assert {k: v for k, v in after.items() if k != NAME} == {
        k: v for k, v in before.items() if k != NAME
    }
    rows = list(checkpoint.export_rows(model, NAME))
    train(model, rank, device, range(3, 5))
    return torch.cat([ids for ids, _ in rows]), torch.cat([values for _, values in rows])


def test_a_table_alone(run_ranks, tmp_path):
    ids, rows = torch.arange(50) - 25, torch.randn(50, 12)
    safetensors.torch.save_file({"id": ids, "row": rows}, tmp_path / "rows.safetensors")
    convert(tmp_path / "rows.safetensors", tmp_path / "saved", ConversionOptions(tables=[NAME]))
    for found, values in run_ranks(2, _load, tmp_path / "saved"):
        order = found.argsort()
        assert found[order].equal(ids)
        assert values[order].equal(rows)
