"""Whether ids repeat, found in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from torchrec_hkv.hash_table.files.counts import mix64

# Sorting takes the ids, the sorted ids, and their positions; gathering them takes the ids again.
_BYTES_OF_ID = 32
# However little memory may be taken: each part of the ids costs a look at all of them.
_LEAST_IDS = 4096


def repeated_id(read: Callable[[], Iterable[Tensor]], entries: int, batch_bytes: int) -> int | None:
    """An id that is there more than once, or None.

    Ids are read once where all fit into the memory. Otherwise they are sorted in parts, by a hash,
    and read once for each part.

    Args:
        read: the ids, int64, in batches that are valid until the next one; the same in each call.
        entries: how many there are.
        batch_bytes: memory it may take.
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
            # Distinct ids have distinct hashes: parts get small enough.
            parts += [(bits + 1, 2 * part), (bits + 1, 2 * part + 1)]
    return None


def _of_part(ids: Tensor, bits: int, part: int) -> Tensor:
    """Copies the ids whose hash begins with so many bits."""
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
