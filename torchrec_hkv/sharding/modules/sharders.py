"""The sharders for the planner and for DistributedModelParallel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import nn
from torchrec.distributed.embedding import (
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from torchrec.distributed.sharding_plan import get_default_sharders as stock_default_sharders
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torchrec_hkv import environment
from torchrec_hkv.sharding.dists.exchange_groups import Exchange, wire_dtypes
from torchrec_hkv.sharding.dists.scores import ScoreWire
from torchrec_hkv.sharding.dists.uniqueness import Tables, Uniqueness
from torchrec_hkv.sharding.kernels.optimizer import name_optimizer
from torchrec_hkv.sharding.modules.embedding import BackendEmbeddingCollection
from torchrec_hkv.sharding.modules.embedding_bag import BackendEmbeddingBagCollection
from torchrec_hkv.sharding.modules.embedding_sharding import POOLED_SHARDINGS
from torchrec_hkv.sharding.modules.recipe import Recipe
from torchrec_hkv.sharding.parameter_sharding import KERNEL
from torchrec_hkv.sharding.state.names import joined
from torchrec_hkv.sharding.tables import PROCESSED_BAGS, Collection, table_weight
from torchrec_hkv.sharding.validation import planned_tables

#: A wire dtype for all tables, or by table.
WireDtype: TypeAlias = str | torch.dtype | Mapping[str, str | torch.dtype] | None


class _BackendSharder:
    """The common part of both sharders; a mixin before TorchRec's."""

    def __init__(
        self,
        *args: Any,
        num_groups: int | None = None,
        wire_dtype: WireDtype = None,
        unique: Tables | None = None,
        shard_unique: Tables | None = None,
        check_unique: bool = False,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            args: arguments of TorchRec's sharder.
            num_groups: number of groups in which tables of a sharding type are exchanged; the
                exchange of a group overlaps with the lookup of the next. None: the environment
                variable ``TORCHREC_HKV_EMB_NUM_GROUPS``, else 1.
            wire_dtype: data type in which rows and gradients are exchanged: ``"fp32"``,
                ``"fp16"``, ``"bf16"`` or ``"fp8"`` (row-wise), or torch's dtypes, for all tables
                or by table. None: the environment variable ``TORCHREC_HKV_EMB_WIRE_DTYPE``. Tables
                without a wire dtype use ``qcomm_codecs_registry``.
            unique: tables whose ids do not repeat within a batch of a rank: a collection of names,
                True for all tables, or a mapping from tables to bools. ``use_index_dedup`` then
                sends them without deduplication. None: the environment variable
                ``TORCHREC_HKV_EMB_UNIQUE``.
            shard_unique: tables on backends whose ids also do not repeat within a lookup of a
                shard, over all ranks, or True. A lookup with a repeated id raises. None: the
                environment variable ``TORCHREC_HKV_EMB_SHARD_UNIQUE``.
            check_unique: whether to check batches for repeated ids of the tables in ``unique``, by
                sorting their ids.
            kwargs: keyword arguments of TorchRec's sharder.

        Raises:
            ValueError: ``num_groups`` or a wire dtype is not allowed.
        """
        if num_groups is None:
            num_groups = environment.number("EMB_NUM_GROUPS", 1)
        is_given = wire_dtype is not None
        if wire_dtype is None:
            # The tables in the variable may belong to several collections.
            wire_dtype = environment.by_table("EMB_WIRE_DTYPE")
        self._exchange = Exchange(num_groups, wire_dtypes(wire_dtype), is_checked=is_given)
        # A variable applies to all collections; ignore it in those where it has no effect.
        if unique is None:
            dedups = kwargs.get("use_index_dedup", False) or check_unique
            unique = dedups and environment.flag("EMB_UNIQUE")
        if shard_unique is None:
            shard_unique = environment.flag("EMB_SHARD_UNIQUE")
        self._uniqueness = Uniqueness(unique, shard_unique, check_unique)
        super().__init__(*args, **kwargs)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """TorchRec's compute kernels, and the one that all backends share."""
        return [*super().compute_kernels(sharding_type, compute_device_type), KERNEL]

    def _shard_arguments(
        self,
        module: Collection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None,
        module_fqn: str | None,
    ) -> dict[str, Any]:
        """Checks the plan; returns the common arguments of the sharded collections."""
        planned = planned_tables(module, params, env, device, self.fused_params)
        for name, table in planned.items():
            name_optimizer(table_weight(module, name))
            table.sharding.is_unique = self._uniqueness.has_shard_unique(name)
            if module_fqn is not None:
                prefix = joined(module_fqn, self.sharded_module_type.tables_attribute)
                table.sharding.full_name = joined(prefix, name)
        return {
            "module": module,
            "table_name_to_parameter_sharding": {
                **params,
                **{name: table.sharding for name, table in planned.items()},
            },
            "env": env,
            "fused_params": self.fused_params,
            "device": device,
            "qcomm_codecs_registry": self.qcomm_codecs_registry,
            "module_fqn": module_fqn,
            "planned": planned,
            "exchange": self._exchange,
            "uniqueness": self._uniqueness,
            "score_wire": ScoreWire.of(
                [(name, t.features, t.shards[0].options) for name, t in planned.items()],
                isinstance(module, EmbeddingBagCollection) and module.is_weighted(),
            ),
        }


class BackendEmbeddingBagCollectionSharder(_BackendSharder, EmbeddingBagCollectionSharder):
    """Shards EmbeddingBagCollections whose tables are on stock kernels or on backends."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """TorchRec's sharding types, and on a CPU also the row-wise ones, which TorchRec omits."""
        types = super().sharding_types(compute_device_type)
        return [*types, *self.added_sharding_types(compute_device_type)]

    def added_sharding_types(self, compute_device_type: str) -> list[str]:
        """Sharding types that TorchRec's sharder does not offer. TorchRec's own shardings of these
        types fail over gloo if ranks have different batch sizes."""
        types = super().sharding_types(compute_device_type)
        return [served for served in POOLED_SHARDINGS if served not in types]

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBagCollection:
        """Creates this rank's part of a collection.

        Args:
            module: the unsharded collection.
            params: the plan of its tables.
            env: the ranks.
            device: device of the tables.
            module_fqn: path of the module in the model.

        Raises:
            ValueError: a backend can't serve a table as planned.
        """
        sharded = BackendEmbeddingBagCollection(
            **self._shard_arguments(module, params, env, device, module_fqn),
            sharded_module_order_overwrite=self._sharded_module_order_overwrite,
        )
        sharded.recipe = Recipe.of(self, module, env, device, module_fqn)
        return sharded

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingBagCollection]:
        """The class of the modules that :meth:`shard` returns."""
        return BackendEmbeddingBagCollection


class BackendEmbeddingCollectionSharder(_BackendSharder, EmbeddingCollectionSharder):
    """Shards EmbeddingCollections whose tables are on stock kernels or on backends."""

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection:
        """Creates this rank's part of a collection.

        Args:
            module: the unsharded collection.
            params: the plan of its tables.
            env: the ranks.
            device: device of the tables.
            module_fqn: path of the module in the model.

        Raises:
            ValueError: a backend can't serve a table as planned.
        """
        sharded = BackendEmbeddingCollection(
            **self._shard_arguments(module, params, env, device, module_fqn),
            use_index_dedup=self._use_index_dedup,
        )
        sharded.recipe = Recipe.of(self, module, env, device, module_fqn)
        return sharded

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingCollection]:
        """The class of the modules that :meth:`shard` returns."""
        return BackendEmbeddingCollection


class BackendFeatureProcessedEmbeddingBagCollectionSharder(
    FeatureProcessedEmbeddingBagCollectionSharder
):
    """Shards FeatureProcessedEmbeddingBagCollections whose tables are on stock kernels or on
    backends. The feature processors compute the weights of ids after the exchange of ids."""

    def __init__(
        self,
        ebc_sharder: BackendEmbeddingBagCollectionSharder | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        """
        Args:
            ebc_sharder: sharder of the bags; by default, one with ``qcomm_codecs_registry``.
            qcomm_codecs_registry: argument of TorchRec's sharder.

        Raises:
            TypeError: ``ebc_sharder`` does not serve backends.
        """
        if ebc_sharder is None:
            ebc_sharder = BackendEmbeddingBagCollectionSharder(
                qcomm_codecs_registry=qcomm_codecs_registry
            )
        if not isinstance(ebc_sharder, BackendEmbeddingBagCollectionSharder):
            raise TypeError(
                f"ebc_sharder is a {type(ebc_sharder).__name__}, but must be a "
                "BackendEmbeddingBagCollectionSharder."
            )
        super().__init__(ebc_sharder, qcomm_codecs_registry)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """TorchRec's compute kernels, and the one that all backends share."""
        return [*super().compute_kernels(sharding_type, compute_device_type), KERNEL]

    def shard(
        self,
        module: FeatureProcessedEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedFeatureProcessedEmbeddingBagCollection:
        """Creates this rank's part of a collection.

        Args:
            module: the unsharded module.
            params: the plan of its tables.
            env: the ranks.
            device: device of the tables.
            module_fqn: path of the module in the model.

        Raises:
            ValueError: a backend can't serve a table as planned, or a table takes scores.
        """
        for name, sharding in params.items():
            options = getattr(sharding, "options", None)
            if options is not None and options.score_source is not None:
                raise ValueError(
                    f"Table {name!r} takes scores from its batches, which are sent as weights, and "
                    "the feature processors of its FeatureProcessedEmbeddingBagCollection replace "
                    "the weights: use an eviction policy other than 'customized'."
                )
        bags_path = None if module_fqn is None else joined(module_fqn, PROCESSED_BAGS)
        sharded = super().shard(module, params, env, device, bags_path)
        bags = getattr(sharded, PROCESSED_BAGS)
        if isinstance(bags, BackendEmbeddingBagCollection):
            bags.has_feature_processors = True
            # The bags are never sharded again by themselves: the module with the processors is.
            bags.recipe = None
        return sharded


#: The sharders of modules that may have tables on backends.
BACKEND_SHARDERS = (
    BackendEmbeddingBagCollectionSharder,
    BackendFeatureProcessedEmbeddingBagCollectionSharder,
    BackendEmbeddingCollectionSharder,
)


def get_default_sharders(
    num_groups: int | None = None, wire_dtype: WireDtype = None
) -> list[ModuleSharder[nn.Module]]:
    """TorchRec's default sharders, with support for tables on backends.

    Args:
        num_groups: see :class:`BackendEmbeddingBagCollectionSharder`.
        wire_dtype: see :class:`BackendEmbeddingBagCollectionSharder`; for all tables. For wire
            dtypes by table, create a sharder for each collection.
    """
    bags = BackendEmbeddingBagCollectionSharder(num_groups=num_groups, wire_dtype=wire_dtype)
    sequences = BackendEmbeddingCollectionSharder(num_groups=num_groups, wire_dtype=wire_dtype)
    processed = BackendFeatureProcessedEmbeddingBagCollectionSharder(bags)
    backend_sharders = {sharder.module_type: sharder for sharder in (bags, processed, sequences)}
    return [
        backend_sharders.get(sharder.module_type, sharder) for sharder in stock_default_sharders()
    ]
