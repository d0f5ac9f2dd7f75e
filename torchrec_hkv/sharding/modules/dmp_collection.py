"""2D parallelism: each group of ranks holds a replica of the model; replicas are synced at
times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.remote_device import _remote_device
from torchrec.distributed import model_parallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import (
    DMPCollectionConfig,
    DMPCollectionContext,
    ModuleSharder,
    ShardingEnv2D,
    ShardingPlan,
    ShardingStrategy,
    ShardingType,
)

from torchrec_hkv.backends.protocol import GroupLookup
from torchrec_hkv.backends.replicas import ReplicaSync, Synced
from torchrec_hkv.compat import replica_group
from torchrec_hkv.sharding.modules.sharders import get_default_sharders
from torchrec_hkv.sharding.state.names import named_collections
from torchrec_hkv.sharding.validation import replicas_synced


class DMPCollection(model_parallel.DMPCollection):
    """TorchRec's ``DMPCollection`` for tables of any backend, with the same arguments.

    ``sync()`` averages stock and Tensor-Train tables as TorchRec does, and merges rows of hash
    tables by id: it sends the ids that were touched since the last sync, not the whole table.
    ``docs/concepts/replicas.md`` has the rules.

    It also runs on CPUs, over gloo.

    Args:
        module: the model to shard.
        device: device of the rank.
        plan: plan for ``sharding_group_size`` ranks, the same on every rank. Its ranks are replaced
            by those of the group.
        world_size: number of all ranks.
        sharding_group_size: number of ranks of a group; it divides ``world_size``.
        global_pg: process group of all ranks.
        sharding_strategy: as in TorchRec; on a CPU without ``FULLY_SHARDED``.
        node_group_size: ranks that count as one host for node-aware sharding types.
        sharders: by default :func:`torchrec_hkv.get_default_sharders`.
        init_data_parallel: as in ``DistributedModelParallel``.
        init_parameters: as in ``DistributedModelParallel``.
        data_parallel_wrapper: as in ``DistributedModelParallel``.
        use_inter_host_allreduce: True: the ranks of a group are consecutive. False: the ranks that
            hold the same shard are consecutive.
        custom_all_reduce: averages tensors of stock tables over the replicas, in place.
        submodule_configs: plans and group sizes of modules of some types.
        rs_awaitable_hook_module: as in TorchRec.
        kwargs: further arguments of later versions of TorchRec.

    Raises:
        ValueError: ``sharding_group_size`` does not divide ``world_size``, or a table's backend
            can't sync replicas; on a CPU also for options that need a GPU.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        plan: ShardingPlan,
        world_size: int,
        sharding_group_size: int,
        global_pg: dist.ProcessGroup,
        sharding_strategy: ShardingStrategy = ShardingStrategy.DEFAULT,
        node_group_size: int | None = None,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: Any = None,
        use_inter_host_allreduce: bool = False,
        custom_all_reduce: Any = None,
        submodule_configs: list[DMPCollectionConfig] | None = None,
        rs_awaitable_hook_module: str | None = None,
        **kwargs: Any,
    ) -> None:
        configs = submodule_configs or ()
        for size in (sharding_group_size, *(config.sharding_group_size for config in configs)):
            if size < 1 or world_size % size:
                raise ValueError(
                    f"sharding_group_size is {size}, but must divide world_size, {world_size}."
                )
        sharders = get_default_sharders() if sharders is None else sharders
        options: dict[str, Any] = {
            "node_group_size": node_group_size,
            "sharders": sharders,
            "init_data_parallel": init_data_parallel,
            "init_parameters": init_parameters,
            "data_parallel_wrapper": data_parallel_wrapper,
            "use_inter_host_allreduce": use_inter_host_allreduce,
            "custom_all_reduce": custom_all_reduce,
            "submodule_configs": submodule_configs,
        }
        if device.type == "cpu":
            refused = {name: value for name, value in kwargs.items() if value}
            if rs_awaitable_hook_module is not None:
                refused["rs_awaitable_hook_module"] = rs_awaitable_hook_module
            for strategy in (sharding_strategy, *(config.sharding_strategy for config in configs)):
                if strategy == ShardingStrategy.FULLY_SHARDED:
                    refused["sharding_strategy"] = strategy
            for name, value in refused.items():
                raise ValueError(f"{name} is {value!r}, which needs a GPU: leave it out on a CPU.")
            kwargs = {}
        else:
            kwargs["rs_awaitable_hook_module"] = rs_awaitable_hook_module
        # On a GPU, TorchRec's constructor shards the model.
        build = self._build if device.type == "cpu" else super().__init__
        sizes = (world_size, sharding_group_size)
        with replicas_synced():
            build(
                module,
                device,
                plan,
                *sizes,
                global_pg,
                sharding_strategy,
                **options,
                **kwargs,
            )
        self._replica_syncs = list(self._make_syncs())
        self._last_sync = Synced()

    def _build(
        self,
        module: nn.Module,
        device: torch.device,
        plan: ShardingPlan,
        world_size: int,
        sharding_group_size: int,
        global_pg: dist.ProcessGroup,
        sharding_strategy: ShardingStrategy,
        *,
        node_group_size: int | None,
        sharders: list[ModuleSharder[nn.Module]],
        init_data_parallel: bool,
        init_parameters: bool,
        data_parallel_wrapper: Any,
        use_inter_host_allreduce: bool,
        custom_all_reduce: Any,
        submodule_configs: list[DMPCollectionConfig] | None,
    ) -> None:
        """Does the work of TorchRec's constructor, which refuses CPUs."""
        self._device, self._pg = device, global_pg
        self._global_rank = dist.get_rank(global_pg)
        self._custom_all_reduce = custom_all_reduce
        # An attribute of later versions of TorchRec.
        self._all_reduce_hook = None
        self._use_sharded_relay, self._sharded_relay_state = False, None
        self._sharder_map = {sharder.module_type: sharder for sharder in sharders}
        self._default_ctx = DMPCollectionContext(
            module=None,
            plan=plan,
            sharding_group_size=sharding_group_size,
            node_group_size=node_group_size,
            use_inter_host_allreduce=use_inter_host_allreduce,
            sharding_strategy=sharding_strategy,
        )
        self._submodule_ctxs = [
            DMPCollectionContext(
                module=config.module,
                plan=config.plan,
                sharding_group_size=config.sharding_group_size,
                use_inter_host_allreduce=config.use_inter_host_allreduce,
                sharding_strategy=config.sharding_strategy,
            )
            for config in submodule_configs or ()
        ]
        self._ctxs = [self._default_ctx, *self._submodule_ctxs]
        for context in self._ctxs:
            context.device_mesh, context.sharding_pg, context.replica_pg = (
                self._create_process_groups(
                    global_rank=self._global_rank,
                    world_size=world_size,
                    local_size=context.sharding_group_size,
                    use_inter_host_allreduce=context.use_inter_host_allreduce,
                )
            )
            self._remap_sharding_plan(
                plan=context.plan,
                rank=self._global_rank,
                step=world_size // context.sharding_group_size,
                sharding_group_size=context.sharding_group_size,
                use_inter_host_allreduce=context.use_inter_host_allreduce,
            )
            if context.module:
                context.sharded_module = self._sharder_map[context.module].sharded_module_type
        for context in self._submodule_ctxs:
            plan.plan.update(context.plan.plan)
        env = ShardingEnv2D(
            global_pg=global_pg,
            sharding_pg=self._default_ctx.sharding_pg,
            replica_pg=self._default_ctx.replica_pg,
            device_mesh=self._default_ctx.device_mesh,
            node_group_size=node_group_size,
            use_inter_host_allreduce=use_inter_host_allreduce,
            sharding_strategy=sharding_strategy,
        )
        DistributedModelParallel.__init__(
            self,
            module,
            env,
            device,
            plan,
            sharders,
            init_data_parallel,
            init_parameters,
            data_parallel_wrapper,
        )
        self._group_sharded_modules(self._ctxs)
        self._cache_sync_tensors(self._ctxs)

    def _remap_sharding_plan(self, plan: ShardingPlan, *args: Any, **kwargs: Any) -> None:
        super()._remap_sharding_plan(plan, *args, **kwargs)
        if self._device.type != "cpu":
            return
        for module_plan in plan.plan.values():
            for sharding in module_plan.values():
                for shard in getattr(sharding.sharding_spec, "shards", None) or ():
                    # TorchRec numbers devices, but there is only one CPU.
                    shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")

    def _make_syncs(self) -> Iterable[ReplicaSync]:
        """The syncs of this rank's tables on backends. Syncs of one class and one process group are
        joined, so that they share calls."""
        kinds: dict[tuple[type[ReplicaSync], dist.ProcessGroup], list[ReplicaSync]] = {}
        for sync, replicas in self._syncs_of_groups():
            kinds.setdefault((type(sync), replicas), []).append(sync)
        for (kind, _), syncs in kinds.items():
            yield from kind.joined(syncs)

    def _syncs_of_groups(self) -> Iterable[tuple[ReplicaSync, dist.ProcessGroup]]:
        """The sync of each group of tables, and the ranks that hold the same shards."""
        for _, collection in named_collections(self):
            lookups = collection.group_lookups()
            visited: set[GroupLookup] = set()
            for table in collection.sharded_tables().values():
                if table.planned.sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
                    continue  # all ranks hold it, and average its gradients
                for key in table.state.keys_on(dist.get_rank()):
                    if lookups[key] not in visited:
                        visited.add(lookups[key])
                        replicas = collection.replica_group
                        yield lookups[key].replica_sync(replicas), replicas

    def sync(self, include_optimizer_state: bool = True) -> None:
        """Merges the replicas; a collective call of all ranks.

        Call it after the backward of a step and before the next lookup in training.

        Args:
            include_optimizer_state: whether optimizer states are merged, too.

        Raises:
            RuntimeError: a backward is pending; nothing has changed then.
        """
        for sync in self._replica_syncs:
            sync.check()
        super().sync(include_optimizer_state)
        self._last_sync = sum(
            (sync.sync(include_optimizer_state) for sync in self._replica_syncs), Synced()
        )

    @property
    def last_sync(self) -> Synced:
        """The result of the last :meth:`sync` on this rank, for tables on backends."""
        return self._last_sync

    def _allreduce_tensors(
        self,
        place: Any,
        tensors_dict: dict[torch.dtype, list[torch.Tensor]],
        annotation: str,
        opts: Any = None,
    ) -> None:
        if self._device.type != "cpu" or self._custom_all_reduce is not None:
            super()._allreduce_tensors(place, tensors_dict, annotation, opts)
            return
        group = replica_group(place)  # gloo has sums, but no averages
        averages = opts is None or opts.reduceOp == dist.ReduceOp.AVG
        for tensors in tensors_dict.values():
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)
                if averages:
                    tensor /= dist.get_world_size(group)
