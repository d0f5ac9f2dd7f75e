"""The manifest of a saved table: what the table is, and which shards hold its entries."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

from torchrec_hkv.hash_table.files.signed_json import read_signed, write_signed

MANIFEST = "manifest.json"
FORMAT = "torchrec_hkv.hash_table"
VERSION = 1
#: Owner buckets, which the ranges of all shards together cover.
OWNERS = 1 << 16

_SHARD_NAME = re.compile(r"shard-[0-9a-f]{8}-\d{5,}\.safetensors")
_COUNTS_NAME = re.compile(r"counts-[0-9a-f]{8}\.bin")
_UNFINISHED = f".{MANIFEST}.saving"


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of entries.

    Attributes:
        file: its name.
        owner_begin: first owner bucket of its ids.
        owner_end: the one past the last.
        entries: how many it holds.
        bytes: size of the file.
        crc32: checksum of each tensor's bytes.
    """

    file: str
    owner_begin: int
    owner_end: int
    entries: int
    bytes: int
    crc32: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Counts:
    """The file of the counts of ids that are not admitted.

    Attributes:
        file: its name.
        kind: ``"cells"`` or ``"sketch"``.
        cell_bits: bits of a cell.
        bytes: size of the file.
        crc32: its checksum.
    """

    file: str
    kind: str
    cell_bits: int
    bytes: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All of a saved table but its entries.

    Attributes:
        table: what makes it this table, by name; see :func:`torchrec_hkv.hash_table.files.save`.
        capacity: what was asked for.
        initial_capacity: likewise; None where the table had all from the start.
        buckets: of the table that was saved.
        bucket_slots: slots of each.
        clock: the last step begun.
        epoch: of the epoch policies.
        optimizer_step: updates of the table so far.
        state_layout: what the columns of its optimizer states are, as a number; 0 where the table
            had no optimizer.
        entries: in all shards.
        shards: in the order of their owner buckets.
        counts: of ids that are not admitted; None where the table counted none.
    """

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
    counts: Counts | None = None

    def write(self, folder: Path) -> None:
        """Writes it beside the folder's manifest, for :meth:`commit`."""
        # What a killed save left, or a link, which must not be followed.
        (folder / _UNFINISHED).unlink(missing_ok=True)
        write_signed(folder / _UNFINISHED, FORMAT, VERSION, dataclasses.asdict(self), mode="x")

    @staticmethod
    def commit(folder: Path) -> None:
        """Puts what was written in the place of the folder's manifest, in one step."""
        sync_folder(folder)
        (folder / _UNFINISHED).rename(folder / MANIFEST)
        sync_folder(folder)

    @staticmethod
    def read(folder: Path) -> Manifest:
        """The manifest of a folder.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        path = folder / MANIFEST
        try:
            content = read_signed(path, FORMAT, VERSION, "a hash table")
        except OSError as error:
            raise ValueError(
                f"There is no saved table at {folder}: {MANIFEST} can't be read ({error.strerror})."
            ) from None
        try:
            shards = tuple(Shard(**shard) for shard in content.pop("shards"))
            counts = content.pop("counts", None)
            counted = None if counts is None else Counts(**counts)
            manifest = Manifest(**content, shards=shards, counts=counted)
            manifest._check()
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} makes no sense: {error}.") from None
        return manifest

    def _check(self) -> None:
        if sum(shard.entries for shard in self.shards) != self.entries:
            raise ValueError(f"its shards do not hold {self.entries} entries together")
        if self.entries > self.buckets * self.bucket_slots:
            raise ValueError(f"{self.entries} entries do not fit into its slots")
        for shard in self.shards:
            if not _SHARD_NAME.fullmatch(shard.file):
                raise ValueError(f"{shard.file!r} is no name of a shard")
        if self.counts is not None and not _COUNTS_NAME.fullmatch(self.counts.file):
            raise ValueError(f"{self.counts.file!r} is no name of a file of counts")

    @property
    def files(self) -> list[str]:
        """The names of all files but the manifest itself."""
        return [part.file for part in (*self.shards, self.counts) if part is not None]


def sync_folder(folder: Path) -> None:
    """Makes sure that a folder's names are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def shard_name(save: str, index: int) -> str:
    """The file of a save's shard; ``save`` is 8 hexadecimal digits of its own."""
    return f"shard-{save}-{index:05d}.safetensors"


def counts_name(save: str) -> str:
    """The file of a save's counts; ``save`` is 8 hexadecimal digits of its own."""
    return f"counts-{save}.bin"


def _is_ours(name: str) -> bool:
    return bool(_SHARD_NAME.fullmatch(name) or _COUNTS_NAME.fullmatch(name))


def prepare_folder(folder: Path) -> None:
    """Makes the folder of a saved table, or clears it of what killed saves left.

    Raises:
        ValueError: it holds something else, or is a link to nothing.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, but a table is saved to a folder.")
    if folder.is_symlink() and not folder.exists():
        raise ValueError(
            f"{folder} is a link to {os.readlink(folder)!r}, where there is nothing: make that "
            "folder, or name another."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(os.listdir(folder)):
        if name not in (MANIFEST, _UNFINISHED) and not _is_ours(name):
            raise ValueError(
                f"{folder} holds {name!r}, which is not of a saved table: name a folder that "
                "doesn't exist, or of an earlier save."
            )
    for name in (MANIFEST, _UNFINISHED):
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            raise ValueError(
                f"{folder / name} is a folder, but a save writes a file of that name: move it away."
            )
    try:
        kept = Manifest.read(folder)
    except ValueError:
        return  # cleared once there is a manifest again
    remove_others(folder, kept)


def remove_others(folder: Path, manifest: Manifest) -> None:
    """Removes the shards and counts that are not of a manifest."""
    named = set(manifest.files)
    for name in os.listdir(folder):
        if _is_ours(name) and name not in named:
            (folder / name).unlink()
