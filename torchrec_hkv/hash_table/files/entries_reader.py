"""Reads entries of a saved table without creating a table."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from torchrec_hkv.hash_table.files.layers import SlotFilter
from torchrec_hkv.hash_table.files.manifest import OWNERS
from torchrec_hkv.hash_table.files.saved_part import SavedPart
from torchrec_hkv.hash_table.files.shard_files import (
    Field,
    ShardReader,
    Staging,
    dequantised,
    dequantised_fields,
    entry_bytes,
)
from torchrec_hkv.hash_table.files.shard_plan import plan_shards
from torchrec_hkv.hash_table.routing import owner_rank


def _fields(part: SavedPart, names: Collection[str]) -> list[Field]:
    selected = {*names, "ids", "slots"} | ({"scales"} if "rows" in names else set())
    return [field for field in part.fields if field.name in selected]


def read_entries(
    part: SavedPart,
    names: Collection[str],
    batch_bytes: int,
    owners: tuple[int, int] = (0, OWNERS),
) -> Iterator[dict[str, Tensor]]:
    """Reads entries of a shard of a saved table, with deltas merged.

    Args:
        part: the saved shard.
        names: names of tensors to read besides ``ids`` and ``slots``; missing tensors are skipped.
        batch_bytes: memory limit in bytes. With deltas, one more byte is used for each slot.
        owners: range ``[first, end)`` of owner buckets whose ids to read.

    Yields:
        Tensors by name, valid until the next iteration.

    Raises:
        ValueError: a file is missing or cut short. Checksums are not verified.
    """
    fields = _fields(part, names)
    size = max(1, batch_bytes // (2 * entry_bytes(fields)))
    largest = max((s.entries for _, m in part.layers for s in m.shards), default=1)
    staging = Staging(fields, min(size, largest))
    slots = SlotFilter(part.layers)
    for layer, (folder, manifest) in enumerate(part.layers):
        for shard in manifest.shards:
            if max(shard.owner_begin, owners[0]) >= min(shard.owner_end, owners[1]):
                continue
            is_inside = owners[0] <= shard.owner_begin and shard.owner_end <= owners[1]
            with ShardReader(folder / shard.file, part.fields, shard) as reader:
                for batch in reader.batches(staging):
                    picked = slots.pick(layer, batch["slots"])
                    if not is_inside:
                        owner = owner_rank(batch["ids"], OWNERS)
                        owned = (owner >= owners[0]) & (owner < owners[1])
                        picked = owned if picked is None else picked & owned
                    if picked is not None:
                        batch = {name: tensor[picked] for name, tensor in batch.items()}
                    yield dequantised(batch)


def count_owners(part: SavedPart, batch_bytes: int) -> Tensor:
    """Number of entries of each owner bucket, int64 ``[65536]``."""
    counts = torch.zeros(OWNERS, dtype=torch.int64)
    for batch in read_entries(part, (), batch_bytes):
        counts += torch.bincount(owner_rank(batch["ids"], OWNERS).long(), minlength=OWNERS)
    return counts


def owner_ranges(counts: Tensor, maximum: int) -> list[tuple[int, int]]:
    """Splits the owner buckets into ranges of at most ``maximum`` entries. A bucket with more
    entries is a range by itself.

    Args:
        counts: number of entries of each owner bucket, int64 ``[65536]``.
        maximum: maximal number of entries in a range.
    """
    return list(dict.fromkeys(ends[:2] for ends in plan_shards(counts, max(1, maximum))))


def collect_entries(
    part: SavedPart, names: Collection[str], batch_bytes: int, owners: tuple[int, int]
) -> dict[str, Tensor]:
    """All entries of some owner buckets, sorted by id; see :func:`read_entries`."""
    pieces = [
        {name: tensor.clone() for name, tensor in batch.items()}
        for batch in read_entries(part, names, batch_bytes, owners)
    ]
    if not pieces:
        return {
            field.name: torch.empty(field.shape(0), dtype=field.dtype)
            for field in dequantised_fields(_fields(part, names))
        }
    joined = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    order = joined["ids"].argsort()
    return {name: tensor[order] for name, tensor in joined.items()}
