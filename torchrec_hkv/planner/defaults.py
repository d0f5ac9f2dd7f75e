"""Defaults for constraints that are left open: environment variables and the batch size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints as StockParameterConstraints
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder, ShardingType

from torchrec_hkv import environment
from torchrec_hkv.backends import registry
from torchrec_hkv.planner.constraints import ParameterConstraints

_DEFAULT = "DEFAULT"
_PLACES = {"cuda": False, "hbm": False, "cpu": True, "host": True}
_ON_HOST = {
    EmbeddingComputeKernel.FUSED.value: EmbeddingComputeKernel.FUSED_UVM.value,
    EmbeddingComputeKernel.FUSED_UVM_CACHING.value: EmbeddingComputeKernel.FUSED_UVM.value,
}


def completed(
    constraints: Mapping[str, StockParameterConstraints] | None,
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    batch_size: int,
    compute_device: str,
    shard_by_batch_size: bool,
) -> dict[str, StockParameterConstraints]:
    """Completes the constraints of a model's tables.

    Args:
        constraints: constraints by table name.
        module: the model.
        sharders: the sharders, which determine the tables.
        batch_size: batch size of a rank.
        compute_device: device type of the topology.
        shard_by_batch_size: whether a table with an open sharding type is replicated if it has at
            most as many rows as the batch has samples, and sharded otherwise.

    Raises:
        ValueError: an environment variable has an invalid value, or names a missing table.
    """
    found = dict(constraints or {})
    backends = environment.by_table("EMB_BACKEND")
    places = environment.by_table("EMB_DEVICE")
    rows = _tables(module, sharders)
    for name, said in (("EMB_BACKEND", backends), ("EMB_DEVICE", places)):
        unknown = sorted(set(said) - set(rows) - {""})
        if unknown:
            raise ValueError(
                f"{environment.PREFIX}{name} names tables {unknown}, but the model has "
                f"{sorted(rows)}."
            )
    for table, count in rows.items():
        constraint = found.get(table)
        changed = ParameterConstraints() if constraint is None else constraint
        backend = backends.get(table, backends.get("", _DEFAULT))
        if backend != _DEFAULT and not changed.compute_kernels:
            changed = dataclasses.replace(changed, compute_kernels=[backend])
        place = places.get(table, places.get(""))
        if place is not None:
            changed = _placed(table, changed, place, compute_device)
        if shard_by_batch_size:
            changed = _replicated(changed, count <= batch_size)
        if changed != (constraint or ParameterConstraints()):
            found[table] = changed
    return found


def _tables(module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]) -> dict[str, int]:
    """Number of rows of each table that the sharders shard."""
    by_type = {sharder_name(sharder.module_type): sharder for sharder in sharders}
    found: dict[str, int] = {}
    pending = [module]
    while pending:
        child = pending.pop()
        sharder = by_type.get(sharder_name(type(child)))
        if sharder is None:
            pending.extend(child.children())
            continue
        for name, parameter in sharder.shardable_parameters(child).items():
            found[name] = parameter.shape[0]
    return found


def _placed(
    table: str, constraint: StockParameterConstraints, place: str, compute_device: str
) -> StockParameterConstraints:
    if place not in _PLACES:
        raise ValueError(
            f"{environment.PREFIX}EMB_DEVICE has {place!r} for table {table!r}, but must have one "
            f"of {list(_PLACES)}."
        )
    if not _PLACES[place] or compute_device == "cpu":
        return constraint  # on a CPU all tables are in host memory
    kernels = constraint.compute_kernels or [EmbeddingComputeKernel.FUSED.value]
    changed = dataclasses.replace(
        constraint, compute_kernels=[_ON_HOST.get(kernel, kernel) for kernel in kernels]
    )
    names = [kernel for kernel in kernels if kernel in registry.names()]
    if not names:
        return changed
    user_options = getattr(constraint, "options", None)
    user_options = (
        ()
        if user_options is None
        else user_options
        if isinstance(user_options, tuple)
        else (user_options,)
    )
    options = []
    for name in names:
        backend = registry.get(name)
        of_backend = [one for one in user_options if isinstance(one, backend.options_type)]
        options += [backend.on_host(one) for one in of_backend or [backend.options_type()]]
    return dataclasses.replace(_converted(changed), options=tuple(dict.fromkeys(options)))


def _replicated(constraint: StockParameterConstraints, is_small: bool) -> StockParameterConstraints:
    kernels = constraint.compute_kernels
    if constraint.sharding_types or (kernels and set(kernels) & set(registry.names())):
        return constraint
    replicated = ShardingType.DATA_PARALLEL.value
    if is_small:
        return dataclasses.replace(constraint, sharding_types=[replicated], compute_kernels=None)
    offered = (
        ShardingType.TABLE_WISE,
        ShardingType.COLUMN_WISE,
        ShardingType.TABLE_COLUMN_WISE,
        ShardingType.ROW_WISE,
        ShardingType.TABLE_ROW_WISE,
    )
    return dataclasses.replace(constraint, sharding_types=[kind.value for kind in offered])


def _converted(constraint: StockParameterConstraints) -> ParameterConstraints:
    if isinstance(constraint, ParameterConstraints):
        return constraint
    fields = dataclasses.fields(StockParameterConstraints)
    return ParameterConstraints(**{one.name: getattr(constraint, one.name) for one in fields})
