"""Merges a saved table and later changes of it into one saved table, in bounded memory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv.file_sync import sync_folder
from torchrec_hkv.hash_table.files.file_names import shard_name
from torchrec_hkv.hash_table.files.layers import SlotFilter, check_layers
from torchrec_hkv.hash_table.files.manifest import OWNERS, Manifest
from torchrec_hkv.hash_table.files.manifest_parts import ShardFile
from torchrec_hkv.hash_table.files.save_folder import prepare_folder
from torchrec_hkv.hash_table.files.shard_files import (
    Field,
    ShardReader,
    ShardWriter,
    Staging,
    compressed,
    entry_bytes,
    manifest_fields,
)
from torchrec_hkv.hash_table.files.shard_plan import plan_shards
from torchrec_hkv.hash_table.files.table_save import default_shard_bytes
from torchrec_hkv.hash_table.files.zstd_files import SUFFIX
from torchrec_hkv.hash_table.routing import owner_rank
from torchrec_hkv.progress import advance

Layers = Sequence[tuple[Path, Manifest]]
# Bytes for each entry of the file being written: its source, its slot, and its position.
_PLACE_BYTES = 64


def merge_layers(layers: Layers, folder: Path, batch_bytes: int) -> Manifest:
    """Writes the table that layers make up to a new folder, like a save of the whole table.

    Args:
        layers: folders and their manifests, the newest first, already verified
            (:func:`torchrec_hkv.hash_table.files.verify`).
        folder: the folder to write.
        batch_bytes: memory limit in bytes. One more byte is used per slot of the table.

    Returns:
        The manifest of the new folder.

    Raises:
        ValueError: the layers are inconsistent.
        OSError: writing failed.
    """
    check_layers(layers)
    newest = layers[0][1]
    prepare_folder(folder)
    merge = _Merge(layers, batch_bytes)
    save_name = os.urandom(4).hex()
    shards = []
    for begin, end, _ in merge.plan():
        shard = merge.write(folder / shard_name(save_name, len(shards)), (begin, end))
        if shard is not None:
            shards.append(shard)
    entries = sum(shard.entries for shard in shards)
    if entries != newest.total_entries:
        raise ValueError(
            f"{layers[0][0]} is inconsistent: with its earlier layers it has {entries} entries "
            f"instead of {newest.total_entries}."
        )
    if newest.counts is not None:
        copy = folder / newest.counts.file
        shutil.copyfile(layers[0][0] / newest.counts.file, copy)
        with open(copy, "rb") as file:
            os.fsync(file.fileno())
    merged = dataclasses.replace(newest, entries=entries, shards=tuple(shards), changes=None)
    merged.write(folder)
    merged.commit(folder)
    sync_folder(folder.absolute().parent)
    return merged


@dataclasses.dataclass(frozen=True)
class _Source:
    """Entries of one source file that go to the file being written: their ascending numbers in the
    source, and their slots."""

    path: Path
    shard: ShardFile
    numbers: Tensor
    slots: Tensor


class _Merge:
    def __init__(self, layers: Layers, batch_bytes: int) -> None:
        self._layers, self._batch_bytes = layers, batch_bytes
        files = (shard.file for _, manifest in layers for shard in manifest.shards)
        self._compression = any(file.endswith(SUFFIX) for file in files)
        self._fields = manifest_fields(layers[0][1])
        quarter = batch_bytes // 4
        self._staging = Staging(self._fields, max(1, quarter // entry_bytes(self._fields)))
        self._reading = Staging(self._fields, max(1, quarter // entry_bytes(self._fields)))
        places = [field for field in self._fields if field.name in ("ids", "slots")]
        self._places = Staging(places, max(1, quarter // (4 * entry_bytes(places))))

    def plan(self) -> list[tuple[int, int, int]]:
        """Ranges of owner buckets, one per file, by their number of entries in all layers."""
        counts = torch.zeros(OWNERS, dtype=torch.int64)
        total = 0
        ids_only: list[Field] = [field for field in self._fields if field.name == "ids"]
        for folder, manifest in self._layers:
            for shard in manifest.shards:
                total += shard.entries
                with ShardReader(folder / shard.file, self._fields, shard) as reader:
                    for batch in reader.batches(Staging(ids_only, self._places.entries)):
                        counts += torch.bincount(
                            owner_rank(batch["ids"], OWNERS).long(), minlength=OWNERS
                        )
        size = entry_bytes(self._fields)
        maximum = min(
            default_shard_bytes(total * size, 1) // size, self._batch_bytes // 4 // _PLACE_BYTES
        )
        # One file per range, even if an owner bucket is too large for a shard.
        return list({ends[:2]: ends for ends in plan_shards(counts, max(1, maximum))}.values())

    def write(self, path: Path, owners: tuple[int, int]) -> ShardFile | None:
        """Writes the entries of some owner buckets. Writes no file and returns None without any."""
        sources = self._sources(owners)
        if not sources:
            return None
        slots = torch.cat([source.slots for source in sources])
        order = slots.argsort()
        of_source = torch.repeat_interleave(
            torch.arange(len(sources)), torch.tensor([len(s.slots) for s in sources])
        )[order]
        numbers = torch.cat([source.numbers for source in sources])[order]
        with contextlib.ExitStack() as stack:
            readers = [
                stack.enter_context(ShardReader(source.path, self._fields, source.shard))
                for source in sources
            ]
            writer = stack.enter_context(ShardWriter(path, self._staging, owners, len(order)))
            for first in range(0, len(order), self._staging.entries):
                last = min(first + self._staging.entries, len(order))
                memory = writer.memory(last - first)
                for index, reader in enumerate(readers):
                    to = (of_source[first:last] == index).nonzero().flatten()
                    self._read(reader, numbers[first:last][to], memory, to)
                writer.write(last - first)
                advance((last - first) * entry_bytes(self._fields))
            shard = writer.finish()
        return compressed(path, shard) if self._compression else shard

    def _sources(self, owners: tuple[int, int]) -> list[_Source]:
        sources = []
        picks = SlotFilter(self._layers)
        for layer, (folder, manifest) in enumerate(self._layers):
            for shard in manifest.shards:
                if max(shard.owner_begin, owners[0]) >= min(shard.owner_end, owners[1]):
                    continue
                path, numbers, slots = folder / shard.file, [], []
                first = 0
                with ShardReader(path, self._fields, shard) as reader:
                    for batch in reader.batches(self._places):
                        owner = owner_rank(batch["ids"], OWNERS)
                        owned = (owner >= owners[0]) & (owner < owners[1])
                        picked = picks.pick(layer, batch["slots"])
                        owned = owned if picked is None else owned & picked
                        at = owned.nonzero().flatten()
                        numbers.append(at + first)
                        slots.append(batch["slots"][at])
                        first += len(owned)
                source = _Source(path, shard, torch.cat(numbers), torch.cat(slots))
                if len(source.slots):
                    sources.append(source)
        return sources

    def _read(
        self, reader: ShardReader, numbers: Tensor, memory: dict[str, Tensor], to: Tensor
    ) -> None:
        """Reads entries of ascending numbers into positions of memory."""
        while len(numbers):
            first = int(numbers[0])
            n = int(torch.searchsorted(numbers, first + self._reading.entries))
            batch = reader.read(first, int(numbers[n - 1]) - first + 1, self._reading)
            for name, tensor in batch.items():
                memory[name][to[:n]] = tensor[numbers[:n] - first]
            numbers, to = numbers[n:], to[n:]
