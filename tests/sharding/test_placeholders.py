"""TorchRec and dense optimizers see the same placeholders of dynamic tables on every rank."""

from __future__ import annotations

import pytest
from torchrec import EmbeddingBagConfig
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.support.models import make_model, shard_model
from tests.support.small_models import IDS, batch, make_small
from torchrec_hkv import ParameterConstraints

pytestmark = pytest.mark.compat


def _seen(rank, world_size, device, sharding_type):
    model = make_small(world_size, device, "toy", sharding_type)
    parameters = {name: tuple(p.shape) for name, p in model.named_parameters() if ".t." in name}
    dense = [name for name, _ in in_backward_optimizer_filter(model.named_parameters())]
    model.module.ebc.reset_parameters()
    return parameters, dense, list(model.fused_optimizer.params), len(model.state_dict())


@pytest.mark.parametrize("sharding_type", ["row_wise", "table_wise"])
def test_every_rank_sees_every_table(run_ranks, sharding_type):
    results = run_ranks(3, _seen, sharding_type)
    for parameters, dense, _, entries in results:
        assert parameters == {"ebc.embedding_bags.t.weight": (0, 4)}
        assert dense == []
        assert entries == results[0][3]
    trained = {name for _, _, names, _ in results for name in names}
    assert trained == {"ebc.embedding_bags.t.weight", "ebc.embedding_bags.s.weight"}


def _from_device(rank, world_size, device):
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=64, embedding_dim=4, feature_names=[feature])
        for name, feature in (("t", "f"), ("s", "g"))
    ]
    constraints = {
        name: ParameterConstraints(compute_kernels=[kernel], sharding_types=["row_wise"])
        for name, kernel in (("t", "toy"), ("s", "fused"))
    }
    model = shard_model(make_model(tables, device=device), constraints, world_size, device)
    model(batch(rank, device, seed=0)).sum().backward()
    return model.module.ebc.group_lookups()["t"].counters("t")["size"]


def test_a_module_with_weights_is_sharded_as_one_without(run_ranks):
    # On a GPU, TorchRec copies the initial weights into sharded tables; ours start empty.
    assert 0 < sum(run_ranks(2, _from_device)) <= len(IDS)
