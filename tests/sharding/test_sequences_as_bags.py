"""A sequence trains like bags of one id, under every optimizer that TorchRec can name."""

from __future__ import annotations

import pytest
import torch
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.optim import LAMB, PartialRowWiseAdam
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support.models import shard_model
from tests.support.sequences import SequenceModel
from torchrec_hkv import HKVOptions, ParameterConstraints

ROWS, DIM, IDS, STEPS = 96, 4, 40, 12

OPTIMIZERS = {
    "adam": (torch.optim.Adam, {"lr": 0.05}),
    "adamw": (torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "rowwise_adam": (PartialRowWiseAdam, {"lr": 0.05}),
    "lamb": (LAMB, {"lr": 0.05, "weight_decay": 0.01}),
}


def _model(world_size, device, optimizer, is_sequence):
    fields = {"num_embeddings": ROWS, "embedding_dim": DIM, "feature_names": ["f"]}
    meta = torch.device("meta")
    collection = (
        EmbeddingCollection([EmbeddingConfig(name="t", **fields)], device=meta)
        if is_sequence
        else EmbeddingBagCollection([EmbeddingBagConfig(name="t", **fields)], device=meta)
    )
    apply_optimizer_in_backward(optimizer[0], collection.parameters(), dict(optimizer[1]))
    constraint = ParameterConstraints(
        compute_kernels=["hkv"],
        sharding_types=["row_wise"],
        options=HKVOptions(seed=2, deterministic=True),
    )
    return shard_model(SequenceModel(collection), {"t": constraint}, world_size, device)


def _train(rank, world_size, device, optimizer):
    sequences, bags = (
        _model(world_size, device, OPTIMIZERS[optimizer], is_sequence)
        for is_sequence in (True, False)
    )
    seen = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + rank)
        # More ids than rows, so some are evicted.
        ids = torch.randint(-(2**60), 2**60, (IDS,), generator=generator)
        ids[: IDS // 2] = torch.randint(0, 30, (IDS // 2,), generator=generator)
        lengths = {
            True: torch.tensor([IDS - 3, 0, 3, 0]),
            False: torch.ones(IDS, dtype=torch.int64),
        }
        outputs = []
        for model, is_sequence in ((sequences, True), (bags, False)):
            features = KeyedJaggedTensor(
                keys=["f"], values=ids.to(device), lengths=lengths[is_sequence].to(device)
            )
            given = model(features)["f"]
            output = given.values() if is_sequence else given
            output.square().sum().backward()
            outputs.append(output.detach())
        torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)
        seen.append(outputs[0])
    return bool((seen[0][:20] != seen[-1][:20]).any())


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_equal(run_ranks, optimizer):
    assert all(run_ranks(2, _train, optimizer))
