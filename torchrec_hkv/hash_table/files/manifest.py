"""The manifest of a saved table: properties of the table and a list of its shards."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from torchrec_hkv import _C
from torchrec_hkv.file_sync import sync_folder
from torchrec_hkv.hash_table.eviction import KINDS
from torchrec_hkv.hash_table.files.file_names import (
    COUNTS_NAME,
    MANIFEST,
    REMOVED_IDS_NAME,
    SHARD_NAME,
    UNFINISHED,
)
from torchrec_hkv.hash_table.files.manifest_checks import check_manifest
from torchrec_hkv.hash_table.files.manifest_parts import (
    CountsFile,
    DeltaContent,
    Reduced,
    ShardFile,
)
from torchrec_hkv.hash_table.files.signed_json import checksum, read_signed, write_signed
from torchrec_hkv.hash_table.files.state_columns import OWN_STEPS
from torchrec_hkv.json_schema import (
    ByType,
    Choice,
    Fields,
    Flag,
    Integer,
    Items,
    JsonPlace,
    Map,
    Number,
    OrNull,
    Text,
)

FORMAT = "torchrec_hkv.hash_table"
VERSION = 2
#: Number of owner buckets, which the shards together cover.
OWNERS = 1 << 16

_MAX_CAPACITY = 1 << 37
_MAX_SLOTS = 1 << 38
# State layouts: the number of an optimizer, and whether rows count their own steps.
_LAYOUTS = [int(kind) + own for own in (0, OWN_STEPS) for kind in _C.Optimizer.__members__.values()]


#: Schema of save ids (:func:`new_save_id`).
SAVE_ID = Text(r"[0-9a-f]{8,32}", "8 to 32 hexadecimal digits")
#: Schema of checksums of files and tensors.
CRC32 = Integer(0, (1 << 32) - 1)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything about a saved table except its entries.

    Attributes:
        save: id of the save; all shards of a checkpoint have the same.
        table: properties of the table by name, see :func:`torchrec_hkv.hash_table.files.save`.
        capacity: requested capacity.
        initial_capacity: requested initial capacity; None for the full capacity.
        buckets: number of buckets of the saved table.
        bucket_slots: number of slots in a bucket.
        clock: the last step begun.
        epoch: epoch of the epoch policies.
        optimizer_step: number of updates of the table so far.
        state_layout: layout of the optimizer states, as a number; 0 without an optimizer.
        entries: number of entries in all shards.
        shards: the shards in the order of their owner buckets.
        counts: the admission counters; None if the table counted nothing.
        changes: description of the changes, or None if the shards hold the whole table.
        reduced: the reduced form of entries, or None if entries are complete.
        aging: under ``aged_lfu``, the number of lookups in the measured calls, the number of these
            calls, and c. None, and not in the file, under other policies.
    """

    save: str
    table: dict[str, Any]
    capacity: int
    buckets: int
    bucket_slots: int
    clock: int
    epoch: int
    optimizer_step: int
    state_layout: int
    entries: int
    shards: tuple[ShardFile, ...]
    initial_capacity: int | None = None
    counts: CountsFile | None = None
    changes: DeltaContent | None = None
    reduced: Reduced | None = None
    aging: tuple[float, float, float] | None = None

    def write(self, folder: Path) -> None:
        """Writes the manifest under a temporary name; :meth:`commit` renames it."""
        # Remove the file of a killed save, or a link, which must not be followed.
        (folder / UNFINISHED).unlink(missing_ok=True)
        write_signed(folder / UNFINISHED, FORMAT, VERSION, self._content(), mode="x")

    @staticmethod
    def commit(folder: Path) -> None:
        """Atomically replaces the folder's manifest by the one that was written."""
        sync_folder(folder)
        (folder / UNFINISHED).rename(folder / MANIFEST)
        sync_folder(folder)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """Reads the manifest of a folder.

        Raises:
            ValueError: the manifest is missing or damaged.
        """
        path = folder / MANIFEST
        try:
            content = read_signed(path, FORMAT, VERSION, "a hash table")
        except OSError as error:
            raise ValueError(
                f"There is no saved table at {folder}: {MANIFEST} can't be read ({error.strerror})."
            ) from None
        manifest: Manifest = MANIFEST_SCHEMA.read(content, JsonPlace(str(path)))
        check_manifest(manifest, JsonPlace(str(path)))
        return manifest

    @property
    def crc32(self) -> int:
        """The checksum in the file."""
        return checksum(FORMAT, VERSION, self._content())

    def _content(self) -> dict[str, Any]:
        content = dataclasses.asdict(self)
        # Optional keys are left out, so that earlier versions can read the file.
        return {
            key: content[key] for key in content if key not in _OPTIONAL or content[key] is not None
        }

    @property
    def total_entries(self) -> int:
        """Number of entries of the table; the shards may hold only some of them."""
        return self.entries if self.changes is None else self.changes.entries

    @property
    def files(self) -> list[str]:
        """The names of all files except the manifest itself."""
        removed_ids = [] if self.changes is None else [self.changes.left_file]
        return [part.file for part in (*self.shards, self.counts) if part is not None] + removed_ids


_NUMBER = Number()
_TABLE = Fields(
    {
        "name": Text(),
        "dim": Integer(1, 2048),
        "eviction": Choice(tuple(KINDS)),
        "seed": Integer(-(1 << 63), (1 << 63) - 1),
        "initializer": OrNull(
            ByType(
                "type",
                {
                    "Uniform": Fields({"low": _NUMBER, "high": _NUMBER}),
                    "Normal": Fields({"mean": _NUMBER, "std": _NUMBER}),
                    "TruncatedNormal": Fields(
                        {"mean": _NUMBER, "std": _NUMBER, "low": _NUMBER, "high": _NUMBER}
                    ),
                    "Constant": Fields({"value": _NUMBER}),
                },
            )
        ),
        "column_offset": Integer(0, (1 << 31) - 1),
        "dtype": Choice(("float32", "float16", "bfloat16", "int8")),
        "state_dim": Integer(0, 8192),
    }
)
_SHARD = Fields(
    {
        "file": Text(SHARD_NAME, "the name of a shard, as shard-0123abcd-00000.safetensors"),
        "owner_begin": Integer(0, OWNERS - 1),
        "owner_end": Integer(1, OWNERS),
        "entries": Integer(1, _MAX_SLOTS),
        "bytes": Integer(1, 1 << 62),
        "crc32": Map(Text(), CRC32),
    },
    ShardFile,
)
_COUNTS = Fields(
    {
        "file": Text(COUNTS_NAME, "the name of a file of counts, as counts-0123abcd.bin"),
        "kind": Choice(("cells", "sketch")),
        "cell_bits": Choice((8, 16, 128)),
        "bytes": Integer(1, 1 << 40),
        "crc32": CRC32,
    },
    CountsFile,
)
_CHANGES = Fields(
    {
        "entries": Integer(0, _MAX_SLOTS),
        "left_file": Text(
            REMOVED_IDS_NAME, "the name of a file of what left, as left-0123abcd.bin"
        ),
        "left": Integer(0, _MAX_SLOTS),
        "left_crc32": CRC32,
    },
    DeltaContent,
)
_REDUCED = Fields(
    {"dtype": Choice(("float32", "float16", "bfloat16", "int8")), "states": Flag()}, Reduced
)
#: Keys that are left out if their value is None.
_OPTIONAL = ("changes", "reduced", "aging")
MANIFEST_SCHEMA = Fields(
    {
        "save": SAVE_ID,
        "table": _TABLE,
        "capacity": Integer(1, _MAX_CAPACITY),
        "buckets": Integer(1, (1 << 32) - 1),
        "bucket_slots": Integer(1, 64),
        "clock": Integer(0, (1 << 32) - 1),
        "epoch": Integer(0, (1 << 32) - 1),
        "optimizer_step": Integer(0, (1 << 63) - 1),
        "state_layout": Choice(_LAYOUTS),
        "entries": Integer(0, _MAX_SLOTS),
        "shards": Items(_SHARD),
        "initial_capacity": OrNull(Integer(1, _MAX_CAPACITY)),
        "counts": OrNull(_COUNTS),
        "changes": _CHANGES,
        "reduced": _REDUCED,
        "aging": Items(Number(0), 3),
    },
    Manifest,
    optional=_OPTIONAL,
)


def new_save_id() -> str:
    """A new unique id for a save."""
    return os.urandom(8).hex()
