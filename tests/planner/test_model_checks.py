"""Planning a model refuses tables that no backend can serve, with one sentence."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from tests.support.models import make_model, topology
from tests.support.toy_backend import ToyOptions
from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    get_default_sharders,
)

CPU = torch.device("cpu")


def _table(**changes):
    fields = {"name": "t", "num_embeddings": 64, "embedding_dim": 4, "feature_names": ["f"]}
    return EmbeddingBagConfig(**{**fields, **changes})


def _refusal(model, constraint, sharders=None, world_size=2, device=CPU):
    planner = EmbeddingShardingPlanner(
        topology=topology(world_size, device), constraints={"t": constraint}
    )
    with pytest.raises(ValueError, match="'t'") as refusal:
        planner.plan(model, sharders or get_default_sharders())
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


TOY = ParameterConstraints(compute_kernels=["toy"])


def _sequences():
    collection = EmbeddingCollection(
        tables=[EmbeddingConfig(name="t", num_embeddings=64, embedding_dim=4, feature_names=["f"])],
        device=torch.device("meta"),
    )
    return nn.ModuleDict({"ec": collection})


def test_a_table_of_a_module_that_no_sharder_of_ours_serves():
    message = _refusal(_sequences(), TOY, [EmbeddingCollectionSharder()])
    assert "belongs to EmbeddingCollection 'ec'" in message
    assert "backends serve tables of EmbeddingBagCollections, FeatureProcessed" in message


@pytest.mark.parametrize("sharding_type", ["table_row_wise", "table_column_wise", "grid_shard"])
def test_a_sharding_type_that_torchrec_has_not_for_sequences(sharding_type):
    constraint = ParameterConstraints(compute_kernels=["hkv"], sharding_types=[sharding_type])
    message = _refusal(_sequences(), constraint)
    assert f"'t' in an EmbeddingCollection can't be sharded {sharding_type!r}" in message
    assert "allowed are ['column_wise', 'row_wise', 'table_wise']" in message


def test_a_sharder_that_knows_no_backends():
    message = _refusal(make_model([_table()]), TOY, [EmbeddingBagCollectionSharder()])
    assert "sharded by EmbeddingBagCollectionSharder" in message


def test_a_table_that_the_model_lacks():
    message = _refusal(make_model([_table(name="other")]), TOY)
    assert message == (
        "Constraints choose a backend for tables ['t'], but the model has no tables of these "
        "names: its tables are ['other']. Use the name in the table's config; a constraint applies "
        "to every table of that name."
    )


def test_options_that_are_impossible_for_the_table():
    constraint = ParameterConstraints(compute_kernels=["toy"], options=ToyOptions(max_capacity=63))
    assert "at most 63 are allowed" in _refusal(make_model([_table()]), constraint)


def test_hbm_bytes_below_what_one_bucket_takes():
    constraint = ParameterConstraints(compute_kernels=["hkv"], options=HKVOptions(hbm_bytes=8))
    message = _refusal(make_model([_table()]), constraint, device=torch.device("cuda"))
    assert "hbm_bytes" in message


def test_fewer_rows_than_ranks():
    constraint = ParameterConstraints(compute_kernels=["toy"], sharding_types=["row_wise"])
    message = _refusal(make_model([_table(num_embeddings=2)]), constraint, world_size=3)
    assert "shard without rows" in message


def test_a_capacity_of_zero():
    # Without an initial range, TorchRec's config divides by the number of rows.
    table = _table(num_embeddings=0, weight_init_min=-0.1, weight_init_max=0.1)
    message = _refusal(make_model([table]), TOY)
    assert "num_embeddings=0: it must be at least 1" in message


def test_a_dim_that_is_not_positive():
    message = _refusal(make_model([_table(embedding_dim=0)]), TOY)
    assert "embedding_dim=0: it must be at least 1" in message


@pytest.mark.parametrize(
    "init_fn", [nn.init.xavier_uniform_, functools.partial(nn.init.normal_, std=0.1)]
)
def test_an_init_fn(init_fn):
    message = _refusal(make_model([_table(init_fn=init_fn)]), TOY)
    assert "give weight_init_min and weight_init_max instead" in message


def test_an_optimizer_that_is_not_served():
    message = _refusal(make_model([_table()], torch.optim.RMSprop, {"lr": 0.1}), TOY)
    assert "can't be trained with" in message
    assert "RowWiseAdagrad" in message


def test_a_virtual_table():
    message = _refusal(make_model([_table(use_virtual_table=True)]), TOY)
    assert "use_virtual_table=True" in message
