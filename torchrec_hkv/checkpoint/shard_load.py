"""Loads the tables that have files of their own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torchrec_hkv.backends.protocol import GroupLookup
from torchrec_hkv.backends.save_types import FileOptions, LoadCounts, SavedShard, TablesLoad
from torchrec_hkv.checkpoint.layers import Layers, saved_shards
from torchrec_hkv.collective import this_rank
from torchrec_hkv.sharding.modules.collection import ShardedTable
from torchrec_hkv.warn import warn


def are_untouched(tables: Mapping[str, ShardedTable]) -> bool:
    """Whether this rank's shards of all tables with files are empty and have not been used."""
    rank = this_rank()
    return all(
        table.collection.group_lookups()[shard.key].is_untouched()
        for table in tables.values()
        if table.has_files
        for shard, holder in zip(table.state.shards, table.state.ranks, strict=True)
        if holder == rank
    )


def open_tables(
    layers: Layers,
    tables: Mapping[str, ShardedTable],
    options: FileOptions,
) -> list[GroupLoad]:
    """Opens the saved tables for each group of tables on this rank.

    Raises:
        ValueError: a folder is damaged.
    """
    rank = this_rank()
    by_lookup: dict[GroupLookup, dict[str, tuple[list[SavedShard], tuple[int, int]]]] = {}
    names: dict[GroupLookup, dict[str, str]] = {}
    for key, table in tables.items():
        if not table.has_files:
            continue
        saved = saved_shards(layers, key)
        lookups = table.collection.group_lookups()
        for shard, holder in zip(table.state.shards, table.state.ranks, strict=True):
            if holder == rank:
                of_group = by_lookup.setdefault(lookups[shard.key], {})
                of_group[shard.key] = (saved, table.state.owners(shard))
                names.setdefault(lookups[shard.key], {})[shard.key] = key
    return [
        GroupLoad(lookup.open_files(saved, options), names[lookup])
        for lookup, saved in by_lookup.items()
    ]


@dataclasses.dataclass(frozen=True)
class GroupLoad:
    """A load of the tables of one group.

    Attributes:
        load: the backend's load.
        tables: full names of tables, by the keys of their shards.
    """

    load: TablesLoad
    tables: Mapping[str, str]

    def run(self) -> list[tuple[str, LoadCounts]]:
        """Loads the tables. Returns, for each shard, the full name of its table and the number of
        entries that were loaded and lost."""
        return [(self.tables[key], placed) for key, placed in self.load.run().items()]


def warn_of_losses(placed: Mapping[str, LoadCounts]) -> None:
    """Warns once about all entries that found no slot.

    Args:
        placed: numbers of entries over all ranks, by the full names of tables.
    """
    parts = [
        f"{result.lost} of {result.entries} ({100 * result.lost / result.entries:.2f} %) of table "
        f"{name!r}"
        for name, result in placed.items()
        if result.lost
    ]
    if parts:
        warn(
            "Entries of the checkpoint found no place and were left out, those of the lowest "
            f"scores: {', '.join(parts)}. Larger num_embeddings take all; "
            "allow_loss=False refuses such a load."
        )
