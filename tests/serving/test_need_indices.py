"""An ``EmbeddingCollection`` with ``need_indices`` also gives the ids when it is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from tests.support.models import shard_model
from torchrec_hkv import ParameterConstraints, serving

KEYS = ["f", "g", "h"]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        features = {"a": ["f"], "b": ["h", "f"]}
        tables = [
            EmbeddingConfig(name=name, embedding_dim=4, num_embeddings=100, feature_names=its)
            for name, its in features.items()
        ]
        self.ec = EmbeddingCollection(tables, device=torch.device("meta"), need_indices=True)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Rows and ids by output."""
        found = self.ec(features)
        return {name: (its.values(), its.weights()) for name, its in found.items()}


def _batch(seed: int, samples: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(KEYS) * samples,), generator=generator)
    ids = torch.randint(0, 60, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(KEYS, ids, lengths=lengths)


def _exported(rank, world_size, device, folder: Path, kernel: str):
    torch.manual_seed(0)
    kernels = ParameterConstraints(compute_kernels=[kernel], sharding_types=["table_wise"])
    model = shard_model(_Model(), dict.fromkeys(("a", "b"), kernels), world_size, device)
    found = model(_batch(0, 4))
    sum(rows.sum() for rows, _ in found.values()).backward()
    serving.export(model, folder, inputs=(_batch(1, 3),))
    model.eval()
    with torch.no_grad():
        return [model(_batch(seed, seed - 1)) for seed in (2, 5, 9)]


@pytest.mark.parametrize("kernel", ["hkv", "tt", "fused"])
def test_ids(kernel, run_ranks, tmp_path):
    want = run_ranks(1, _exported, tmp_path / "model", kernel)[0]
    model = serving.load(tmp_path / "model")
    for seed, its in zip((2, 5, 9), want, strict=True):
        got = model(_batch(seed, seed - 1))
        assert got.keys() == its.keys() == {"f@a", "f@b", "h"}
        for name, (rows, ids) in its.items():
            assert torch.equal(got[name][0], rows)
            assert torch.equal(got[name][1], ids)
