"""The model of the examples: a DLRM of TorchRec's modules over the columns of a click log."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from click_data import ClickLog, Column
from deepfm import DeepFM
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_hkv import (
    EmbeddingShardingPlanner,
    HKVOptions,
    ParameterConstraints,
    TTOptions,
    get_default_sharders,
)
from torchrec_hkv.hash_table import Uniform, initial_rows

DIM = 16
DENSE_LAYERS = [32, 16]
OVER_LAYERS = [64, 32, 1]
DEEP_LAYERS = [64, 32]


@dataclasses.dataclass(frozen=True)
class Variant:
    """The kind of tables for the open-ended columns. The rest of the model is the same.

    Attributes:
        key: name of the variant on the command line and in the JSON file.
        title: name in the printed table, which fits into 80 columns.
        kernel: ``fused`` (TorchRec's own), ``hkv`` or ``tt``.
        rows: rows of a table per id of its column.
        hashed: whether ids share the rows of a stock table by hashing.
        eviction: eviction policy of hash tables.
        expire_after: option of hash tables.
        tt_options: options of Tensor-Train tables, by column.
    """

    key: str
    title: str
    kernel: str
    rows: float
    hashed: bool = False
    eviction: str = "lfu"
    expire_after: int | None = None
    tt_options: Mapping[str, TTOptions] = dataclasses.field(default_factory=dict)

    def num_embeddings(self, column: Column) -> int:
        ids = len(np.unique(column.ids[column.present]))
        return max(1, round(ids * self.rows) if column.open_ended else ids)

    def encode(self, column: Column) -> torch.Tensor:
        """Encodes the ids for this variant's table: int64 ``[rows of the log]``."""
        if column.open_ended and self.kernel == "hkv":
            return torch.from_numpy(column.ids)
        if column.open_ended and self.hashed:
            row = column.ids.view(np.uint64) % np.uint64(self.num_embeddings(column))
            return torch.from_numpy(row.astype(np.int64))
        vocabulary = np.unique(column.ids[column.present])
        return torch.from_numpy(np.searchsorted(vocabulary, column.ids))


# An id can be stored on one rank only, and there in two buckets only. So a table that must not
# evict needs more rows than ids.
SLACK = 1.5

VARIANTS = [
    Variant("stock", "stock, every id known", "fused", 1.0),
    Variant("hkv", "hkv, room for every id", "hkv", SLACK),
    Variant("hkv-quarter", "hkv, a quarter, LFU", "hkv", 0.25),
    Variant("hashed-quarter", "stock, a quarter, hashed", "fused", 0.25, True),
]


def init_bound(column: Column) -> float:
    """Returns the bound of the uniform distribution of initial rows, which is symmetric."""
    return max(1, len(np.unique(column.ids[column.present]))) ** -0.5


def build(
    log: ClickLog,
    variant: Variant,
    device: torch.device,
    seed: int,
    row_learning_rate: float,
    architecture: str = "dlrm",
) -> DistributedModelParallel:
    """Plans and shards the model, a ``"dlrm"`` or ``"deepfm"``. Rank 0 prints the plan."""
    torch.manual_seed(seed)
    tables = [
        EmbeddingBagConfig(
            name=column.name,
            feature_names=[column.name],
            embedding_dim=DIM,
            num_embeddings=variant.num_embeddings(column),
            weight_init_min=-init_bound(column),
            weight_init_max=init_bound(column),
        )
        for column in log.columns
    ]
    collection = EmbeddingBagCollection(tables, device=torch.device("meta"))
    dense_features = log.dense.shape[1]
    if architecture == "deepfm":
        model = DeepFM(collection, dense_features, DEEP_LAYERS, device)
    else:
        model = DLRM(collection, dense_features, DENSE_LAYERS, OVER_LAYERS, device)
    apply_optimizer_in_backward(
        RowWiseAdagrad, model.sparse_arch.parameters(), {"lr": row_learning_rate}
    )
    sharders = get_default_sharders()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device=device.type),
        constraints={column.name: constraint(column, variant, seed) for column in log.columns},
    )
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    if dist.get_rank() == 0:
        print(plan)
    sharded = DistributedModelParallel(model, plan=plan, sharders=sharders, device=device)
    set_stock_rows(sharded, log, variant, seed)
    return sharded


def constraint(column: Column, variant: Variant, seed: int) -> ParameterConstraints:
    if not column.open_ended:
        return ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    if variant.kernel == "fused":
        return ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["fused"])
    if variant.kernel == "tt":
        return ParameterConstraints(
            sharding_types=["table_wise"],
            compute_kernels=["tt"],
            options=variant.tt_options[column.name],
        )
    return ParameterConstraints(
        sharding_types=["row_wise"],
        compute_kernels=["hkv"],
        options=HKVOptions(eviction=variant.eviction, seed=seed, expire_after=variant.expire_after),
    )


@torch.no_grad()
def set_stock_rows(model: nn.Module, log: ClickLog, variant: Variant, seed: int) -> None:
    """Sets the rows of stock tables to the initial rows of hash tables.

    The two then start from equal rows and can be compared.
    """
    state = model.state_dict()
    for column in log.columns:
        if column.open_ended and variant.kernel != "fused":
            continue
        if column.open_ended and not variant.hashed:
            ids = torch.from_numpy(np.unique(column.ids[column.present]))
        else:
            ids = torch.arange(variant.num_embeddings(column))
        bound = init_bound(column)
        rows = initial_rows(
            ids, DIM, table=column.name, seed=seed, initializer=Uniform(-bound, bound)
        )
        (key,) = [k for k in state if k.endswith(f"embedding_bags.{column.name}.weight")]
        for shard in state[key].local_shards():
            start = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(rows[start : start + len(shard.tensor)])
