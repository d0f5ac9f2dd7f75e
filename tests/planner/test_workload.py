"""The planner's expected ids of a shard equal those that arrive."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.models import make_model, shard_model, topology
from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, get_default_sharders
from torchrec_hkv.planner import IdFrequencies
from torchrec_hkv.planner.options import is_backend_option
from torchrec_hkv.planner.workload import shard_workload

ROWS, BATCH, LENGTHS = 2000, 512, (2, 5)


def _model():
    table = EmbeddingBagConfig(
        name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["f", "g"]
    )
    return make_model([table])


def _ids(generator):
    count = BATCH * sum(LENGTHS)
    return (ROWS * torch.rand(count, generator=generator) ** 3).long()


def _reached(rank, world_size, device, sharding_type):
    """Ids, distinct ids and output rows of each rank."""
    constraint = ParameterConstraints(
        compute_kernels=["hkv"], sharding_types=[sharding_type], min_partition=4
    )
    module = shard_model(_model(), {"t": constraint}, world_size, device).module.ebc
    ids = _ids(torch.Generator().manual_seed(rank))
    lengths = torch.cat([torch.full((BATCH,), length) for length in LENGTHS])
    features = KeyedJaggedTensor(["f", "g"], ids.to(device), lengths=lengths.to(device))
    context = module.create_context()
    (received,) = module.input_dist(context, features).wait().wait()
    (rows,) = module.compute(context, [received])
    values = received.values()
    module.output_dist(context, [rows]).wait()
    return values.numel(), values.unique().numel(), rows.numel()


@pytest.mark.parametrize(
    "sharding_type", ["row_wise", "table_wise", "column_wise", "table_row_wise"]
)
@pytest.mark.parametrize("has_frequencies", [True, False])
def test_of_each_sharding_type(run_ranks, sharding_type, has_frequencies):
    sample = torch.cat([_ids(torch.Generator().manual_seed(99 + i)) for i in range(60)])
    frequencies = IdFrequencies.of_ids(sample) if has_frequencies else None
    constraint = ParameterConstraints(
        compute_kernels=["hkv"],
        sharding_types=[sharding_type],
        min_partition=4,
        pooling_factors=[float(length) for length in LENGTHS],
        frequencies=frequencies,
    )
    ranks = topology(2, torch.device("cpu"))
    planner = EmbeddingShardingPlanner(
        topology=ranks, constraints={"t": constraint}, batch_size=BATCH
    )
    options = planner._enumerator.enumerate(_model(), get_default_sharders())
    (option,) = [option for option in options if is_backend_option(option)]
    predicted = shard_workload(option, ranks, constraint, frequencies)
    reached = [one for one in run_ranks(2, _reached, sharding_type) if one[0] > 0]
    assert len(reached) == len(option.shards)
    for shard, (_, _, values) in zip(option.shards, reached, strict=True):
        assert predicted.bags * shard.size[1] == values
    # A frequent id goes to one rank: ranks are alike on average only.
    ids, distinct, _ = (sum(counts) / len(reached) for counts in zip(*reached, strict=True))
    assert predicted.ids == pytest.approx(ids)
    if has_frequencies:
        assert predicted.distinct == pytest.approx(distinct, rel=0.03)
    else:
        # Ids are skewed, but the planner does not know it.
        assert predicted.distinct > 1.1 * distinct


def test_one_feature_said_for_all():
    constraint = ParameterConstraints(compute_kernels=["hkv"], sharding_types=["table_wise"])
    ranks = topology(2, torch.device("cpu"))
    planner = EmbeddingShardingPlanner(
        topology=ranks, constraints={"t": constraint}, batch_size=BATCH
    )
    options = planner._enumerator.enumerate(_model(), get_default_sharders())
    (option,) = [option for option in options if is_backend_option(option)]
    predicted = shard_workload(option, ranks, constraint, None)
    assert (predicted.ids, predicted.bags) == (2 * 2 * BATCH, 2 * 2 * BATCH)
