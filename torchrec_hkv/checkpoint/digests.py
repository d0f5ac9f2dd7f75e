"""Digests of the tables of a sharded model, to compare the contents of two models."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from torchrec_hkv.collective import on_every_rank
from torchrec_hkv.sharding.state.names import named_tables


def digest(model: nn.Module) -> dict[str, str]:
    """Computes a digest of each hash table: of its ids, rows, optimizer states, scores and last
    steps.

    The digest depends on the entries only, not on the sharding or on the order in which ids
    arrived. A difference of one bit in one value changes it. It does not protect against forgery. A
    collective call that waits for the device. In a ``DMPCollection`` it covers the first replica.

    Args:
        model: sharded.

    Returns:
        Digests by the full names of tables, such as ``"ebc.embedding_bags.user"``. A digest is the
        number of entries, ``-``, and 16 hexadecimal digits. Tables whose values are in the
        ``state_dict``, such as stock tables, have no digest.
    """
    parts = on_every_rank(lambda: _local(model))
    sums: dict[str, list[int]] = {}
    for part in parts:
        for name, (entries, value) in part.items():
            total = sums.setdefault(name, [0, 0])
            total[0] += entries
            total[1] += value
    return {name: f"{entries}-{value % (1 << 64):016x}" for name, (entries, value) in sums.items()}


def _local(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Number of entries and sum of digests on this rank, by the full names of tables."""
    sums: dict[str, tuple[int, int]] = {}
    for name, table in named_tables(model).items():
        if not table.has_files or not table.collection.is_first_replica:
            continue
        lookups = table.collection.group_lookups()
        keys = table.state.keys_on(dist.get_rank())
        digests = [lookups[key].digest(key) for key in keys]
        sums[name] = (sum(m[0] for m in digests), sum(m[1] for m in digests))
    return sums
