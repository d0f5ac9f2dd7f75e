"""Finds the tables in what a user has: a model, a module, a table."""

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
from torchrec_hkv.sharding.collection import BackendCollection

#: Fields of a TableMetrics that the device counts, in its order, and those that the host knows.
DEVICE_FIELDS = DEVICE_COUNTS
HOST_FIELDS = tuple(field.name for field in dataclasses.fields(TableMetrics))[len(DEVICE_FIELDS) :]

Source = nn.Module | HashTable


@dataclasses.dataclass(frozen=True)
class Probe:
    """Tables that are counted together.

    Attributes:
        names: of the tables.
        counts: gives int64 ``[tables, 12]``, in the order of :data:`DEVICE_FIELDS`; on a GPU
            without a wait, where the backend can.
        sizes: gives for each table what :data:`HOST_FIELDS` are.
    """

    names: tuple[str, ...]
    counts: Callable[[], Tensor]
    sizes: Callable[[], list[list[int]]]


def probes_of(source: Source) -> list[Probe]:
    """Those of all tables of this package in a model; what this rank holds of them.

    Raises:
        TypeError: it is something else.
        ValueError: it has no tables, or two of one name.
    """
    if isinstance(source, HashTable):
        return [_group_probe(["table"], source.group)]
    if not isinstance(source, nn.Module):
        raise TypeError(
            f"Metrics are of a model, a module of torchrec_hkv.nn or a HashTable, but were asked "
            f"of a {type(source).__name__}."
        )
    probes = []
    for path, module in source.named_modules():
        if isinstance(module, TableModule):
            prefix = f"{path}." if path else ""
            names = [f"{prefix}{name}" for name in module.table_names]
            probes.append(_module_probe(names, module))
        elif isinstance(module, BackendCollection):
            by_lookup: dict[GroupLookup, list[str]] = {}
            for name, lookup in module.group_lookups().items():
                by_lookup.setdefault(lookup, []).append(name)
            probes += [_lookup_probe(lookup, names) for lookup, names in by_lookup.items()]
    names = [name for probe in probes for name in probe.names]
    if len(set(names)) < len(names):
        raise ValueError(f"Two tables have the same name: {', '.join(sorted(names))}.")
    return probes


def _group_probe(names: Sequence[str], group: TableGroup) -> Probe:
    return Probe(tuple(names), group.device_counters, lambda: _group_sizes(group))


def _module_probe(names: Sequence[str], module: TableModule) -> Probe:
    # Its group is another one after it was moved or given to an optimizer.
    return Probe(
        tuple(names), lambda: module.group.device_counters(), lambda: _group_sizes(module.group)
    )


def _group_sizes(group: TableGroup) -> list[list[int]]:
    return [
        [group.full_slots(table), group.hbm_bytes(table), group.host_bytes(table)]
        for table in range(len(group.tables))
    ]


def _lookup_probe(lookup: GroupLookup, names: Sequence[str]) -> Probe:
    def counts() -> Tensor:
        given = lookup.device_counters()
        if given is None:
            rows = [lookup.counters(name) for name in names]
            return torch.tensor([[row.get(name, 0) for name in DEVICE_FIELDS] for row in rows])
        order = [list(given[0]).index(name) for name in names]
        return torch.stack([given[1][at] for at in order])

    def sizes() -> list[list[int]]:
        memory = [lookup.memory(name) for name in names]
        return [
            [lookup.capacity(name), part.hbm, part.host]
            for name, part in zip(names, memory, strict=True)
        ]

    return Probe(tuple(names), counts, sizes)
