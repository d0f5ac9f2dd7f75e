"""What the tables of a sharded model have counted on this rank."""

from __future__ import annotations

from torch import nn

from torchrec_hkv.sharding.state.names import joined, named_collections


def table_counters(model: nn.Module) -> dict[str, dict[str, int]]:
    """Counts of each table on a backend that this rank holds, by full name.

    Waits for the device, so it belongs to every so many steps, not to each.

    Args:
        model: a sharded model, or a part of one.

    Returns:
        For each table what its backend counts, by its key in the ``state_dict`` without
        ``.weight``, such as ``"ebc.embedding_bags.user"``; a column shard has ``/`` and its first
        column behind it where that is not 0. Hash tables give ``lookups``, ``hits``, ``inserted``,
        ``evicted``, ``refused``, ``size`` and ``capacity``. All are this rank's own: add them up
        over ranks.
    """
    return {
        joined(prefix, key): lookup.counters(key)
        for prefix, collection in named_collections(model)
        for key, lookup in collection.group_lookups().items()
    }
