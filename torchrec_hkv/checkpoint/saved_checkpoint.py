"""Reads a checkpoint, a chain of deltas or a saved hash table without a model."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchrec_hkv.checkpoint.atomic_folder import AtomicFolder
from torchrec_hkv.checkpoint.chain import Chain, Link
from torchrec_hkv.checkpoint.layers import Layers, read_saved, saved_shards
from torchrec_hkv.hash_table.files.entries_reader import (
    collect_entries,
    count_owners,
    owner_ranges,
    read_entries,
)
from torchrec_hkv.hash_table.files.file_names import MANIFEST
from torchrec_hkv.hash_table.files.manifest import OWNERS, Manifest
from torchrec_hkv.hash_table.files.saved_part import SavedPart
from torchrec_hkv.hash_table.files.shard_files import dequantised_fields, entry_bytes
from torchrec_hkv.hash_table.initial_rows import initial_rows
from torchrec_hkv.hash_table.initializers import initializer_from_fields

#: Default memory limit of a command, in bytes.
BATCH_BYTES = 512 << 20


@dataclasses.dataclass(frozen=True)
class OpenedTable:
    """A table in a folder.

    Attributes:
        name: full name of the table; for a saved hash table, its own name.
        backend: name of the backend.
        identity: properties that a table must share to load it.
        parts: shards of the table; None if its values are among the tensors.
    """

    name: str
    backend: str
    identity: dict[str, Any]
    parts: tuple[SavedPart, ...] | None

    @property
    def first_columns(self) -> list[SavedPart]:
        """The shards that hold the first column. Together they hold each id once."""
        begin = min(part.columns.begin for part in self.parts or ())
        return [part for part in self.parts or () if part.columns.begin == begin]

    @property
    def entries(self) -> int:
        """Number of ids."""
        return sum(part.manifest.total_entries for part in self.first_columns)

    @property
    def dim(self) -> int:
        """Number of columns of a row."""
        return max(part.columns.end for part in self.parts or ())

    @property
    def bytes(self) -> int:
        """Size of the table's files."""
        return sum(
            (folder / name).stat().st_size
            for part in self.parts or ()
            for folder, manifest in part.layers
            for name in (*manifest.files, MANIFEST)
        )

    def entry_bytes(self) -> int:
        """Size of an entry with all of its columns."""
        by_columns = {
            part.columns: entry_bytes(dequantised_fields(part.fields)) for part in self.parts or ()
        }
        return sum(by_columns.values())

    def batches(self, names: Sequence[str], batch_bytes: int) -> Iterator[dict[str, Tensor]]:
        """Entries with whole rows, in bounded memory.

        Args:
            names: names of tensors besides ``ids``: ``rows``, ``states``, ``scores``,
                ``last_steps``. Tensors that the table lacks are left out, and so are the states of
                a table in column shards.
            batch_bytes: memory limit in bytes. One more byte is used for each slot of a table that
                is saved in deltas.

        Yields:
            Tensors by name, valid until the next iteration.
        """
        first = self.first_columns
        if all(part.columns.begin == 0 and part.columns.end == self.dim for part in first):
            for part in first:
                yield from read_entries(part, names, batch_bytes)
            return
        columns = [name for name in names if name != "states"]
        for owners in self.ranges(batch_bytes):
            yield self.collect(columns, batch_bytes, owners)

    def ranges(self, batch_bytes: int) -> list[tuple[int, int]]:
        """Ranges of owner buckets whose entries, and a copy of them, fit into memory."""
        counts = torch.zeros(OWNERS, dtype=torch.int64)
        for part in self.first_columns:
            counts += count_owners(part, batch_bytes)
        return owner_ranges(counts, batch_bytes // (4 * self.entry_bytes()))

    def collect(
        self, names: Sequence[str], batch_bytes: int, owners: tuple[int, int]
    ) -> dict[str, Tensor]:
        """All entries of some owner buckets, in ascending order of ids, with whole rows.

        If a column shard lacks an id, its columns have the initial row.
        """
        parts = self.first_columns
        pieces = [
            collect_entries(part, names, batch_bytes, owners)
            for part in parts
            if max(part.owners[0], owners[0]) < min(part.owners[1], owners[1])
        ]
        joined = {name: torch.cat([p[name] for p in pieces]) for name in pieces[0]}
        order = joined["ids"].argsort()
        joined = {name: tensor[order] for name, tensor in joined.items()}
        if "rows" not in names or parts[0].columns.end == self.dim:
            return joined
        rows = torch.zeros(len(order), self.dim, dtype=joined["rows"].dtype)
        rows[:, : parts[0].columns.end] = joined["rows"]
        for part in self.parts or ():
            if part.columns.begin == 0:
                continue
            beside = collect_entries(part, ["rows"], batch_bytes, owners)
            at = torch.searchsorted(joined["ids"], beside["ids"]).clamp(max=max(0, len(order) - 1))
            there = joined["ids"][at] == beside["ids"] if len(order) else at.bool()
            columns = slice(part.columns.begin, part.columns.end)
            rows[:, columns] = initial_rows_of(part, joined["ids"])
            rows[at[there], columns] = beside["rows"][there]
        return {**joined, "rows": rows}


def initial_rows_of(part: SavedPart, ids: Tensor) -> Tensor:
    table = part.manifest.table
    initializer_fields = table["initializer"]
    return initial_rows(
        ids,
        table["dim"],
        table=table["name"],
        seed=table["seed"],
        initializer=None
        if initializer_fields is None
        else initializer_from_fields(initializer_fields),
        column_offset=table["column_offset"],
    )


@dataclasses.dataclass(frozen=True)
class SavedCheckpoint:
    """The contents of a folder.

    Attributes:
        path: the path that was opened.
        kind: ``"checkpoint"``, ``"chain"``, or ``"table"`` for what ``HashTable.save`` wrote.
        layers: folders and records of a checkpoint or a chain; empty for a table.
        tables: tables by name.
    """

    path: Path
    kind: Literal["checkpoint", "chain", "table"]
    layers: Layers
    tables: dict[str, OpenedTable]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> SavedCheckpoint:
        """Opens a folder.

        Raises:
            ValueError: it is none of these kinds, or a file is damaged.
        """
        path = Path(path)
        if not path.is_dir() and not AtomicFolder(path).previous.is_dir():
            raise ValueError(f"There is no folder {path}.")
        if (path / MANIFEST).is_file():
            return cls._table(path)
        is_chain = Chain.at(path) is not None
        layers = read_saved(path)
        tables = {}
        for name, record in layers[0][1].tables.items():
            parts = None
            if record.shards is not None:
                parts = tuple(
                    SavedPart(
                        shard.folder,
                        shard.owners,
                        Manifest.read(shard.folder),
                        tuple((folder, Manifest.read(folder)) for folder in shard.earlier),
                    )
                    for shard in saved_shards(layers, name)
                )
            tables[name] = OpenedTable(name, record.backend, record.identity, parts)
        return cls(path, "chain" if is_chain else "checkpoint", layers, tables)

    @classmethod
    def _table(cls, path: Path) -> SavedCheckpoint:
        manifest = Manifest.read(path)
        part = SavedPart(path, (0, OWNERS), manifest)
        name = manifest.table["name"]
        return cls(path, "table", (), {name: OpenedTable(name, "hkv", manifest.table, (part,))})

    def table(self, name: str) -> OpenedTable:
        """A table by its full name, or by its own name if only one table has it.

        Raises:
            ValueError: there is no such table, or there are several.
        """
        if name in self.tables:
            return self.tables[name]
        found = [full for full in self.tables if full.rpartition(".")[2] == name]
        if len(found) == 1:
            return self.tables[found[0]]
        why = f"has {len(found)} tables {name!r}" if found else f"has no table {name!r}"
        raise ValueError(f"{self.path} {why}: name one of {sorted(found or self.tables)}.")

    def hash_table(self, name: str | None) -> OpenedTable:
        """A table that has files of its own.

        Args:
            name: name of the table; None for the only one.

        Raises:
            ValueError: there is no such table, or there are several.
        """
        if name is None:
            names = [table.name for table in self.tables.values() if table.parts is not None]
            if len(names) != 1:
                raise ValueError(
                    f"{self.path} has {len(names)} hash tables: name one of {sorted(names)}."
                )
            (name,) = names
        table = self.table(name)
        if table.parts is None:
            raise ValueError(
                f"Table {table.name!r} of {self.path} has its values among the tensors, not by id: "
                "export it with torchrec_hkv.checkpoint.export_rows from a model."
            )
        return table

    def chain(self) -> list[tuple[Path, Link]]:
        """Folders and links of a chain, the oldest first."""
        if self.kind != "chain":
            return []
        return [(folder, Link.read(folder)) for folder, _ in reversed(self.layers)]
