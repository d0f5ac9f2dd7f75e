"""The record of a checkpoint: tables, the folders of their shards, and checksums of the rest."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torchrec_hkv.hash_table.files.signed_json import read_signed, write_signed

#: Its file; the last that is written.
RECORD = "checkpoint.json"
#: Folders of a checkpoint: of tables that have files of their own, and of all else.
TABLES, TENSORS = "tables", "tensors"
_FORMAT = "torchrec_hkv.checkpoint"
_VERSION = 1


@dataclasses.dataclass(frozen=True)
class TableShardRecord:
    """A shard of a table that has files of its own.

    Attributes:
        folder: relative to the checkpoint's.
        owners: first owner bucket of the ids that it was asked for, and the one past the last.
        columns: its first column, and the one past the last.
    """

    folder: str
    owners: tuple[int, int]
    columns: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class TableRecord:
    """A table on a backend.

    Attributes:
        backend: its name.
        identity: what a table that loads it must have in common with it.
        shards: where it has files of its own; None where it is among the tensors.
    """

    backend: str
    identity: dict[str, Any]
    shards: list[TableShardRecord] | None


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """A file of the tensors.

    Attributes:
        bytes: its size.
        crc32: its checksum.
    """

    bytes: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class Record:
    """All that is to be known of a checkpoint.

    Attributes:
        world_size: ranks that saved it.
        has_optimizer: whether an optimizer was saved.
        learning_rates: what schedulers change, by the name of a parameter.
        tables: by the part of their keys in a ``state_dict`` before ``.weight``.
        files: of the tensors, by their path in the checkpoint.
    """

    world_size: int
    has_optimizer: bool
    learning_rates: dict[str, dict[str, Any]]
    tables: dict[str, TableRecord]
    files: dict[str, FileRecord]

    def write(self, folder: Path) -> None:
        """Writes it, and makes sure that it is on the disk."""
        content = dataclasses.asdict(self)
        write_signed(folder / RECORD, _FORMAT, _VERSION, content, mode="x")

    @classmethod
    def read(cls, folder: Path) -> Record:
        """The record of a checkpoint.

        Raises:
            ValueError: it is damaged, or of another version.
        """
        path = folder / RECORD
        try:
            content = read_signed(path, _FORMAT, _VERSION, "a checkpoint")
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}.") from None
        try:
            return cls(
                content["world_size"],
                content["has_optimizer"],
                content.get("learning_rates", {}),  # earlier ones have none
                {key: _table(table) for key, table in content["tables"].items()},
                {name: FileRecord(**file) for name, file in content["files"].items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} makes no sense: {error}.") from None


def _table(content: dict[str, Any]) -> TableRecord:
    shards = content["shards"]
    if shards is not None:
        shards = [
            TableShardRecord(s["folder"], tuple(s["owners"]), tuple(s["columns"])) for s in shards
        ]
    return TableRecord(content["backend"], content["identity"], shards)
