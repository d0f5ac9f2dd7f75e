"""Checks, before anything changes, that saved shards belong to a table and cover it."""

from __future__ import annotations

from collections.abc import Sequence

from torchrec_hkv import _C
from torchrec_hkv.hash_table.eviction import can_load_policy
from torchrec_hkv.hash_table.files.saved_part import SavedPart
from torchrec_hkv.hash_table.files.state_columns import ColumnRange
from torchrec_hkv.hash_table.files.table_identity import describe
from torchrec_hkv.hash_table.groups.table_group import TableGroup

# Properties in which shards of the same table may differ, and the initializer of later rows, whose
# default depends on the table's size.
_MAY_DIFFER = ("dim", "column_offset", "state_dim", "initializer")


def check_same_table(group: TableGroup, table: int, parts: Sequence[SavedPart]) -> None:
    """Checks that saved shards are of a table of a group, with the states of its optimizer.

    Raises:
        ValueError: a shard is of another table or optimizer.
    """
    here = describe(group, table)
    for part in parts:
        for what in (*here, *part.manifest.table):
            saved, expected = part.manifest.table.get(what), here.get(what)
            if what == "eviction" and can_load_policy(expected, saved):
                continue
            if what not in _MAY_DIFFER and saved != expected:
                raise ValueError(
                    f"{part.folder} is of another table: its {what} is {saved!r}, but that of "
                    f"table {here['name']!r} is {expected!r}."
                )
        if not part.has_no_optimizer:
            _check_optimizer(group, here["name"], part)


def _check_optimizer(group: TableGroup, name: str, part: SavedPart) -> None:
    saved, expected = part.manifest.state_layout, group.state_layout
    if saved != expected:
        raise ValueError(
            f"{part.folder} has optimizer states of layout {saved}, but table {name!r} is trained "
            f"by {group.optimizer}, whose states have layout {expected}."
        )
    width = part.manifest.table["state_dim"]
    needed = _C.OptimizerConfig(kind=_C.Optimizer.NONE)
    if group.optimizer is not None:
        needed = group.optimizer.config()
    if width != needed.state_width(part.manifest.table["dim"]):
        raise ValueError(
            f"{part.folder} has states of {width} values for rows of {part.manifest.table['dim']}, "
            f"which do not match {group.optimizer}."
        )


def check_covered(
    name: str,
    columns: ColumnRange,
    owners: tuple[int, int],
    by_columns: Sequence[tuple[ColumnRange, Sequence[SavedPart]]],
) -> None:
    """Checks that saved shards cover every column and owner bucket of a table.

    Args:
        name: the table's name, for the message.
        columns: the table's columns.
        owners: range ``[first, end)`` of the table's owner buckets.
        by_columns: the saved shards by columns, sorted by first column and owner bucket.

    Raises:
        ValueError: a column or an owner bucket is missing.
    """
    column = columns.begin
    for saved, parts in by_columns:
        owner = owners[0]
        for part in parts:
            if part.owners[0] > owner:
                break
            owner = part.owners[1]
        if saved.begin > column or owner < owners[1]:
            break
        column = saved.end
    if column < columns.end:
        raise ValueError(
            f"table {name!r}: the checkpoint does not hold all of its columns {columns.begin} to "
            f"{columns.end} for its owner buckets {owners[0]} to {owners[1]}."
        )
