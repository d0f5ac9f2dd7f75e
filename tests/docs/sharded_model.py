"""Context for blocks of the docs with ``after sharded_model.py``: a job whose model has a table
``user`` and a dense layer."""

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torchrec_hkv import EmbeddingShardingPlanner, ParameterConstraints, get_default_sharders

dist.init_process_group("gloo")
device = torch.device("cpu")
sharders = get_default_sharders()


class Model(nn.Module):
    """Pools the rows of ids and scores them."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        user = EmbeddingBagConfig(
            name="user", feature_names=["user"], embedding_dim=16, num_embeddings=rows
        )
        self.ebc = EmbeddingBagCollection([user], device=torch.device("meta"))
        self.over = nn.Linear(16, 1)

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(batch).values())


def make_module(rows: int = 10_000) -> Model:
    """An unsharded model."""
    module = Model(rows)
    apply_optimizer_in_backward(RowWiseAdagrad, module.ebc.parameters(), {"lr": 0.05})
    return module


def make_planner(world_size: int, kernel: str = "hkv") -> EmbeddingShardingPlanner:
    """A planner that places the table on the given kernel."""
    topology = Topology(world_size=world_size, compute_device=device.type)
    user = ParameterConstraints(compute_kernels=[kernel])
    return EmbeddingShardingPlanner(topology=topology, constraints={"user": user})


def make_model(kernel: str = "hkv", rows: int = 10_000) -> DistributedModelParallel:
    """A sharded model."""
    module = make_module(rows)
    planner = make_planner(dist.get_world_size(), kernel)
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    return DistributedModelParallel(module, plan=plan, sharders=sharders, device=device)


def next_batch() -> KeyedJaggedTensor:
    """64 samples of one id each."""
    ids = torch.randint(1 << 62, (64,))
    return KeyedJaggedTensor.from_lengths_sync(["user"], ids, torch.ones(64, dtype=torch.int32))
