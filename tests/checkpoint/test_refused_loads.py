"""A refused load leaves the optimizer unchanged: a fresh one has no states."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from tests.support.checkpoint_models import make_tables, train
from tests.support.mutations import write
from torchrec_hkv import checkpoint
from torchrec_hkv.checkpoint.tensors import file_record


def _model(world_size, device):
    model = make_tables(world_size, device, "row_wise")
    model.module.register_parameter("bias", torch.nn.Parameter(torch.ones(3, device=device)))
    dense = KeyedOptimizerWrapper(
        {"bias": model.module.bias}, lambda parameters: torch.optim.Adam(parameters, lr=0.1)
    )
    return model, dense, CombinedOptimizer([model.fused_optimizer, ("dense", dense)])


def _save(rank, world_size, device, folder):
    model, dense, optimizer = _model(world_size, device)
    train(model, rank, device, range(2))
    model.module.bias.grad = torch.ones_like(model.module.bias)
    dense.step()
    checkpoint.save(folder, model, optimizer)


def _refused_then_loaded(rank, world_size, device, folder, good):
    model, dense, optimizer = _model(world_size, device)
    with pytest.raises(
        ValueError, match=r"bias.* has shape \(4,\)|bias.*\(4,\), but in the model \(3,\)"
    ):
        checkpoint.load(folder, model, optimizer)
    assert dense.state_dict()["state"] == {}
    assert model.module.bias.tolist() == [1.0] * 3
    checkpoint.load(good, model, optimizer)
    return float(dense.state_dict()["state"]["bias"]["step"])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fresh_optimizer(run_ranks, tmp_path, ranks):
    run_ranks(2, _save, tmp_path / "good")
    run_ranks(2, _save, tmp_path / "bad")
    # The moment has a wrong shape, which the load only finds once states exist.
    path = tmp_path / "bad" / "tensors" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    (key,) = (key for key in metadata.state_dict_metadata if key.endswith("bias.exp_avg"))
    entry = metadata.state_dict_metadata[key]
    entry.size = torch.Size([4])
    entry.chunks[0].sizes = torch.Size([4])
    path.write_bytes(pickle.dumps(metadata))
    record = json.loads((tmp_path / "bad" / "checkpoint.json").read_text())
    record["files"]["tensors/.metadata"] = vars(file_record(path))
    write(tmp_path / "bad" / "checkpoint.json", record)
    assert (
        run_ranks(ranks, _refused_then_loaded, tmp_path / "bad", tmp_path / "good") == [1] * ranks
    )
