"""The record of a checkpoint: tables, the folders of their shards, and checksums of the rest."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from pathlib import Path
from typing import Any

#: Its file; the last that is written.
RECORD = "checkpoint.json"
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
        tables: by the part of their keys in a ``state_dict`` before ``.weight``.
        files: of the tensors, by their path in the checkpoint.
    """

    world_size: int
    has_optimizer: bool
    tables: dict[str, TableRecord]
    files: dict[str, FileRecord]

    def write(self, folder: Path) -> None:
        """Writes it, and makes sure that it is on the disk."""
        content = {"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(self)}
        with open(folder / RECORD, "x", encoding="utf-8") as file:
            json.dump({**content, "crc32": _checksum(content)}, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> Record:
        """The record of a checkpoint.

        Raises:
            ValueError: it is damaged, or of another version.
        """
        path = folder / RECORD
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}.") from None
        except ValueError:
            raise ValueError(f"{path} is damaged: it is not JSON.") from None
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"{path} is damaged, or not of a checkpoint: it names no {_FORMAT!r}.")
        if content.get("version") != _VERSION:
            raise ValueError(
                f"{path} is of version {content.get('version')!r}, but this program reads version "
                f"{_VERSION}."
            )
        checksum = content.pop("crc32", None)
        if checksum != _checksum(content):
            raise ValueError(
                f"{path} is damaged: its checksum is {_checksum(content)}, but it names {checksum}."
            )
        try:
            return cls(
                content["world_size"],
                content["has_optimizer"],
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


def _checksum(content: dict[str, Any]) -> int:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return zlib.crc32(canonical.encode())
