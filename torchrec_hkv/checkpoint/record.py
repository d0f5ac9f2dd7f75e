"""The record of a checkpoint: its tables, their shards' folders, and checksums of all files."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchrec_hkv.checkpoint.learning_rate_schema import RATES
from torchrec_hkv.hash_table.files.manifest import CRC32, OWNERS, SAVE_ID
from torchrec_hkv.hash_table.files.signed_json import read_signed, write_signed
from torchrec_hkv.json_schema import (
    Fields,
    Flag,
    Integer,
    Items,
    JsonPlace,
    Map,
    OrNull,
    Plain,
    Text,
)

#: Name of the record's file. It is written last.
RECORD = "checkpoint.json"
#: Name of the file with the position of a checkpoint in its chain.
LINK = "chain.json"
#: Folders of a checkpoint: for tables that have files of their own, and for everything else, which
#: torch.distributed.checkpoint writes.
TABLES, TENSORS = "tables", "tensors"
#: The file of torch.distributed.checkpoint that names its other files.
METADATA = f"{TENSORS}/.metadata"
_FORMAT = "torchrec_hkv.checkpoint"
_VERSION = 2
#: Maximal length of a folder's name on all file systems, in bytes.
_MAX_NAME_BYTES = 255


@dataclasses.dataclass(frozen=True)
class TableShardRecord:
    """A shard of a table that has files of its own.

    Attributes:
        folder: path relative to the checkpoint's folder.
        owners: range ``[first, end)`` of the owner buckets of its ids.
        columns: range ``[first, end)`` of its columns.
        entries: number of entries in its files.
        crc32: checksum of the file that names its files
            (:class:`torchrec_hkv.backends.save_types.SavedFolder`).
    """

    folder: str
    owners: tuple[int, int]
    columns: tuple[int, int]
    entries: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class TableRecord:
    """A table of a backend.

    Attributes:
        backend: name of the backend.
        identity: properties that a table must share to load it.
        shards: its shards, if it has files of its own; None if its values are among the tensors.
    """

    backend: str
    identity: dict[str, Any]
    shards: Sequence[TableShardRecord] | None


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """A file of :mod:`torch.distributed.checkpoint`.

    Attributes:
        bytes: size of the file.
        crc32: checksum of the file.
    """

    bytes: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class Record:
    """The record of a checkpoint.

    Attributes:
        save: id of the save; all shards of tables have the same.
        world_size: number of ranks that saved the checkpoint.
        has_optimizer: whether an optimizer was saved.
        learning_rates: values that schedulers change, by the names of parameters.
        tables: tables by their full names, which are their keys in the ``state_dict`` without
            ``.weight``.
        files: files of :mod:`torch.distributed.checkpoint`, by their paths in the checkpoint.
    """

    save: str
    world_size: int
    has_optimizer: bool
    learning_rates: dict[str, dict[str, Any]]
    tables: dict[str, TableRecord]
    files: dict[str, FileRecord]

    def write(self, folder: Path) -> None:
        """Writes the record to the folder of the checkpoint and syncs it."""
        content = dataclasses.asdict(self)
        write_signed(folder / RECORD, _FORMAT, _VERSION, content, mode="x")

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Reads the record of a checkpoint.

        Raises:
            ValueError: it is damaged or of another version, or has an impossible value.
        """
        path = folder / RECORD
        try:
            content = read_signed(path, _FORMAT, _VERSION, "a checkpoint")
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}.") from None
        place = JsonPlace(str(path))
        record: Record = _RECORD.read(content, place)
        for key, table in record.tables.items():
            if table.shards is not None:
                _check_shards(key, table.shards, place.of("tables").of(key).of("shards"))
        if METADATA not in record.files:
            raise place.of("files").of(METADATA).missing(_FILE.allowed)
        return record


def shard_folder(key: str, index: int) -> str:
    """Path of a table's shard in a checkpoint.

    Args:
        key: full name of the table. A name that is too long for a folder is cut and followed by a
            digest; the record has the complete name.
        index: index of the shard.
    """
    name = quote(key, safe="")
    if len(name) > _MAX_NAME_BYTES:
        digest = hashlib.sha256(name.encode()).hexdigest()
        name = f"{name[: _MAX_NAME_BYTES - len(digest) - 1]}-{digest}"
    return f"{TABLES}/{name}/{index:05d}"


_SHARD = Fields(
    {
        "folder": Text(),
        "owners": Items(Integer(0, OWNERS), 2),
        "columns": Items(Integer(0, 1 << 31), 2),
        "entries": Integer(0, 1 << 38),
        "crc32": CRC32,
    },
    TableShardRecord,
)
_TABLE = Fields(
    {"backend": Text(), "identity": Map(Text(), Plain()), "shards": OrNull(Items(_SHARD))},
    TableRecord,
)
_FILE = Fields({"bytes": Integer(0, 1 << 62), "crc32": CRC32}, FileRecord)
_FILE_NAME = Text(
    rf"{TENSORS}/(?!\.\.?$)[^/\x00]+", f"'{TENSORS}/' and the name of a file in that folder"
)
_RECORD = Fields(
    {
        "save": SAVE_ID,
        "world_size": Integer(1, (1 << 31) - 1),
        "has_optimizer": Flag(),
        "learning_rates": Map(Text(), RATES),
        "tables": Map(Text(), _TABLE),
        "files": Map(_FILE_NAME, _FILE),
    },
    Record,
)


def _check_shards(key: str, shards: Sequence[TableShardRecord], place: JsonPlace) -> None:
    """Checks that shards have their own folders and make up a table."""
    for index, shard in enumerate(shards):
        at, folder = place.at(index), shard_folder(key, index)
        if shard.folder != folder:
            raise at.of("folder").refuse(shard.folder, repr(folder))
        for name in ("owners", "columns"):
            begin, end = getattr(shard, name)
            if begin >= end:
                raise at.of(name).refuse([begin, end], "two numbers that ascend")
    for (i, one), (j, other) in itertools.combinations(enumerate(shards), 2):
        if _overlap(one.owners, other.owners) and _overlap(one.columns, other.columns):
            raise (
                place.at(j)
                .of("owners")
                .refuse(list(other.owners), f"apart from those of shard {i}, {list(one.owners)}")
            )
    # Disjoint shards make up the table if their areas add up to its area.
    areas = ((s.owners[1] - s.owners[0]) * (s.columns[1] - s.columns[0]) for s in shards)
    width = max((shard.columns[1] for shard in shards), default=1)
    if sum(areas) != OWNERS * width:
        shown = [[list(shard.owners), list(shard.columns)] for shard in shards]
        raise place.refuse(
            shown, f"shards of all owners, 0 to {OWNERS}, for each of the columns 0 to {width}"
        )


def _overlap(one: Sequence[int], other: Sequence[int]) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])
