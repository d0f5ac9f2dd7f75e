"""The tables of a model that is exported, and the outputs of its collections."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from torchrec_hkv.serving import ops
from torchrec_hkv.serving.tracing import Output
from torchrec_hkv.sharding.modules.collection import BackendCollection, FoundTable
from torchrec_hkv.sharding.state.names import joined, named_modules
from torchrec_hkv.sharding.tables import SUMMED_OVER_RANKS

_BAGS = (ShardedEmbeddingBagCollection, EmbeddingBagCollection)
_SHARDED = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
_COLLECTIONS = (*_BAGS, ShardedEmbeddingCollection, EmbeddingCollection)


@dataclasses.dataclass(frozen=True, eq=False)
class ModelTable:
    """A table of a model.

    Attributes:
        name: full.
        collection: that it is in.
        config: TorchRec's.
        found: where a backend serves it; None for a stock table.
        sharding_type: None where it is not sharded.
    """

    name: str
    collection: nn.Module
    config: Any
    found: FoundTable | None
    sharding_type: str | None

    @property
    def dim(self) -> int:
        """Columns of its rows."""
        return self.config.embedding_dim

    @property
    def is_mean(self) -> bool:
        """Whether its bags are means."""
        return getattr(self.config, "pooling", None) == PoolingType.MEAN

    @property
    def is_sharded(self) -> bool:
        """Whether its collection is sharded."""
        return isinstance(self.collection, _SHARDED)

    @property
    def is_summed_over_ranks(self) -> bool:
        """Whether ranks sum their parts of its bags."""
        return self.sharding_type in SUMMED_OVER_RANKS

    def kind(self, is_stock: bool) -> int:
        """How its lookup in training pools, as ``serving_pool`` takes it."""
        kind = ops.SUM
        if self.is_mean:
            own = ops.SCALED_SUM if is_stock else ops.SCALED_ROWS
            kind = ops.DIVIDED_SUM if self.is_summed_over_ranks else own
        return kind + (ops.FUSED if is_stock else 0)


def find_tables(model: nn.Module) -> list[ModelTable]:
    """All tables of a model, in the order of its modules."""
    tables: list[ModelTable] = []
    for path, module in named_modules(model):
        if not isinstance(module, _COLLECTIONS):
            continue
        attribute = "embedding_bags" if has_bags(module) else "embeddings"
        found = module.found_tables() if isinstance(module, BackendCollection) else {}
        plan = getattr(module, "module_sharding_plan", {})
        for config in _configs(module):
            sharding = plan.get(config.name)
            tables.append(
                ModelTable(
                    joined(joined(path, attribute), config.name),
                    module,
                    config,
                    found.get(config.name),
                    None if sharding is None else sharding.sharding_type,
                )
            )
    return tables


def has_bags(collection: nn.Module) -> bool:
    """Whether a collection pools."""
    return isinstance(collection, _BAGS)


def is_weighted(collection: nn.Module) -> bool:
    """Whether a collection of bags takes weights."""
    if hasattr(collection, "_is_weighted"):
        return bool(collection._is_weighted)
    return bool(collection.is_weighted())


def outputs_of(
    collection: nn.Module, tables: Sequence[ModelTable], is_stock: Sequence[bool]
) -> list[Output]:
    """The outputs of a collection in the order that it gives them in.

    Args:
        collection: of bags or sequences.
        tables: all of its.
        is_stock: for each table, whether no backend served it in training.
    """
    features = [feature for table in tables for feature in table.config.feature_names]
    outputs: dict[str, Output] = {}
    for table, stock in zip(tables, is_stock, strict=True):
        for feature in table.config.feature_names:
            is_shared = features.count(feature) > 1
            name = f"{feature}@{table.config.name}" if is_shared else feature
            outputs[name] = Output(name, feature, table.name, table.dim, table.kind(stock))
    is_sharded = isinstance(collection, ShardedEmbeddingBagCollection)
    return [outputs[name] for name in (collection._embedding_names if is_sharded else outputs)]


def _configs(module: nn.Module) -> Sequence[Any]:
    if isinstance(module, ShardedEmbeddingBagCollection):
        return module._embedding_bag_configs
    if isinstance(module, ShardedEmbeddingCollection):
        return module._embedding_configs
    if isinstance(module, EmbeddingBagCollection):
        return module.embedding_bag_configs()
    return module.embedding_configs()
