"""DMPCollection (2D parallelism) is refused: it would not keep replicas of our tables in step."""

from __future__ import annotations

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.distributed.planner import Topology

from tests.support.sequences import SequenceModel, sequence_configs
from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, get_default_sharders


def _refused(rank, world_size, device, pooled):
    meta = torch.device("meta")
    if pooled:
        table = EmbeddingBagConfig(
            name="t0", num_embeddings=64, embedding_dim=4, feature_names=["f"]
        )
        model = torch.nn.ModuleDict({"ebc": EmbeddingBagCollection([table], device=meta)})
    else:
        model = SequenceModel(EmbeddingCollection(sequence_configs(64), device=meta))
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, local_world_size=1, compute_device=device.type),
        constraints={"t0": ParameterConstraints(compute_kernels=["hkv"])},
    )
    sharders = get_default_sharders()
    plan = planner.plan(model, sharders)
    with pytest.raises(ValueError, match=r"Table 't0' .* DMPCollection does not synchronize"):
        DMPCollection(
            module=model,
            device=device,
            plan=plan,
            world_size=world_size,
            sharding_group_size=1,
            global_pg=torch.distributed.group.WORLD,
            sharders=sharders,
        )


@pytest.mark.parametrize("pooled", [True, False])
def test_refused(run_ranks, device_type, pooled):
    if device_type == "cpu":
        pytest.skip(
            "TorchRec's DMPCollection takes GPUs only; test_refused_environments.py has the plan"
        )
    run_ranks(2, _refused, pooled)
