"""Shards of saved tables with changed entries and valid checksums."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv.hash_table.files.manifest import Manifest
from torchrec_hkv.hash_table.files.shard_files import ShardReader, ShardWriter, Staging, fields_of


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], tuple[int, int] | None]) -> None:
    """Rewrites the only shard of a table of four float32 columns under LRU, without states.

    Args:
        folder: folder of the table.
        change: changes the entries; may return other owner buckets for the shard.
    """
    manifest = Manifest.read(folder)
    (shard,) = manifest.shards
    fields = fields_of(4, torch.float32, 0, False)
    staging = Staging(fields, shard.entries)
    with ShardReader(folder / shard.file, fields, shard) as reader:
        (memory,) = ({k: v.clone() for k, v in b.items()} for b in reader.batches(staging))
    owners = change(memory) or (0, 1 << 16)
    (folder / shard.file).unlink()
    with ShardWriter(folder / shard.file, staging, owners, shard.entries) as writer:
        writer.append(memory)
        written = writer.finish()
    dataclasses.replace(manifest, shards=(written,)).write(folder)
    Manifest.commit(folder)
