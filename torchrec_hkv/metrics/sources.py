"""Finds the tables in a model, a module or a hash table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torchrec_hkv.backends.protocol import GroupLookup
from torchrec_hkv.hash_table import HashTable, TableGroup
from torchrec_hkv.hash_table.groups.counters import DEVICE_COUNTS
from torchrec_hkv.metrics.table_metrics import TableMetrics
from torchrec_hkv.nn.table_module import TableModule
from torchrec_hkv.sharding.modules.collection import BackendCollection
from torchrec_hkv.sharding.state.names import joined, named_modules

#: Fields of TableMetrics that are counted on the device, in the order of its counters; the fields
#: after them are known on the host.
DEVICE_FIELDS = DEVICE_COUNTS
HOST_FIELDS = tuple(field.name for field in dataclasses.fields(TableMetrics))[len(DEVICE_FIELDS) :]

Source = nn.Module | HashTable


@dataclasses.dataclass(frozen=True)
class Probe:
    """Tables whose counters are read together.

    Attributes:
        names: full names of the tables.
        counts: returns int64 ``[tables, 20]``, in the order of :data:`DEVICE_FIELDS`; does not
            synchronize with a GPU if the backend supports that.
        sizes: returns the values of :data:`HOST_FIELDS` for each table.
    """

    names: tuple[str, ...]
    counts: Callable[[], Tensor]
    sizes: Callable[[], list[list[int]]]


def probes_of(source: Source) -> list[Probe]:
    """The probes of all tables of this package in a model, for the shards on this rank.

    Raises:
        TypeError: ``source`` has another type.
    """
    if isinstance(source, HashTable):
        return [_group_probe(["table"], source.group)]
    if not isinstance(source, nn.Module):
        raise TypeError(
            f"Metrics need a model, a module of torchrec_hkv.nn or a HashTable, but the source is "
            f"a {type(source).__name__}."
        )
    probes = []
    for path, module in named_modules(source):
        if isinstance(module, TableModule):
            names = [joined(path, name) for name in module.table_names]
            probes.append(_module_probe(names, module))
        elif isinstance(module, BackendCollection):
            by_lookup: dict[GroupLookup, list[str]] = {}
            for key, lookup in module.group_lookups().items():
                by_lookup.setdefault(lookup, []).append(key)
            prefix = joined(path, module.tables_attribute)
            probes += [_lookup_probe(lookup, prefix, keys) for lookup, keys in by_lookup.items()]
    return probes


def _group_probe(names: Sequence[str], group: TableGroup) -> Probe:
    return Probe(tuple(names), group.device_counters, lambda: _group_sizes(group))


def _module_probe(names: Sequence[str], module: TableModule) -> Probe:
    # The module replaces its group when it is moved or attached to an optimizer.
    return Probe(
        tuple(names), lambda: module.group.device_counters(), lambda: _group_sizes(module.group)
    )


def _group_sizes(group: TableGroup) -> list[list[int]]:
    return [
        [group.full_slots(table), group.hbm_bytes(table), group.host_bytes(table)]
        for table in range(len(group.tables))
    ]


def _lookup_probe(lookup: GroupLookup, prefix: str, keys: Sequence[str]) -> Probe:
    def counts() -> Tensor:
        counters = lookup.device_counters()
        if counters is None:
            rows = [lookup.counters(key) for key in keys]
            return torch.tensor([[row.get(name, 0) for name in DEVICE_FIELDS] for row in rows])
        rows = torch.stack([counters.values[list(counters.keys).index(key)] for key in keys])
        if tuple(counters.names) == DEVICE_FIELDS:
            return rows
        columns = dict(zip(counters.names, rows.unbind(1), strict=True))
        none = torch.zeros_like(rows[:, 0])
        return torch.stack([columns.get(name, none) for name in DEVICE_FIELDS], dim=1)

    def sizes() -> list[list[int]]:
        memory = [lookup.memory(key) for key in keys]
        return [
            [lookup.capacity(key), part.hbm, part.host]
            for key, part in zip(keys, memory, strict=True)
        ]

    return Probe(tuple(joined(prefix, key) for key in keys), counts, sizes)
