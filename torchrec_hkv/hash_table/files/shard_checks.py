"""Verifies shards: checksums, the buckets and slots of their ids, and that no id repeats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv.hash_table.files.manifest import OWNERS, Manifest, ShardFile
from torchrec_hkv.hash_table.files.shard_files import (
    Field,
    ShardReader,
    Staging,
    entry_bytes,
    manifest_fields,
)
from torchrec_hkv.hash_table.files.unique_ids import repeated_id

_ops = torch.ops.torchrec_hkv


def verify_shard(
    folder: Path,
    manifest: Manifest,
    shard: ShardFile,
    batch_bytes: int,
    owners: tuple[int, int] = (0, OWNERS),
) -> None:
    """Reads a shard and verifies its checksums, the bucket of each id, and that no id repeats.

    Args:
        folder: the folder of the shard.
        manifest: manifest of the folder.
        shard: a shard of the manifest.
        batch_bytes: host memory limit in bytes.
        owners: range ``[first, end)`` of owner buckets whose ids the table held.

    Raises:
        ValueError: the shard is missing, damaged or does not match the manifest.
    """
    path = folder / shard.file
    fields = manifest_fields(manifest)
    batch = max(1, batch_bytes // (2 * entry_bytes(fields)))
    staging = Staging(fields, min(batch, shard.entries))
    misplaced = 0
    last_slot = -1
    with ShardReader(path, fields, shard) as reader:
        for entries in reader.verified_batches(staging):
            slots = entries["slots"]
            place = (
                entries["ids"],
                slots,
                manifest.buckets,
                manifest.bucket_slots,
                max(shard.owner_begin, owners[0]),
                min(shard.owner_end, owners[1]),
            )
            # A single thread looks at a batch, because other threads verify other files.
            is_sound = int(slots[0]) > last_slot and _ops.are_placed(*place)
            if misplaced or not is_sound:
                misplaced += int(_ops.find_misplaced(*place).sum())
            if misplaced:
                continue
            if not is_sound:
                raise ValueError(
                    f"{path} is inconsistent: its slots do not ascend, so a slot may occur twice."
                )
            last_slot = int(slots[-1])
    if misplaced:
        raise ValueError(
            f"{path} is inconsistent: {misplaced} of its {shard.entries} ids are not in their "
            "own buckets."
        )
    check_unique(folder, manifest, shard, fields, batch_bytes)


def check_unique(
    folder: Path,
    manifest: Manifest,
    shard: ShardFile,
    fields: Sequence[Field],
    batch_bytes: int,
) -> None:
    """Raises if an id of a shard occurs twice. Only shards of the same owner buckets can share an
    id. There are several such shards only if an owner bucket was too large for one."""
    owners = (shard.owner_begin, shard.owner_end)
    together = [s for s in manifest.shards if (s.owner_begin, s.owner_end) == owners]
    if shard != together[0]:
        return  # verified with the first shard
    entries = sum(s.entries for s in together)
    ids_only = [field for field in fields if field.name == "ids"]
    quarter = max(1, batch_bytes // 4)

    def read() -> Iterator[Tensor]:
        staging = Staging(ids_only, min(entries, max(4096, quarter // 32)))
        for one in together:
            with ShardReader(folder / one.file, fields, one) as reader:
                for batch in reader.batches(staging):
                    yield batch["ids"]

    repeated = repeated_id(read, entries, batch_bytes - quarter)
    if repeated is not None:
        raise ValueError(
            f"{folder / shard.file} is inconsistent: it holds id {repeated} more than once."
        )
