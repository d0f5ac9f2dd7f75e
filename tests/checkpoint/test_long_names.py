"""Tables whose names are longer than a file system allows."""

from __future__ import annotations

import os

import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.models import make_model, shard_model
from torchrec_hkv import ParameterConstraints, checkpoint

#: The first two have a long common prefix; the third takes 9 bytes a character when quoted.
NAMES = ["x" * 300 + "1", "x" * 300 + "2", "用户" * 20]


def _model(world_size, device):
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=256, embedding_dim=4, feature_names=[f"f{i}"])
        for i, name in enumerate(NAMES)
    ]
    kernels = {name: ParameterConstraints(compute_kernels=["hkv"]) for name in NAMES}
    return shard_model(make_model(tables), kernels, world_size, device)


def _save_and_load(rank, world_size, device, folder):
    model = _model(world_size, device)
    ids = KeyedJaggedTensor(
        keys=["f0", "f1", "f2"],
        values=torch.tensor([1, 2, -3, 4, 5, 6], device=device),
        lengths=torch.tensor([1, 2, 3], device=device),
    )
    model(ids).sum().backward()
    checkpoint.save(folder, model)
    checkpoint.save(folder, model)
    fresh = _model(world_size, device)
    checkpoint.load(folder, fresh)
    saved, loaded = checkpoint.digest(model), checkpoint.digest(fresh)
    return saved, loaded


def test_they_are_saved_and_loaded(run_ranks, tmp_path):
    saved, loaded = run_ranks(1, _save_and_load, tmp_path / "c")[0]
    assert saved == loaded
    assert sorted(entry.split("-")[0] for entry in saved.values()) == ["1", "2", "3"]
    assert len(os.listdir(tmp_path / "c" / "tables")) == len(NAMES)
