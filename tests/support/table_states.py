"""The whole contents of tables by slot, for bitwise comparisons."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from torchrec_hkv.hash_table import TableGroup
from torchrec_hkv.hash_table.admission import admission_bytes

#: Counters of where rows were; on a GPU with rows in host memory, these may differ.
_OF_PLACES = ("fetched", "written_back", "host_hits")


def states_of(group: TableGroup) -> list[dict[str, Tensor]]:
    """Returns each table's contents and counts of ids that are not admitted, on the CPU."""
    tables = []
    for table, spec in enumerate(group.tables):
        state = group.export_table(table)
        tables.append({f.name: getattr(state, f.name).cpu() for f in dataclasses.fields(state)})
        if spec.admission is not None:
            n = admission_bytes(spec.admission)
            tables[-1]["admission"] = group.read_admission(table, 0, n).cpu()
    return tables


def counters_of(group: TableGroup) -> list[dict[str, int]]:
    """Returns each table's counters, without those of where rows were."""
    return [
        {name: count for name, count in table.items() if name not in _OF_PLACES}
        for table in group.counters()
    ]


def assert_same_states(group: TableGroup, other: TableGroup, where: object = "") -> None:
    """Fails if two groups differ in a bit or a counter."""
    assert counters_of(group) == counters_of(other), where
    for table, (actual, expected) in enumerate(
        zip(states_of(group), states_of(other), strict=True)
    ):
        assert actual.keys() == expected.keys()
        for name in actual:
            assert torch.equal(actual[name], expected[name]), (where, table, name)
