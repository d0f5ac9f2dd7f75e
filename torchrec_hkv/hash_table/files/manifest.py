"""The manifest of a saved table: properties of the table and a list of its shards."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from torchrec_hkv import _C
from torchrec_hkv.hash_table.eviction import KINDS
from torchrec_hkv.hash_table.files.file_names import (
    COUNTS_NAME,
    LEFT_NAME,
    MANIFEST,
    SHARD_NAME,
    UNFINISHED,
)
from torchrec_hkv.hash_table.files.signed_json import checksum, read_signed, write_signed
from torchrec_hkv.hash_table.files.state_columns import OWN_STEPS
from torchrec_hkv.hash_table.initializers import initializer_from_fields
from torchrec_hkv.json_schema import (
    ByType,
    Choice,
    Fields,
    Flag,
    Integer,
    Items,
    Map,
    Number,
    OrNull,
    Place,
    Text,
)

FORMAT = "torchrec_hkv.hash_table"
VERSION = 2
#: Number of owner buckets, which the shards together cover.
OWNERS = 1 << 16

_MOST_CAPACITY = 1 << 37
_MOST_SLOTS = 1 << 38
# State layouts: the number of an optimizer, and whether rows count their own steps.
_LAYOUTS = [int(kind) + own for own in (0, OWN_STEPS) for kind in _C.Optimizer.__members__.values()]


#: Schema of save ids (:func:`new_save_id`).
SAVE_ID = Text(r"[0-9a-f]{8,32}", "8 to 32 hexadecimal digits")
#: Schema of checksums of files and tensors.
CRC32 = Integer(0, (1 << 32) - 1)


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of entries.

    Attributes:
        file: name of the file.
        owner_begin: first owner bucket of its ids.
        owner_end: one past its last owner bucket.
        entries: number of entries.
        bytes: size of the file. For a compressed file, whose name ends with ``.zst``, its
            uncompressed size.
        crc32: checksum of each tensor's bytes.
    """

    file: str
    owner_begin: int
    owner_end: int
    entries: int
    bytes: int
    crc32: dict[str, int]


@dataclasses.dataclass(frozen=True)
class CountsFile:
    """The file of the admission counters.

    Attributes:
        file: name of the file.
        kind: ``"cells"`` or ``"sketch"``.
        cell_bits: bits of a cell.
        bytes: size of the file.
        crc32: checksum of the file.
    """

    file: str
    kind: str
    cell_bits: int
    bytes: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class DeltaContent:
    """Description of a folder that holds only what changed in a table since an earlier save.

    Attributes:
        entries: number of entries in the table.
        left_file: name of the file of slots that held other ids before, with these ids.
        left: number of pairs in this file.
        left_crc32: checksum of this file.
    """

    entries: int
    left_file: str
    left: int
    left_crc32: int


@dataclasses.dataclass(frozen=True)
class Reduced:
    """Description of a folder that holds entries in a reduced form.

    Attributes:
        dtype: dtype of the rows in the shards; int8 for codes with a scale for each row.
        states: whether the shards hold optimizer states.
    """

    dtype: str
    states: bool


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
        aging: under ``aged_lfu``, the lookups of a number of calls, this number, and c; else None,
            and not in the file.
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
    shards: tuple[Shard, ...]
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
        manifest: Manifest = MANIFEST_SCHEMA.read(content, Place(str(path)))
        check_manifest(manifest, Place(str(path)))
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
        left = [] if self.changes is None else [self.changes.left_file]
        return [part.file for part in (*self.shards, self.counts) if part is not None] + left


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
        "entries": Integer(1, _MOST_SLOTS),
        "bytes": Integer(1, 1 << 62),
        "crc32": Map(Text(), CRC32),
    },
    Shard,
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
        "entries": Integer(0, _MOST_SLOTS),
        "left_file": Text(LEFT_NAME, "the name of a file of what left, as left-0123abcd.bin"),
        "left": Integer(0, _MOST_SLOTS),
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
        "capacity": Integer(1, _MOST_CAPACITY),
        "buckets": Integer(1, (1 << 32) - 1),
        "bucket_slots": Integer(1, 64),
        "clock": Integer(0, (1 << 32) - 1),
        "epoch": Integer(0, (1 << 32) - 1),
        "optimizer_step": Integer(0, (1 << 63) - 1),
        "state_layout": Choice(_LAYOUTS),
        "entries": Integer(0, _MOST_SLOTS),
        "shards": Items(_SHARD),
        "initial_capacity": OrNull(Integer(1, _MOST_CAPACITY)),
        "counts": OrNull(_COUNTS),
        "changes": _CHANGES,
        "reduced": _REDUCED,
        "aging": Items(Number(0), 3),
    },
    Manifest,
    optional=_OPTIONAL,
)


def check_manifest(manifest: Manifest, place: Place) -> None:
    """Checks that the values of a manifest are consistent.

    Raises:
        ValueError: they are not; the message names the file, the key, the value and what is
            allowed.
    """
    _check_table(manifest, place)
    _check_geometry(manifest, place)
    held = sum(shard.entries for shard in manifest.shards)
    if manifest.entries != held:
        raise place.of("entries").refuse(manifest.entries, f"what its shards hold, {held}")
    slots = manifest.buckets * manifest.bucket_slots
    if manifest.entries > slots:
        raise place.of("entries").refuse(manifest.entries, f"at most the number of slots, {slots}")
    _check_shards(manifest.shards, place.of("shards"))
    if manifest.changes is not None:
        _check_changes(manifest.changes, held, slots, place.of("changes"))
    if manifest.counts is not None:
        _check_counts(manifest.counts, place.of("counts"))


def _check_table(manifest: Manifest, place: Place) -> None:
    fields, layout = manifest.table, manifest.state_layout
    if fields["initializer"] is not None:
        try:
            initializer_from_fields(fields["initializer"])
        except ValueError as error:
            raise ValueError(f"{place.file}: table.initializer is impossible: {error}") from None
    kind, own_steps = _C.Optimizer(layout % OWN_STEPS), layout >= OWN_STEPS
    needed = _C.OptimizerConfig(kind=kind, own_steps=own_steps).state_width(fields["dim"])
    if fields["state_dim"] < needed:
        raise (
            place.of("table")
            .of("state_dim")
            .refuse(fields["state_dim"], f"at least the {needed} values of state_layout {layout}")
        )


def _check_geometry(manifest: Manifest, place: Place) -> None:
    capacity, initial = manifest.capacity, manifest.initial_capacity
    if initial is not None and initial > capacity:
        raise place.of("initial_capacity").refuse(initial, f"at most the capacity, {capacity}")
    # Rounding up adds less than one slot for each bucket.
    slots = manifest.buckets * manifest.bucket_slots
    least = capacity if initial is None else initial
    if not least <= slots < capacity + manifest.buckets:
        raise place.of("buckets").refuse(
            manifest.buckets,
            f"as many as hold {least} to {capacity} rows in buckets of {manifest.bucket_slots}",
        )


def _check_shards(shards: Sequence[Shard], place: Place) -> None:
    names: set[str] = set()
    begin, end = 0, 0
    for index, shard in enumerate(shards):
        at = place.at(index)
        if shard.file in names:
            raise at.of("file").refuse(shard.file, "the name of no other shard")
        names.add(shard.file)
        owners = (shard.owner_begin, shard.owner_end)
        # An owner bucket that is too large for a shard is cut into several shards.
        if owners[0] < end and owners != (begin, end):
            raise at.of("owner_begin").refuse(owners[0], f"at least {end}, where the last one ends")
        if owners[0] >= owners[1]:
            raise at.of("owner_end").refuse(owners[1], f"more than owner_begin, {owners[0]}")
        begin, end = owners


def _check_counts(counts: CountsFile, place: Place) -> None:
    if (counts.kind == "cells") != (counts.cell_bits == 128):
        allowed = "128" if counts.kind == "cells" else "8 or 16"
        raise place.of("cell_bits").refuse(counts.cell_bits, f"{allowed} for {counts.kind}")
    whole = 128 if counts.kind == "cells" else 16
    if counts.bytes % whole:
        raise place.of("bytes").refuse(counts.bytes, f"a multiple of {whole}")


def _check_changes(changes: DeltaContent, held: int, slots: int, place: Place) -> None:
    if not held <= changes.entries <= slots:
        raise place.of("entries").refuse(
            changes.entries, f"from {held}, which the shards hold, to the number of slots, {slots}"
        )
    if changes.left > slots:
        raise place.of("left").refuse(changes.left, f"at most the number of slots, {slots}")


def reduced_of(dtype: torch.dtype, states: bool, row_dtype: torch.dtype | None) -> Reduced | None:
    """The reduced form of a table's entries, or None if they are complete."""
    saved = dtype if row_dtype is None or dtype.itemsize <= row_dtype.itemsize else row_dtype
    if states and saved == dtype:
        return None
    return Reduced(str(saved).removeprefix("torch."), states)


def new_save_id() -> str:
    """A new unique id for a save."""
    return os.urandom(8).hex()


def sync_folder(folder: Path) -> None:
    """Flushes the directory entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
