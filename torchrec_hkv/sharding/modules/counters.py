"""Counters of a sharded model's tables on this rank."""

from __future__ import annotations

from torch import nn

from torchrec_hkv.sharding.state.names import joined, named_collections


def table_counters(model: nn.Module) -> dict[str, dict[str, int]]:
    """Counters of each table on a backend that this rank holds, by full name.

    Synchronizes with the device, so do not call it in every step.

    Args:
        model: a sharded model, or a submodule of one.

    Returns:
        The counters of each table by its key in the ``state_dict`` without ``.weight``, such as
        ``"ebc.embedding_bags.user"``. A column shard that does not begin at column 0 has ``/`` and
        its first column appended. Hash tables have ``lookups``, ``hits``, ``inserted``,
        ``evicted``, ``refused``, ``size``, ``capacity`` and more
        (:meth:`torchrec_hkv.hash_table.TableGroup.counters`). The counts are those of this rank;
        add them up over ranks.
    """
    return {
        joined(prefix, key): lookup.counters(key)
        for prefix, collection in named_collections(model)
        for key, lookup in collection.group_lookups().items()
    }
