"""Checks that a model has the tables that constraints name, where backends can serve them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints as StockParameterConstraints
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.types import ModuleSharder

from torchrec_hkv.planner.constraints import KernelChoice
from torchrec_hkv.sharding.modules.sharders import BACKEND_SHARDERS
from torchrec_hkv.sharding.tables import check_config, table_configs
from torchrec_hkv.sharding.validation import check_sharding_type


def check_model(
    module: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    choices: Mapping[str, KernelChoice],
    constraints: Mapping[str, StockParameterConstraints],
) -> None:
    """Raises if the model lacks a constrained table, or a backend can't serve it there.

    Args:
        module: the model.
        sharders: the sharders of its modules.
        choices: what the constraints leave open, by table.
        constraints: the constraints, by table.

    Raises:
        ValueError: a constraint names no table of the model, or a backend can't serve the table.
    """
    by_type = {sharder_name(sharder.module_type): sharder for sharder in sharders}
    found: set[str] = set()
    tables: set[str] = set()
    pending = [("", module)]
    while pending:
        path, child = pending.pop()
        sharder = by_type.get(sharder_name(type(child)))
        if sharder is None:
            prefix = f"{path}." if path else ""
            pending.extend((prefix + name, m) for name, m in child.named_children())
            continue
        for table in sharder.shardable_parameters(child):
            tables.add(table)
            if table in choices:
                found.add(table)
                _check_table(table, choices[table], constraints.get(table), path, child, sharder)
    backend_tables = {table for table, choice in choices.items() if choice.backends}
    missing = sorted(backend_tables - found)
    if missing:
        raise ValueError(
            f"Constraints choose a backend for tables {missing}, but the model has no tables "
            f"of these names: its tables are {sorted(tables)}. Use the name in the table's "
            "config; a constraint applies to every table of that name."
        )


def _check_table(
    table: str,
    choice: KernelChoice,
    constraint: StockParameterConstraints | None,
    path: str,
    module: nn.Module,
    sharder: ModuleSharder[nn.Module],
) -> None:
    backends = choice.backends
    if isinstance(sharder, BACKEND_SHARDERS):
        check_config(table_configs(module)[table])
        if choice.is_settled and constraint is not None and constraint.sharding_types:
            check_sharding_type(table, backends[0], constraint.sharding_types, sharder.module_type)
    elif not choice.has_stock:
        raise ValueError(
            f"Table {table!r} is constrained to backend {backends[0]!r} and belongs to "
            f"{type(module).__name__} {path!r}, sharded by {type(sharder).__name__}: backends "
            "serve tables of EmbeddingBagCollections, FeatureProcessedEmbeddingBagCollections "
            "and EmbeddingCollections, sharded by those of "
            "torchrec_hkv.get_default_sharders()."
        )
