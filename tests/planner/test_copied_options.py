"""Fast copies of sharding options equal TorchRec's copies, and share no mutable parts."""

from __future__ import annotations

import copy

import pytest
import torch
from torchrec import EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ShardingOption

from tests.support.models import make_model
from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, get_default_sharders
from torchrec_hkv.planner.options import is_backend_option

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def options():
    table = EmbeddingBagConfig(
        name="t", num_embeddings=100_000, embedding_dim=16, feature_names=["f"]
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=4, local_world_size=2, compute_device="cuda"),
        constraints={"t": ParameterConstraints(compute_kernels=["fused", "hkv", "tt"])},
    )
    model = make_model([table], device=torch.device("meta"))
    return planner._enumerator.enumerate(model, get_default_sharders())


def _shards(option):
    return [(s.size, s.offset, s.storage, s.perf, s.rank) for s in option.shards]


def test_copies_equal_those_of_torchrec(options):
    assert any(map(is_backend_option, options))
    assert not all(map(is_backend_option, options))
    for option in options:
        for rank, shard in enumerate(option.shards):
            shard.rank = rank % 4
        copied, stock = copy.deepcopy(option), ShardingOption.__deepcopy__(option, {})
        assert type(copied) is type(option)
        assert _shards(copied) == _shards(stock)
        assert hash(copied) == hash(option)
        left_out = {"origin", "table_shards"}  # another process does not need these
        assert set(vars(copied)) - left_out == set(vars(stock)) - left_out
        assert (copied.tensor, copied.module) == (option.tensor, option.module)


def test_changes_of_copies_do_not_reach_the_original(options):
    for option in options:
        before = copy.deepcopy(_shards(option))
        copied = copy.deepcopy(option)
        for shard in copied.shards:
            shard.rank = 7
            shard.storage.hbm += 1
            shard.perf.fwd_compute += 1
        copied.input_lengths.append(1.0)
        assert _shards(option) == before
        assert copied.input_lengths != option.input_lengths
