"""Loading an earlier ``state_dict`` also resets the clock: undone steps expire no id."""

from __future__ import annotations

import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.models import make_model, shard_model
from torchrec_hkv import HKVOptions, ParameterConstraints, checkpoint
from torchrec_hkv.sharding import table_counters

IDS = torch.arange(40)


def _train(model, rank, device, steps):
    """Step ``k`` looks up ids that begin at ``4 k``."""
    for step in steps:
        ids = IDS[4 * step :].roll(rank)
        lengths = torch.tensor([len(ids)], device=device)
        features = KeyedJaggedTensor(keys=["f"], values=ids.to(device), lengths=lengths)
        model(features).square().sum().backward()


def _back(rank, world_size, device):
    table = EmbeddingBagConfig(name="t", num_embeddings=256, embedding_dim=4, feature_names=["f"])
    constraint = ParameterConstraints(
        compute_kernels=["hkv"], sharding_types=["row_wise"], options=HKVOptions(expire_after=3)
    )
    model = shard_model(make_model([table]), {"t": constraint}, world_size, device)
    _train(model, rank, device, range(3))
    state, before = model.state_dict(), checkpoint.digest(model)
    _train(model, rank, device, [2] * 8)
    after = table_counters(model)["ebc.embedding_bags.t"]["expired"]
    model.load_state_dict(state)
    assert checkpoint.digest(model) == before
    _train(model, rank, device, range(3, 4))
    return after, table_counters(model)["ebc.embedding_bags.t"]["expired"] - after


def test_nothing_expires_for_steps_that_were_undone(run_ranks):
    results = run_ranks(2, _back)
    assert sum(first for first, _ in results) == 8
    assert sum(then for _, then in results) == 0
