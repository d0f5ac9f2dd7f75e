"""Checks shards of a saved table while they are loaded, batch by batch, by several threads."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from torchrec_hkv import checksums
from torchrec_hkv.hash_table.files.block_files import host_memory
from torchrec_hkv.hash_table.files.manifest import Manifest
from torchrec_hkv.hash_table.files.manifest_parts import ShardFile

_ops = torch.ops.torchrec_hkv
# The polynomial of CRC-32 with its bits reversed, as in zlib.
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # the polynomial 1


def _times(a: int, b: int) -> int:
    """The product of two polynomials modulo that of CRC-32."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@functools.lru_cache(64)
def _shift(size: int) -> int:
    """x to the power of the number of bits in ``size`` bytes."""
    power, square = _ONE, 1 << 23  # x^8
    while size:
        if size & 1:
            power = _times(square, power)
        square = _times(square, square)
        size >>= 1
    return power


def combined_crc32(first: int, second: int, size: int) -> int:
    """CRC-32 of two concatenated pieces of data.

    Args:
        first: CRC-32 of the first piece.
        second: CRC-32 of the second piece.
        size: number of bytes of the second piece.
    """
    return _times(_shift(size), first) ^ second


@dataclasses.dataclass(frozen=True)
class BatchCheck:
    """The result of checking a batch of entries of a shard.

    Attributes:
        crc32: checksum and number of bytes of each tensor.
        first_slot: first slot of the batch.
        last_slot: last slot of the batch.
        is_sound: whether slots ascend, and each id is in one of its buckets and belongs to the
            shard.
    """

    crc32: Mapping[str, tuple[int, int]]
    first_slot: int
    last_slot: int
    is_sound: bool


class ShardCheck:
    """Checks a shard like :func:`.shard_checks.verify_shard`, except for repeated ids.

    Args:
        path: path of the file.
        manifest: the manifest that lists it.
        shard: its description there.
        owners: range ``[first, end)`` of owner buckets whose ids the table held.
    """

    def __init__(
        self, path: Path, manifest: Manifest, shard: ShardFile, owners: tuple[int, int]
    ) -> None:
        self._path, self._manifest, self._shard = path, manifest, shard
        self._owners = (max(shard.owner_begin, owners[0]), min(shard.owner_end, owners[1]))
        self._crc32 = dict.fromkeys(shard.crc32, 0)
        self._last_slot = -1
        self._entries = 0
        self._is_sound = True

    def check_batch(self, batch: Mapping[str, Tensor]) -> BatchCheck:
        """Looks at a batch; several threads may do so at the same time."""
        crc32 = {}
        for name, tensor in batch.items():
            memory = host_memory(tensor)
            crc32[name] = (checksums.crc32(memory), memory.nbytes)
        ids, slots, manifest = batch["ids"], batch["slots"], self._manifest
        geometry = (manifest.buckets, manifest.bucket_slots)
        is_sound = _ops.are_placed(ids, slots, *geometry, *self._owners)
        return BatchCheck(crc32, int(slots[0]), int(slots[-1]), is_sound)

    def add(self, result: BatchCheck, entries: int) -> None:
        """Adds the result of a batch. Call it in the order of the file.

        Raises:
            ValueError: this was the last batch, and the shard is damaged or inconsistent.
        """
        for name, (crc32, size) in result.crc32.items():
            self._crc32[name] = combined_crc32(self._crc32[name], crc32, size)
        self._is_sound = self._is_sound and result.is_sound and result.first_slot > self._last_slot
        self._last_slot = result.last_slot
        self._entries += entries
        if self._entries < self._shard.entries:
            return
        if self._crc32 != self._shard.crc32:
            raise ValueError(f"{self._path} is damaged: its checksums are not those of its save.")
        if not self._is_sound:
            raise ValueError(f"{self._path} is inconsistent: ids are not where they belong.")
