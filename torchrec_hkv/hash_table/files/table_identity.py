"""What identifies a saved table: its spec, without what may differ when it is loaded."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch

from torchrec_hkv import _C
from torchrec_hkv.hash_table.eviction import name_of, policy_of
from torchrec_hkv.hash_table.files.manifest import Manifest
from torchrec_hkv.hash_table.groups.table_group import TableGroup
from torchrec_hkv.hash_table.initializers import initializer_from_fields
from torchrec_hkv.hash_table.table_spec import TableSpec

# Fields of a spec that may differ between a table and its file.
_FREE_FIELDS = (
    "capacity",
    "initial_capacity",
    "hbm_bytes",
    "admission",
    "expire_after",
    "strict",
    "remember_evicted",
    "restore_counts",
    "deterministic",
)


def describe(group: TableGroup, table: int) -> dict[str, Any]:
    """Properties that identify a table, as JSON values: its spec without capacity and memory."""
    spec = group.tables[table]
    names = [field.name for field in dataclasses.fields(spec) if field.name not in _FREE_FIELDS]
    description = {name: _plain(getattr(spec, name)) for name in names}
    description["eviction"] = name_of(spec.eviction)
    return {**description, "state_dim": _C.table_layout(group.handle, table)[2]}


def saved_spec(path: str | os.PathLike[str]) -> tuple[TableSpec, int]:
    """The spec of a saved table, and the width of its states.

    Raises:
        ValueError: there is no saved table, or it is damaged.
    """
    manifest = Manifest.read(Path(path))
    fields = dict(manifest.table)
    state_dim = fields.pop("state_dim")
    fields["dtype"] = getattr(torch, fields["dtype"])
    fields["eviction"] = policy_of(fields["eviction"])
    if fields["initializer"] is not None:
        fields["initializer"] = initializer_from_fields(fields["initializer"])
    sizes = {"capacity": manifest.capacity, "initial_capacity": manifest.initial_capacity}
    return TableSpec(**fields, **sizes), state_dim


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if dataclasses.is_dataclass(value):
        return {"type": type(value).__name__, **dataclasses.asdict(value)}
    return value
