"""Finds repeated ids in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from torchrec_hkv.hash_table.files.counts import mix64

# Bytes for each id: the ids, the sorted ids, their positions, and the concatenated ids.
_BYTES_OF_ID = 32
# Minimal number of ids in a part, because each part reads all ids.
_LEAST_IDS = 4096


def repeated_id(read: Callable[[], Iterable[Tensor]], entries: int, batch_bytes: int) -> int | None:
    """Finds an id that occurs more than once; None if there is none.

    If all ids fit into the memory, they are read once. Otherwise they are sorted in parts, by a
    hash, and read once for each part.

    Args:
        read: returns the ids, int64, in batches that are valid until the next one; the same ids in
            each call.
        entries: number of ids.
        batch_bytes: memory limit in bytes.
    """
    most = max(_LEAST_IDS, batch_bytes // _BYTES_OF_ID)
    bits = max(0, -(-entries // most) - 1).bit_length()
    parts = [(bits, part) for part in range(1 << bits)]
    while parts:
        bits, part = parts.pop()
        held: list[Tensor] = []
        size = 0
        for ids in read():
            mine = _of_part(ids, bits, part)
            held.append(mine)
            size += len(mine)
            if size > most and bits < 63:
                break
        found = _repeated(held)
        if found is not None:
            return found
        if size > most and bits < 63:
            # Unique ids have different hashes, so parts become small enough.
            parts += [(bits + 1, 2 * part), (bits + 1, 2 * part + 1)]
    return None


def _of_part(ids: Tensor, bits: int, part: int) -> Tensor:
    """A copy of the ids whose hash begins with the ``bits`` bits of ``part``."""
    if bits == 0:
        return ids.clone()
    begins = (mix64(ids) >> (64 - bits)) & ((1 << bits) - 1)
    return ids[begins == part]


def _repeated(parts: list[Tensor]) -> int | None:
    if not parts:
        return None
    ids = torch.cat(parts).sort().values
    repeats = (ids[1:] == ids[:-1]).nonzero()
    return int(ids[repeats[0, 0]]) if len(repeats) else None
