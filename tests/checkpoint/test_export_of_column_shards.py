"""Scores and steps of column shards are exported if the optimizer has no states to join."""

from __future__ import annotations

import numpy
import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.models import make_model, shard_model
from torchrec_hkv import HKVOptions, ParameterConstraints, checkpoint
from torchrec_hkv.cli import main

IDS = torch.tensor([-3, 2**62, 5])


def _save(rank, world_size, device, path, optimizer):
    table = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=100, feature_names=["t"])
    model = shard_model(
        make_model([table], optimizer),
        {
            "t": ParameterConstraints(
                compute_kernels=["hkv"],
                sharding_types=["column_wise"],
                min_partition=4,
                options=HKVOptions(eviction="lfu"),
            )
        },
        world_size,
        device,
    )
    model(KeyedJaggedTensor(["t"], IDS, lengths=torch.tensor([2, 1])).to(device)).sum().backward()
    checkpoint.save(path, model)
    return next(checkpoint.export_rows(model, "t"))


def _export(path, into):
    main(["export", str(path), "--into", str(into), "--states"])


def test_exported(run_ranks, tmp_path, capsys):
    (ids, rows), _ = run_ranks(2, _save, tmp_path / "sgd", torch.optim.SGD)
    _export(tmp_path / "sgd", tmp_path / "npy")
    found = {file.stem: numpy.load(file) for file in (tmp_path / "npy").iterdir()}
    assert sorted(found) == ["id", "last_step", "row", "score"]
    order, mine = ids.argsort(), found["id"].argsort()
    assert torch.from_numpy(found["id"][mine]).equal(ids[order])
    assert torch.from_numpy(found["row"][mine]).equal(rows[order])
    assert found["score"].tolist() == [2] * 3  # one for each rank
    run_ranks(2, _save, tmp_path / "adagrad", torch.optim.Adagrad)
    with pytest.raises(SystemExit):
        _export(tmp_path / "adagrad", tmp_path / "states")
    assert "optimizer states can't be joined" in capsys.readouterr().err
