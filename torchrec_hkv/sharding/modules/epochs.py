"""The epoch of tables with the eviction policies ``"epoch_lru"`` and ``"epoch_lfu"``."""

from __future__ import annotations

from torch import nn

from torchrec_hkv.hash_table.spec_checks import check_range
from torchrec_hkv.sharding.state.names import named_collections

_LAST = (1 << 32) - 1


def set_epoch(model: nn.Module, epoch: int) -> None:
    """Sets the epoch of all tables of a model under ``"epoch_lru"`` or ``"epoch_lfu"``.

    Call it on every rank with the same number at the beginning of an epoch, such as a day of data
    or a pass over it. A full table then evicts ids of earlier epochs before those of later ones.
    The epoch applies to lookups from now on. In a train pipeline these are the lookups of the
    batches that ``progress`` has not looked up yet. Does not synchronize. Checkpoints store the
    epoch.

    Args:
        model: the sharded model.
        epoch: 0 to 2^32 - 1; 0 at first. It may decrease.

    Raises:
        ValueError: ``epoch`` is out of range, or no table of the model has epochs. Nothing has
            changed then.
    """
    check_range("set_epoch", "epoch", epoch, 0, _LAST)
    collections = [collection for _, collection in named_collections(model)]
    tables = [table for collection in collections for table in collection.sharded_tables().values()]
    if not any(table.planned.shards[0].options.has_epochs for table in tables):
        raise ValueError(
            "set_epoch needs a table with epochs, but the model has none: give a table "
            "HKVOptions(eviction='epoch_lru') or 'epoch_lfu'."
        )
    for collection in collections:
        for lookup in set(collection.group_lookups().values()):
            lookup.set_epoch(epoch)


def get_epoch(model: nn.Module) -> int:
    """The epoch set by :func:`set_epoch` or loaded from a checkpoint; 0 at first, and on a rank
    without tables.

    Args:
        model: the sharded model.
    """
    lookups = [
        lookup
        for _, collection in named_collections(model)
        for lookup in collection.group_lookups().values()
    ]
    return max((lookup.epoch() for lookup in lookups), default=0)
