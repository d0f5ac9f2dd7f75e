"""Smaller variants of a hash table, with less HBM or fewer rows, and the quality they keep."""

from __future__ import annotations

import dataclasses

import torch

from torchrec_hkv.backends.hkv.options import HKVOptions
from torchrec_hkv.backends.specs import Kept, TableShard
from torchrec_hkv.backends.workload import IdFrequencies
from torchrec_hkv.hash_table import TableMemory, gpu_table_bytes

#: Number of steps from all rows in HBM to none; factor between numbers of rows, and their least
#: share.
_TIERS, _STEP, _FEWEST = 16, 0.97, 1 / 256


def kept_quality(
    table: TableShard, num_embeddings: int, dtype: torch.dtype, frequencies: IdFrequencies | None
) -> list[Kept]:
    """Implements :meth:`Backend.kept`."""
    if table.options_as(HKVOptions, "hkv").dense:
        return []
    found = []
    rows, ids = table.num_embeddings, num_embeddings
    if frequencies is not None:
        ids = max(ids, frequencies.num_ids)
    if rows < ids:
        share = rows / ids if frequencies is None else frequencies.share_of(rows)
        text = f"{rows:,} rows for {ids:,} ids have {share:.1%} of lookups"
        found.append(Kept("rows", min(share, 1 - 1e-9), text))
    if table.dtype.itemsize < dtype.itemsize:
        name = str(table.dtype).removeprefix("torch.")
        text = f"rows are {name}, and {str(dtype).removeprefix('torch.')} in the config"
        found.append(Kept("precision", table.dtype.itemsize / dtype.itemsize, text))
    return found


def tiers(options: HKVOptions, memory: TableMemory) -> list[HKVOptions]:
    """Variants with part of the rows in HBM and all of them in host memory.

    Args:
        options: options of a table in HBM.
        memory: memory of a shard.
    """
    full, _ = gpu_table_bytes(memory, None)
    minimum = memory.least_hbm_bytes
    parts = [minimum + (full - minimum) * part // _TIERS for part in range(_TIERS - 1, 0, -1)]
    near = [part for part in parts if minimum < part < full]
    return [dataclasses.replace(options, hbm_bytes=part) for part in (*near, "index")]


def fewer_rows(options: HKVOptions, num_embeddings: int) -> list[HKVOptions]:
    """Variants with fewer rows, 3 % less each time.

    Args:
        options: options of the table. None are returned if they set a capacity.
        num_embeddings: rows in the config.
    """
    if options.capacity is not None or options.dense:
        return []
    counts, part = [], _STEP
    while part >= _FEWEST:
        counts.append(int(num_embeddings * part))
        part *= _STEP
    return [dataclasses.replace(options, capacity=rows) for rows in dict.fromkeys(counts) if rows]
