"""The record of a checkpoint: tables, the folders of their shards, and checksums of all files."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torchrec_hkv.checkpoint.rates import RATES
from torchrec_hkv.hash_table.files.manifest import CRC32, OWNERS, SAVE_ID
from torchrec_hkv.hash_table.files.signed_json import read_signed, write_signed
from torchrec_hkv.json_schema import Fields, Flag, Integer, Items, Map, OrNull, Place, Plain, Text

#: Its file; the last that is written.
RECORD = "checkpoint.json"
#: The file of a checkpoint in a chain of deltas that says where in the chain it is.
LINK = "chain.json"
#: Folders of a checkpoint: of tables that have files of their own, and of all else, which
#: torch.distributed.checkpoint writes.
TABLES, TENSORS = "tables", "tensors"
#: Its file that names all others.
METADATA = f"{TENSORS}/.metadata"
_FORMAT = "torchrec_hkv.checkpoint"
_VERSION = 2
#: Bytes of a folder's name that every file system has.
_MOST_NAME_BYTES = 255


@dataclasses.dataclass(frozen=True)
class TableShardRecord:
    """A shard of a table that has files of its own.

    Attributes:
        folder: relative to the checkpoint's.
        owners: first owner bucket of the ids that it was asked for, and the one past the last.
        columns: its first column, and the one past the last.
        entries: that its files hold.
        crc32: checksum of what names its files, as :class:`torchrec_hkv.backends.saved.SavedFolder`
            has it.
    """

    folder: str
    owners: tuple[int, int]
    columns: tuple[int, int]
    entries: int
    crc32: int


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
    shards: Sequence[TableShardRecord] | None


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
        save: an id of the save, which all shards of tables have, too.
        world_size: ranks that saved it.
        has_optimizer: whether an optimizer was saved.
        learning_rates: what schedulers change, by the name of a parameter.
        tables: by the part of their keys in a ``state_dict`` before ``.weight``.
        files: of the tensors, by their path in the checkpoint.
    """

    save: str
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
            ValueError: it is damaged, of another version, or has an impossible value.
        """
        path = folder / RECORD
        try:
            content = read_signed(path, _FORMAT, _VERSION, "a checkpoint")
        except OSError as error:
            raise ValueError(f"{path} can't be read: {error.strerror}.") from None
        place = Place(str(path))
        record: Record = _RECORD.read(content, place)
        for key, table in record.tables.items():
            if table.shards is not None:
                _check_shards(key, table.shards, place.of("tables").of(key).of("shards"))
        if METADATA not in record.files:
            raise place.of("files").of(METADATA).missing(_FILE.allowed)
        return record


def shard_folder(key: str, index: int) -> str:
    """Where a shard of a table lies in a checkpoint.

    Args:
        key: of the table. A long one's folder has its beginning and a digest, as the record has all
            of it.
        index: of the shard.
    """
    name = quote(key, safe="")
    if len(name) > _MOST_NAME_BYTES:
        digest = hashlib.sha256(name.encode()).hexdigest()
        name = f"{name[: _MOST_NAME_BYTES - len(digest) - 1]}-{digest}"
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


def _check_shards(key: str, shards: Sequence[TableShardRecord], place: Place) -> None:
    """Refuses folders of other tables, and shards that don't make up a table."""
    for index, shard in enumerate(shards):
        at, folder = place.at(index), shard_folder(key, index)
        if shard.folder != folder:
            raise at.of("folder").refuse(shard.folder, repr(folder))
        for name in ("owners", "columns"):
            begin, end = getattr(shard, name)
            if begin >= end:
                raise at.of(name).refuse([begin, end], "two numbers that ascend")
    for (i, one), (j, other) in itertools.combinations(enumerate(shards), 2):
        if _meet(one.owners, other.owners) and _meet(one.columns, other.columns):
            raise (
                place.at(j)
                .of("owners")
                .refuse(list(other.owners), f"apart from those of shard {i}, {list(one.owners)}")
            )
    # Apart from each other, they are the whole table where their areas add up to it.
    areas = ((s.owners[1] - s.owners[0]) * (s.columns[1] - s.columns[0]) for s in shards)
    width = max((shard.columns[1] for shard in shards), default=1)
    if sum(areas) != OWNERS * width:
        shown = [[list(shard.owners), list(shard.columns)] for shard in shards]
        raise place.refuse(
            shown, f"shards of all owners, 0 to {OWNERS}, for each of the columns 0 to {width}"
        )


def _meet(one: Sequence[int], other: Sequence[int]) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])
