"""Ranks that a Tensor-Train table may have, and the quality it keeps with them."""

from __future__ import annotations

import dataclasses

import torch

from torchrec_hkv.backends.specs import Kept, TableShard
from torchrec_hkv.backends.tt.options import TTOptions
from torchrec_hkv.backends.tt.table import options_of, shape_of
from torchrec_hkv.backends.workload import IdFrequencies

#: Ranks to try. Kernels are fastest for multiples of four.
_RANKS = (1, 2, 3, *range(4, 257, 4), *range(272, 1025, 16))


def kept_quality(
    table: TableShard, dtype: torch.dtype, frequencies: IdFrequencies | None
) -> list[Kept]:
    """Implements :meth:`Backend.kept`: bytes of cores and cached rows over those of dense rows for
    the ids that occur."""
    shape, cache = shape_of(table), options_of(table).cache
    ids = table.num_embeddings
    if frequencies is not None:
        ids = min(ids, frequencies.num_ids)
    dense = ids * table.embedding_dim * dtype.itemsize
    core_bytes = shape.num_elements * table.dtype.itemsize
    core_bytes += 0 if cache is None else 4 * cache.rows * table.embedding_dim
    if core_bytes >= dense:
        return []
    ranks = " and ".join(map(str, shape.ranks))
    return [
        Kept(
            "compression",
            core_bytes / dense,
            f"ranks {ranks} keep {core_bytes / dense:.2%} of bytes",
        )
    ]


def rank_variants(shard: TableShard) -> list[TTOptions]:
    """Options with increasing ranks, up to the size of dense rows, for a table that leaves ranks
    open."""
    options = options_of(shard)
    if not options.leaves_ranks_open:
        return []
    dense, last, found = shard.num_embeddings * shard.embedding_dim, None, []
    for rank in _RANKS:
        variant = dataclasses.replace(options, ranks=rank)
        shape = variant.shape(shard.num_embeddings, shard.embedding_dim, shard.dtype.itemsize)
        if shape.ranks == last or shape.num_elements >= dense:
            break
        last = shape.ranks
        found.append(variant)
    return found
