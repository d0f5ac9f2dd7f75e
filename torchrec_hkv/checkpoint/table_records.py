"""Entries of tables in a checkpoint's record, and the check that they match a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torchrec_hkv.backends import registry
from torchrec_hkv.backends.save_types import SavedFolder
from torchrec_hkv.checkpoint.record import TableRecord, TableShardRecord, shard_folder
from torchrec_hkv.sharding.modules.collection import ShardedTable


def _record_of(table: ShardedTable, shards: Sequence[TableShardRecord] | None) -> TableRecord:
    """The entry of a table in a checkpoint's record; the same on every rank."""
    backend = registry.get(table.planned.backend)
    first = table.state.shards[0]
    identity = backend.identity(first, table.planned.optimizer)
    return TableRecord(table.planned.backend, identity, shards)


def records_of(
    tables: Mapping[str, ShardedTable], saved: Mapping[str, SavedFolder]
) -> dict[str, TableRecord]:
    """The entries of tables in a checkpoint's record.

    Args:
        tables: the tables of the model.
        saved: the results of :func:`saved_folders` of all ranks.
    """
    records = {}
    for key, table in tables.items():
        shards = None
        if table.has_files:
            shards = []
            for index, shard in enumerate(table.state.shards):
                name = shard_folder(key, index)
                columns = (shard.column_offset, shard.column_offset + shard.dim)
                folder = saved[name]
                shards.append(
                    TableShardRecord(
                        name, table.state.owners(shard), columns, folder.entries, folder.crc32
                    )
                )
        records[key] = _record_of(table, shards)
    return records


def check_tables(
    folder: Path, records: Mapping[str, TableRecord], tables: Mapping[str, ShardedTable]
) -> None:
    """Checks that the tables of a model match those of a checkpoint.

    Raises:
        ValueError: a table does not match; the message names the table, what is saved and what is
            needed.
    """
    for key, table in tables.items():
        here = _record_of(table, None)
        saved = records.get(key)
        if saved is None:
            if table.has_files:
                raise ValueError(
                    f"The checkpoint {folder} has no table {key!r} of backend {here.backend!r}: it "
                    f"has {sorted(records)}."
                )
            continue
        if saved.backend != here.backend:
            raise ValueError(
                f"In the checkpoint {folder}, table {key!r} is of backend {saved.backend!r}, "
                f"but in the model of {here.backend!r}: convert it with "
                "torchrec_hkv.checkpoint.export_rows and import_rows."
            )
        backend = registry.get(here.backend)
        for what, expected in here.identity.items():
            if not backend.loads(what, saved.identity.get(what), expected):
                raise ValueError(
                    f"In the checkpoint {folder}, table {key!r} has {what} "
                    f"{saved.identity.get(what)!r}, but in the model {expected!r}."
                )
        if (saved.shards is None) == table.has_files:
            kinds = ["by row number, as in a dense table", "by id"]
            there, here_ = kinds if saved.shards is None else reversed(kinds)
            raise ValueError(
                f"In the checkpoint {folder}, table {key!r} has its rows {there}, but in "
                f"the model {here_}: convert it with torchrec_hkv.checkpoint.export_rows and "
                "import_rows."
            )
