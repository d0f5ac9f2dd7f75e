"""The sharded EmbeddingBagCollection: TorchRec's, where some tables are served by backends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_sharding import EmbeddingSharding
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.types import (
    Awaitable,
    EmbeddingModuleShardingPlan,
    QuantizedCommCodecs,
    ShardingEnv,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.protocol import GroupLookup
from torchrec_hkv.compat import to_keyed_jagged_tensor
from torchrec_hkv.sharding.embedding_sharding import SHARDINGS
from torchrec_hkv.sharding.features import prepare_features
from torchrec_hkv.sharding.kernel import BackendEmbeddingBag, placeholder
from torchrec_hkv.sharding.parameter_sharding import BackendParameterSharding
from torchrec_hkv.sharding.state import TableState
from torchrec_hkv.sharding.validation import PlannedTable


class BackendEmbeddingBagCollection(ShardedEmbeddingBagCollection):
    """TorchRec's sharded collection, closing what it leaves open for kernels from outside."""

    def __init__(self, *args: Any, planned: dict[str, PlannedTable], **kwargs: Any) -> None:
        """
        Args:
            args: TorchRec's.
            planned: the tables of ours, by name, already checked.
            kwargs: TorchRec's.
        """
        # The base class calls back into methods that need these; it is an nn.Module, but neither
        # attribute is a module or a parameter.
        self._planned = planned
        self._is_built = False
        super().__init__(*args, **kwargs)
        self._is_built = True

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> EmbeddingSharding[EmbeddingShardingContext, KeyedJaggedTensor, torch.Tensor, torch.Tensor]:
        """TorchRec's hook: the sharding of all tables of one sharding type, stock and ours."""
        shardings = [info.param_sharding for info in sharding_infos]
        if not any(isinstance(sharding, BackendParameterSharding) for sharding in shardings):
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        return SHARDINGS[shardings[0].sharding_type](
            sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry
        )

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Starts the distribution of a batch.

        Args:
            ctx: TorchRec's.
            features: ids of any integer dtype; widened to int64 so that all ranks send the same.

        Raises:
            ValueError: ids that are no integers, weights or features that are missing, or batch
                sizes that differ between features. Nothing has been sent then.
        """
        if self._planned:
            features = prepare_features(
                to_keyed_jagged_tensor(features),
                self._embedding_bag_configs,
                is_weighted=self._is_weighted,
            )
        # TorchRec warns of ids outside of num_embeddings in the first batch. Ours may be any.
        with self._without_our_configs():
            return super().input_dist(ctx, features)

    def update_shards(
        self,
        changed_sharding_params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None,
    ) -> None:
        """TorchRec's dynamic resharding.

        Raises:
            ValueError: the collection holds tables of ours.
        """
        if self._planned:
            raise ValueError(
                f"Tables {sorted(self._planned)} are served by backends and can't be resharded "
                "while training: only collections of stock tables can."
            )
        super().update_shards(changed_sharding_params, env, device)

    def reset_parameters(self) -> None:
        """Initialises the stock tables. Rows of ours are initialised when they come."""
        with self._without_our_configs():
            super().reset_parameters()

    @contextlib.contextmanager
    def _without_our_configs(self) -> Iterator[None]:
        """Hides the tables of ours from code of the base class that takes all tables for stock."""
        configs = self._embedding_bag_configs
        self._embedding_bag_configs = [
            config for config in configs if config.name not in self._planned
        ]
        try:
            yield
        finally:
            self._embedding_bag_configs = configs

    @property
    def has_backends(self) -> bool:
        """Whether backends serve tables of the collection, on whatever rank."""
        return bool(self._planned)

    def group_lookups(self) -> dict[str, GroupLookup]:
        """The lookup of each table of ours that this rank holds, by table name."""
        return {
            table.name: kernel.emb_module
            for lookup in self._lookups
            for kernel in lookup.modules()
            if isinstance(kernel, BackendEmbeddingBag)
            for table in kernel.config.embedding_tables
        }

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        super()._initialize_torch_state(skip_registering)
        device = self._device or torch.device("cpu")
        self._table_states: dict[str, TableState] = {}
        for name, table in self._planned.items():
            # A rank without a shard has no kernel that would have registered the parameter.
            if not hasattr(self.embedding_bags[name], "weight"):
                shard = table.shards[0]
                self.embedding_bags[name].register_parameter(
                    "weight", placeholder(shard.dim, shard.dtype, device)
                )
            self._table_states[name] = TableState.of(
                registry.get(table.backend), table.sharding, table.shards, table.optimizer
            )
        if not skip_registering:
            self._register_state_dict_hook(_export_tables)

    @staticmethod
    def _pre_load_state_dict_hook(
        self: BackendEmbeddingBagCollection,
        state_dict: dict[str, Any],
        prefix: str,
        *args: Any,
    ) -> None:
        # nn.Module passes (local_metadata, strict, missing_keys, unexpected_keys, error_msgs).
        _load_tables(self, state_dict, prefix, missing_keys=args[2] if len(args) > 2 else [])
        ShardedEmbeddingBagCollection._pre_load_state_dict_hook(self, state_dict, prefix, *args)


def _export_tables(
    module: BackendEmbeddingBagCollection,
    destination: dict[str, Any],
    prefix: str,
    _local_metadata: dict[str, Any],
) -> None:
    lookups = module.group_lookups()
    for name, state in module._table_states.items():
        exported = lookups[name].export_table(name) if name in lookups else None
        destination.pop(f"{prefix}embedding_bags.{name}.weight", None)
        for key, tensor in state.sharded_tensors(dist.get_rank(), exported).items():
            destination[f"{prefix}embedding_bags.{name}.{key}"] = tensor


def _load_tables(
    module: BackendEmbeddingBagCollection,
    state_dict: dict[str, Any],
    prefix: str,
    missing_keys: list[str],
) -> None:
    """Takes the tables of ours out of a state dict and loads them, all checked before the first."""
    loads: list[tuple[str, dict[str, torch.Tensor] | None]] = []
    taken: list[str] = []
    for name, state in module._table_states.items():
        table_prefix = f"{prefix}embedding_bags.{name}."
        present = {key: f"{table_prefix}{key}" for key in state.keys}
        present = {key: path for key, path in present.items() if path in state_dict}
        taken.extend(present.values())
        if not module._is_built:
            # TorchRec copies the rows of the unsharded module here; ours start empty.
            continue
        if present:
            tensors = {key: state_dict[path] for key, path in present.items()}
            loads.append((name, state.local_state(dist.get_rank(), tensors)))
        else:
            missing_keys.extend(f"{table_prefix}{key}" for key in state.keys)
    lookups = module.group_lookups()
    for name, local in loads:
        if local is not None:
            lookups[name].load_table(name, local)
    for path in taken:
        del state_dict[path]
    # The placeholder is not in a state dict; nn.Module would miss it.
    for name in module._table_states:
        parameter = module.embedding_bags[name].weight
        state_dict[f"{prefix}embedding_bags.{name}.weight"] = parameter.detach()
