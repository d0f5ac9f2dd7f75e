"""checkpoint.load finds the prefix of the model's entries in a folder of
torch.distributed.checkpoint, whatever tables the model has and whatever it calls its parts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.models import shard_model
from torchrec_hkv import ParameterConstraints, checkpoint


class _Named(torch.nn.Module):
    """A model whose part is called ``model``, as are entries that are nested."""

    def __init__(self):
        super().__init__()
        table = EmbeddingBagConfig(
            name="t", embedding_dim=8, num_embeddings=40, feature_names=["t"]
        )
        self.model = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))

    def forward(self, features):
        return self.model(features)["t"]


def _make(kernel, world_size, device):
    constraints = ParameterConstraints(
        compute_kernels=[kernel], sharding_types=["table_wise" if kernel == "tt" else "row_wise"]
    )
    return shard_model(_Named(), {"t": constraints}, world_size, device)


def _loaded(rank, world_size, device, folder, kernel, nested):
    model, other = (_make(kernel, world_size, device) for _ in range(2))
    batch = KeyedJaggedTensor(["t"], torch.tensor([3, 7, 3]), lengths=torch.tensor([2, 1]))
    model(batch.to(device)).sum().backward()
    state = model.state_dict()
    dcp.save({"model": state} if nested else state, checkpoint_id=folder)
    checkpoint.load(folder, other)
    model.eval(), other.eval()
    return torch.equal(model(batch.to(device)), other(batch.to(device)))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kernel", ["hkv", "tt"])
def test_loaded(run_ranks, tmp_path, kernel, nested):
    assert run_ranks(1, _loaded, tmp_path / "dcp", kernel, nested) == [True]
