"""Arguments that export refuses; the folder does not change."""

from __future__ import annotations

import pytest
import torch
from torchrec import KeyedJaggedTensor

from tests.support.served_models import BAGS, SEQUENCE, WEIGHTED, make_served, random_batch
from torchrec_hkv import serving

CASES = [
    ({"rows": "fp8"}, "rows of table 'ebc.embedding_bags.user' is 'fp8', but must be one of"),
    ({"rows": {"users": "int8"}}, "The model has no table 'users'"),
    ({"rows": {"pages": "int8"}}, "The model has 2 tables 'pages': use one of their full names"),
    ({"unknown": "none"}, "unknown is 'none' for table 'ebc.embedding_bags.user', but must be"),
    ({"unknown": {"user": [1.0]}}, "or a row of 12 finite numbers"),
    ({"memory_bytes": 0}, "memory_bytes is 0, but must be at least 1"),
    ({"inputs": torch.zeros(3)}, "inputs is a Tensor, but must be a tuple"),
]


def of_one_sample(keys, weights):
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.zeros(0, dtype=torch.int64),
        lengths=torch.zeros(len(keys), dtype=torch.int64),
        weights=weights,
    )


def refused(rank, world_size, device, folder):
    model = make_served(world_size, device)
    for arguments, message in CASES:
        with pytest.raises(ValueError, match=message):
            serving.export(model, folder / "new", **{"inputs": random_batch(0), **arguments})
    features = of_one_sample([*BAGS, *SEQUENCE], None), of_one_sample(WEIGHTED, torch.zeros(0))
    with pytest.raises(ValueError, match="inputs hold 0 ids of 1 samples"):
        serving.export(model, folder / "new", inputs=(torch.zeros(1, 4), *features))
    with pytest.raises(TypeError, match="inputs hold a set, but must hold tensors"):
        serving.export(model, folder / "new", inputs=({1, 2},))
    other = folder / "other"
    other.mkdir()
    (other / "notes").write_text("mine")
    with pytest.raises(ValueError, match="is not an exported model, and would be replaced"):
        serving.export(model, other, inputs=random_batch(0))
    with pytest.raises(ValueError, match="the model has no EmbeddingBagCollection"):
        serving.export(torch.nn.Linear(2, 2), folder / "new", inputs=(torch.zeros(2, 2),))


def test_refused(run_ranks, tmp_path):
    run_ranks(1, refused, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
