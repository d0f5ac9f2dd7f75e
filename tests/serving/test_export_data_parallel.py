"""Data-parallel Tensor-Train tables, of which every rank has a copy, are exported."""

from __future__ import annotations

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.models import shard_model
from torchrec_hkv import ParameterConstraints, TTOptions, serving

ROWS, DIM = 30, 8


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        page = EmbeddingBagConfig(
            name="page", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["page"]
        )
        self.ebc = EmbeddingBagCollection(tables=[page], device=torch.device("meta"))

    def forward(self, features):
        return self.ebc(features)["page"]


def _batch():
    lengths = torch.tensor([2, 0, 3])
    return KeyedJaggedTensor(keys=["page"], values=torch.arange(5) * 6, lengths=lengths)


def _exported(rank, world_size, device, folder):
    constraints = {
        "page": ParameterConstraints(
            compute_kernels=["tt"], sharding_types=["data_parallel"], options=TTOptions(ranks=3)
        )
    }
    model = shard_model(_Model(), constraints, world_size, device)
    serving.export(model, folder, inputs=(_batch().to(device),))
    model.eval()
    with torch.no_grad():
        return model(_batch().to(device)).cpu()


def test_two_ranks(run_ranks, tmp_path):
    expected = run_ranks(2, _exported, tmp_path / "model")
    served = serving.load(tmp_path / "model")(_batch())
    for rows in expected:
        assert served.equal(rows)
