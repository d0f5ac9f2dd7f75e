"""Tables of a model to export, and outputs of its collections."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_hkv.serving import ops
from torchrec_hkv.serving.tracing import Output
from torchrec_hkv.sharding.modules.collection import BackendCollection, ShardedTable
from torchrec_hkv.sharding.state.names import joined, named_modules
from torchrec_hkv.sharding.tables import SUMMED_OVER_RANKS

_BAGS = (ShardedEmbeddingBagCollection, EmbeddingBagCollection)
_SHARDED = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)
_PROCESSED = (
    FeatureProcessedEmbeddingBagCollection,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
_COLLECTIONS = (*_BAGS, ShardedEmbeddingCollection, EmbeddingCollection)


@dataclasses.dataclass(frozen=True, eq=False)
class ModelTable:
    """A table of a model.

    Attributes:
        name: full name.
        collection: the collection of the table.
        config: TorchRec's config of the table.
        found: the table in its backend, or None for a stock table.
        sharding_type: sharding type, or None if the model is not sharded.
    """

    name: str
    collection: nn.Module
    config: Any
    found: ShardedTable | None
    sharding_type: str | None

    @property
    def dim(self) -> int:
        """Columns of a row."""
        return self.config.embedding_dim

    @property
    def is_mean(self) -> bool:
        """Whether bags are pooled by mean."""
        return getattr(self.config, "pooling", None) == PoolingType.MEAN

    @property
    def is_sharded(self) -> bool:
        """Whether the collection is sharded."""
        return isinstance(self.collection, _SHARDED)

    @property
    def is_summed_over_ranks(self) -> bool:
        """Whether ranks sum partial bags."""
        return self.sharding_type in SUMMED_OVER_RANKS

    def kind(self, is_stock: bool) -> int:
        """Kind of pooling in training, an argument of ``serving_pool``."""
        kind = ops.SUM
        if self.is_mean:
            scaled = ops.SCALED_SUM if is_stock else ops.SCALED_ROWS
            kind = ops.DIVIDED_SUM if self.is_summed_over_ranks else scaled
        return kind + (ops.FUSED if is_stock else 0)


def find_tables(model: nn.Module) -> list[ModelTable]:
    """All tables of a model, in the order of its modules.

    Raises:
        ValueError: the model has feature processors.
    """
    tables: list[ModelTable] = []
    for path, module in named_modules(model):
        if isinstance(module, _PROCESSED):
            raise ValueError(
                f"module {path!r} is a FeatureProcessedEmbeddingBagCollection, whose feature "
                "processors can't be exported: export a model with a weighted "
                "EmbeddingBagCollection, and compute the weights in its forward."
            )
        if not isinstance(module, _COLLECTIONS):
            continue
        attribute = "embedding_bags" if has_bags(module) else "embeddings"
        found = module.sharded_tables() if isinstance(module, BackendCollection) else {}
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
    """Whether a collection is an ``EmbeddingBagCollection``."""
    return isinstance(collection, _BAGS)


def is_weighted(collection: nn.Module) -> bool:
    """Whether a collection of bags takes weights."""
    if hasattr(collection, "_is_weighted"):
        return bool(collection._is_weighted)
    return bool(collection.is_weighted())


def gives_ids(collection: nn.Module) -> bool:
    """Whether a collection of sequences also gives their ids."""
    return bool(collection._need_indices)  # also of a sharded one


def outputs_of(
    collection: nn.Module, tables: Sequence[ModelTable], is_stock: Sequence[bool]
) -> list[Output]:
    """Outputs of a collection, in its own order.

    Args:
        collection: a collection of bags or sequences.
        tables: all tables of the collection.
        is_stock: for each table, whether it was a stock table in training.
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
