"""Finds repeated ids in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_ops = torch.ops.torchrec_hkv
_ID_BYTES = 8
# Minimal number of places in a set of ids, because each set reads all ids.
_MIN_PLACES = 8192


def repeated_id(read: Callable[[], Iterable[Tensor]], entries: int, batch_bytes: int) -> int | None:
    """Finds an id that occurs more than once; None if there is none. Runs on this thread alone.

    If a set of all ids fits into the memory, the ids are read once. Otherwise a hash divides them
    into parts. A set is made of one part after the other, and all ids are read for each part.

    Args:
        read: returns the ids, int64, in batches that are valid until the next one; the same ids in
            each call.
        entries: number of ids.
        batch_bytes: memory limit in bytes.
    """
    places = 1 << max(_MIN_PLACES, batch_bytes // _ID_BYTES).bit_length() - 1
    # A set is at most three quarters full.
    places = min(places, 1 << (entries + entries // 3).bit_length())
    maximum = places - places // 4
    ids_of_set = torch.empty(places + 1, dtype=torch.int64)
    bits = max(0, -(-entries // maximum) - 1).bit_length()
    parts = [(bits, part) for part in range(1 << bits)]
    while parts:
        bits, part = parts.pop()
        ids_of_set.zero_()
        inserted = 0
        for ids in read():
            inserted, repeated = _ops.add_ids(ids_of_set, inserted, ids, bits, part)
            if repeated is not None:
                return repeated
            if inserted > maximum:
                break
        if inserted > maximum and bits < 63:
            # Unique ids have different hashes, so parts become small enough.
            parts += [(bits + 1, 2 * part), (bits + 1, 2 * part + 1)]
    return None
