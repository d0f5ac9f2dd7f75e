"""Moves the tables of a model to another sharding plan on the same ranks, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.types import ParameterSharding, ShardingPlan, ShardingType

from torchrec_hkv.backends import registry
from torchrec_hkv.checkpoint.agreement import agreed
from torchrec_hkv.checkpoint.learning_rates import learning_rates, put_learning_rates
from torchrec_hkv.checkpoint.table_transfer import (
    RankTransfer,
    move_entries,
    move_state,
    move_tensors,
)
from torchrec_hkv.collective import on_every_rank
from torchrec_hkv.progress import reported
from torchrec_hkv.sharding.kernels.optimizer_steps import optimizer_steps, set_optimizer_steps
from torchrec_hkv.sharding.modules.collection import (
    BackendCollection,
    ShardedTable,
    skip_file_tables,
)
from torchrec_hkv.sharding.modules.open_lookups import collect_open_lookups
from torchrec_hkv.sharding.state.names import joined, named_modules


def reshard(
    model: DistributedModelParallel, plan: ShardingPlan, *, allow_loss: bool = False
) -> int:
    """Moves tables to another sharding plan on the same ranks, without a disk; a collective call.

    Keeps rows, optimizer states, scores, steps and counts of hash tables, the values of all other
    tables of the collections, and learning rates. Collections whose plan is the same are not
    touched. While the tables of a collection move, the collection exists twice in memory.

    The modules of the collections and ``model.fused_optimizer`` are new objects afterwards. Create
    schedulers, combined optimizers, train pipelines and each ``Watch`` again from them.

    Args:
        model: a model that this package's sharders sharded.
        plan: a plan of the same tables with the same backends and options, such as another
            ``collective_plan`` of the unsharded model.
        allow_loss: whether ids of the lowest scores may be left out if the new shards of a full
            hash table have no slot for them.

    Returns:
        Number of entries of hash tables that found no slot; each column shard counts.

    Raises:
        ValueError: the plan has other tables, backends or options, a table can't move, or ids
            found no slot. The model is unchanged then.
    """
    changed: dict[str, BackendCollection] = {}

    def arguments() -> dict[str, Any]:
        if not isinstance(model, DistributedModelParallel):
            raise ValueError(
                f"The model is a {type(model).__name__}, but must be a DistributedModelParallel."
            )
        if isinstance(model, DMPCollection):
            raise ValueError(
                "The model is a DMPCollection, whose groups of ranks can't be resharded in memory: "
                "save it by torchrec_hkv.checkpoint.save and load it under the other plan."
            )
        changed.update(_changed(model, plan))
        return {
            "allow_loss": allow_loss,
            "the plan": {path: _described(plan.plan[path]) for path in changed},
        }

    agreed(arguments)
    for old in changed.values():
        collect_open_lookups(old.group_lookups().values())
    lost = 0
    new_collections: dict[str, BackendCollection] = {}
    with reported("Resharding"):
        for path, old in changed.items():
            new = new_collections[path] = old.recipe.make(plan.plan[path])
            new.train(old.training)
            lost += _move(path, old, new, allow_loss=allow_loss)
    for path, new in new_collections.items():
        _replace(model, path, new)
        model._plan.plan[path] = plan.plan[path]
    if new_collections:
        model._optim = model._init_optim(model.module)
    return lost


def _changed(model: DistributedModelParallel, plan: ShardingPlan) -> dict[str, BackendCollection]:
    """The collections whose plan changes, by their paths in the unsharded model."""
    found = {
        path: module
        for path, module in named_modules(model)
        if isinstance(module, BackendCollection) and module.recipe is not None
    }
    unknown = sorted(set(plan.plan) - set(found))
    # Other modules that TorchRec shards stay as they are.
    missing = sorted(set(found) - set(plan.plan))
    if missing:
        raise ValueError(
            f"The plan has no module {missing[0]!r}: make it from the unsharded model; it has "
            f"{sorted(plan.plan)}."
        )
    for path in unknown:
        now = model._plan.plan.get(path)
        if now is None or _described(now) != _described(plan.plan[path]):
            raise ValueError(
                f"The plan shards module {path!r} in another way, but only collections that the "
                f"sharders of torchrec_hkv made can change: {sorted(found)}."
            )
    changed = {}
    for path, module in found.items():
        old, new = module.module_sharding_plan, plan.plan[path]
        if set(old) != set(new):
            raise ValueError(
                f"The plan of module {path!r} has tables {sorted(new)}, but the model has "
                f"{sorted(old)}."
            )
        if _described(old) != _described(new):
            for name in old:
                _check_kernels(joined(path, name), old[name], new[name])
            changed[path] = module
    return changed


def _check_kernels(table: str, old: ParameterSharding, new: ParameterSharding) -> None:
    for what in ("backend", "options", "compute_kernel"):
        before, after = getattr(old, what, None), getattr(new, what, None)
        if before != after and (what != "compute_kernel" or hasattr(old, "backend")):
            raise ValueError(
                f"Table {table!r} has {what} {before!r}, but the plan says {after!r}: move its "
                "rows by torchrec_hkv.checkpoint.export_rows and import_rows."
            )
    if hasattr(old, "backend"):
        return
    types = {old.sharding_type, new.sharding_type}
    if ShardingType.DATA_PARALLEL.value in types and len(types) > 1:
        raise ValueError(
            f"Table {table!r} is sharded {old.sharding_type!r} and the plan says "
            f"{new.sharding_type!r}: a stock table can't change from or to data-parallel, "
            "because your optimizer then holds its weight."
        )


def _described(plan: Mapping[str, ParameterSharding]) -> dict[str, Any]:
    """A description of a plan's tables. Equal descriptions place tables alike."""
    return {
        name: (
            sharding.sharding_type,
            sharding.compute_kernel,
            getattr(sharding, "backend", None),
            None
            if sharding.sharding_spec is None
            else [
                (*shard.shard_offsets, *shard.shard_sizes, str(shard.placement))
                for shard in sharding.sharding_spec.shards
            ],
        )
        for name, sharding in plan.items()
    }


def _move(path: str, old: BackendCollection, new: BackendCollection, *, allow_loss: bool) -> int:
    """Moves the contents of a collection to another one. Returns the number of ids that found no
    slot."""
    wire = RankTransfer.of(old)
    before, after = old.sharded_tables(), new.sharded_tables()
    lost = 0
    heads: dict[Any, dict[str, Tensor]] = {}
    for name, table in before.items():
        if registry.get(table.planned.backend).is_dense(table.state.shards[0].options):
            continue
        target = after[name]
        if table.state.layout is not None:
            lost += move_entries(table, target, wire, heads, allow_loss=allow_loss)
        elif _same_geometry(table, target):
            move_state(table, target, wire)
        else:
            raise ValueError(
                f"Table {joined(path, name)!r} on backend {table.planned.backend!r} can only "
                "move as a whole: plan the number of shards that it has now."
            )
    for lookup, of_keys in heads.items():
        lookup.entries_loaded(of_keys)
    with skip_file_tables():
        move_tensors(_weights(old), _weights(new), wire)
    move_tensors(_states(old), _states(new), wire)
    rates = on_every_rank(lambda: learning_rates(old.fused_optimizer), wire.pg)
    put_learning_rates(new.fused_optimizer, {k: v for part in rates for k, v in part.items()})
    set_optimizer_steps(new, max(on_every_rank(lambda: optimizer_steps(old), wire.pg)))
    return lost


def _same_geometry(old: ShardedTable, new: ShardedTable) -> bool:
    def geometry(table: ShardedTable) -> list[tuple[int, ...]]:
        return sorted(
            (shard.row_offset, shard.capacity, shard.column_offset, shard.dim)
            for shard in table.state.shards
        )

    return geometry(old) == geometry(new)


def _weights(collection: BackendCollection) -> dict[str, Any]:
    """Values of stock tables, and of tables that appear as stock tables in the ``state_dict``."""
    backend_tables = {
        joined(collection.tables_attribute, name)
        for name, table in collection.sharded_tables().items()
        if not registry.get(table.planned.backend).is_dense(table.state.shards[0].options)
    }
    return {
        key: value
        for key, value in collection.state_dict().items()
        if not any(key.startswith(f"{name}.") for name in backend_tables)
    }


def _states(collection: BackendCollection) -> dict[str, Any]:
    """Optimizer states of these tables, by parameter and name of the state."""
    state = collection.fused_optimizer.state_dict()["state"]
    return {
        f"{parameter}/{name}": value
        for parameter, values in state.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def _replace(model: DistributedModelParallel, path: str, new: nn.Module) -> None:
    """Replaces the collection at a path of the unsharded model."""
    wrapped = model._dmp_wrapped_module
    if not path:
        if isinstance(wrapped, BackendCollection):
            model._dmp_wrapped_module = new
        else:
            wrapped.module = new
        return
    parent, _, name = path.rpartition(".")
    for found, module in named_modules(model):
        # A wrapper of dense parameters has the same path as the module that it wraps.
        if found == parent and name in module._modules:
            setattr(module, name, new)
            return
