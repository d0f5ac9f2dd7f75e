"""The sharders to give to the planner and to DistributedModelParallel."""

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
from torchrec.distributed.sharding_plan import get_default_sharders as stock_default_sharders
from torchrec.distributed.types import (
    ModuleSharder,
    ParameterSharding,
    ShardingEnv,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

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
from torchrec_hkv.sharding.tables import Collection, table_weight
from torchrec_hkv.sharding.validation import planned_tables

#: Of exchanges: for all tables, or by table.
WireDtype: TypeAlias = str | torch.dtype | Mapping[str, str | torch.dtype] | None


class _BackendSharder:
    """What both sharders share; a mixin before TorchRec's."""

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
            args: TorchRec's.
            num_groups: that the tables of a sharding type are exchanged in: the exchange of one
                goes on while the next is looked up. None: what ``TORCHREC_HKV_EMB_NUM_GROUPS``
                says, else 1.
            wire_dtype: of rows and gradients that are exchanged: ``"fp32"``, ``"fp16"``,
                ``"bf16"`` or ``"fp8"`` (row-wise), or torch's dtypes, for all tables or by table.
                None: what ``TORCHREC_HKV_EMB_WIRE_DTYPE`` says; tables of which nothing is said go
                as ``qcomm_codecs_registry`` says.
            unique: tables whose ids a user knows to be different in each batch of each rank, or
                True for all, or True or False by table: ``use_index_dedup`` then sends them as they
                are. None: what ``TORCHREC_HKV_EMB_UNIQUE`` says.
            shard_unique: tables on backends whose ids are different where they are looked up, too,
                or True: a lookup that has one twice is refused. None: what
                ``TORCHREC_HKV_EMB_SHARD_UNIQUE`` says.
            check_unique: a batch that has an id twice of a table in ``unique`` is refused, by a
                sort of its ids.
            kwargs: TorchRec's.

        Raises:
            ValueError: a number or a dtype that can't be.
        """
        if num_groups is None:
            num_groups = environment.number("EMB_NUM_GROUPS", 1)
        is_told = wire_dtype is not None
        if wire_dtype is None:
            # The tables may be those of several collections.
            wire_dtype = environment.by_table("EMB_WIRE_DTYPE")
        self._exchange = Exchange(num_groups, wire_dtypes(wire_dtype), is_checked=is_told)
        # A variable is of all collections; it has no effect in those that send ids as they are.
        if unique is None:
            dedups = kwargs.get("use_index_dedup", False) or check_unique
            unique = dedups and environment.flag("EMB_UNIQUE")
        if shard_unique is None:
            shard_unique = environment.flag("EMB_SHARD_UNIQUE")
        self._uniqueness = Uniqueness(unique, shard_unique, check_unique)
        super().__init__(*args, **kwargs)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """TorchRec's, and the one that all backends share."""
        return [*super().compute_kernels(sharding_type, compute_device_type), KERNEL]

    def _shard_arguments(
        self,
        module: Collection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None,
        module_fqn: str | None,
    ) -> dict[str, Any]:
        """The arguments that both sharded collections take, checked."""
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
    """Shards EmbeddingBagCollections that stock kernels and backends serve side by side."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """TorchRec's, and on the CPU those by rows too, where it leaves them out."""
        types = super().sharding_types(compute_device_type)
        return [*types, *self.added_sharding_types(compute_device_type)]

    def added_sharding_types(self, compute_device_type: str) -> list[str]:
        """Those that TorchRec's sharder does not offer. Over gloo they fail on uneven batches."""
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
        """Makes this rank's part of a collection.

        Args:
            module: the unsharded collection.
            params: the plan of its tables.
            env: the ranks.
            device: where the tables will live.
            module_fqn: where the module is in the model.

        Raises:
            ValueError: a table that its backend can't serve as planned.
        """
        made = BackendEmbeddingBagCollection(
            **self._shard_arguments(module, params, env, device, module_fqn),
            sharded_module_order_overwrite=self._sharded_module_order_overwrite,
        )
        made.recipe = Recipe.of(self, module, env, device, module_fqn)
        return made

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingBagCollection]:
        """What :meth:`shard` makes."""
        return BackendEmbeddingBagCollection


class BackendEmbeddingCollectionSharder(_BackendSharder, EmbeddingCollectionSharder):
    """Shards EmbeddingCollections that stock kernels and backends serve side by side."""

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection:
        """Makes this rank's part of a collection.

        Args:
            module: the unsharded collection.
            params: the plan of its tables.
            env: the ranks.
            device: where the tables will live.
            module_fqn: where the module is in the model.

        Raises:
            ValueError: a table that its backend can't serve as planned.
        """
        made = BackendEmbeddingCollection(
            **self._shard_arguments(module, params, env, device, module_fqn),
            use_index_dedup=self._use_index_dedup,
        )
        made.recipe = Recipe.of(self, module, env, device, module_fqn)
        return made

    @property
    def sharded_module_type(self) -> type[ShardedEmbeddingCollection]:
        """What :meth:`shard` makes."""
        return BackendEmbeddingCollection


#: The sharders of modules whose tables backends may serve.
BACKEND_SHARDERS = (BackendEmbeddingBagCollectionSharder, BackendEmbeddingCollectionSharder)


def get_default_sharders(
    num_groups: int | None = None, wire_dtype: WireDtype = None
) -> list[ModuleSharder[nn.Module]]:
    """TorchRec's default sharders, where collections may have tables on backends.

    Args:
        num_groups: as :class:`BackendEmbeddingBagCollectionSharder` takes it.
        wire_dtype: likewise, for all tables; by table each collection needs a sharder of its own.
    """
    made = [make(num_groups=num_groups, wire_dtype=wire_dtype) for make in BACKEND_SHARDERS]
    ours = {sharder.module_type: sharder for sharder in made}
    return [ours.get(sharder.module_type, sharder) for sharder in stock_default_sharders()]
